"""Splitting, partition, validation and the prepared folder, end to end on small files."""

import json
import time
from collections import Counter, defaultdict
from dataclasses import asdict, replace
from itertools import product

import pandas as pd
import pytest

from components.config import DataConfig
from components.data import sources
from components.data.data_report import Limits, read_report
from components.data.prepare import assemble, prepare
from components.data.records import DataError, Pair, read_clients, read_rows
from components.data.same_text import same_text
from components.data.splits import (
    assign_splits,
    conversation_warning,
    grouped,
    one_spelling,
)
from components.data.validation import validate
from tests.support.sources import WHOLE_FILE, data_config, prepared_rows, write_jsonl


@pytest.fixture
def own(fixtures):
    return {"source": "jsonl", "path": str(fixtures / "pairs.jsonl")}


def test_a_prompts_split_is_a_function_of_seed_and_prompt_with_the_configured_shares():
    groups = [f"question {i}" for i in range(5000)]
    splits = assign_splits(groups, 0.1, 0.2, seed=1)
    counts = Counter(splits)
    assert abs(counts["test"] / 5000 - 0.2) < 0.02
    assert abs(counts["validation"] / 5000 - 0.1) < 0.02
    assert assign_splits(reversed(groups), 0.1, 0.2, seed=1) == splits[::-1]
    assert assign_splits(groups, 0.1, 0.2, seed=2) != splits


@pytest.mark.parametrize(
    "partition",
    [{"partition": "natural"}, {"partition": "dirichlet", "clients": 4}, {"partition": "iid", "clients": 4}],
)
def test_every_pair_is_prepared_or_counted_and_no_prompt_is_in_two_splits(own, tmp_path, partition):
    report = prepare(DataConfig(**own, **partition), 0, tmp_path / "data")
    rows, judge, prompts = (prepared_rows(tmp_path / "data", name) for name in ("pairs", "judge", "prompts"))
    counted = report.rows
    assert counted.source == counted.pairs == len(rows)
    assert len(rows) + len(judge) + counted.dropped["prompt given to the server"] == 60  # the file's lines
    splits = defaultdict(set)
    for row in (*rows, *judge, *prompts):
        splits[row["prompt"]].add(row["split"])
    assert all(len(s) == 1 for s in splits.values())
    assert {"train", "test"} <= set(report.splits)
    assert report.splits["train"]
    assert report.splits["test"]
    if partition["partition"] != "natural":
        assert len({(r["group"], r["client_id"]) for r in rows}) == len({r["group"] for r in rows})
        assert {r["client_id"] for r in rows} == {f"client-0{i}" for i in range(4)}


def two_spellings(source, folder):
    """A file or folder of a source in which each of 60 prompts stands twice, in two spellings."""
    texts = []
    for i in range(60):
        for k, text in enumerate((f"p{i} what?", f" P{i}  What?")):
            good = f"Good {i} {k}." + " More." * (i % 3)
            texts.append((text, good, f"Bad {i} {k}." + " And more." * ((k + i) % 2)))
    told = [
        {"chosen": f"\n\nHuman: {p}\n\nAssistant: {c}", "rejected": f"\n\nHuman: {p}\n\nAssistant: {r}"}
        for p, c, r in texts
    ]
    rows = {
        "hh-rlhf": told,
        "auto-j": [
            {"scenario": "s", "label": 0, "prompt": p, "response 1": c, "response 2": r} for p, c, r in texts
        ],
        "jsonl": [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in texts],
    }
    parts = (
        {"train": told[::-1][:-24], "test": told[:48:2]}
        if source == "hh-rlhf, split"
        else {"pairs": rows[source]}
    )
    for name, lines in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    return str(folder if len(parts) > 1 else folder / "pairs.jsonl")


@pytest.mark.parametrize("source", ["jsonl", "hh-rlhf", "hh-rlhf, split", "auto-j"])
def test_prompts_that_differ_in_case_and_white_space_only_are_in_one_split_and_one_client(source, tmp_path):
    path = two_spellings(source, tmp_path)
    prepare(
        DataConfig(source=source.partition(",")[0], path=path, partition="iid", clients=3),
        0,
        tmp_path / "data",
    )
    spellings = defaultdict(set)
    splits = defaultdict(set)
    clients = defaultdict(set)
    for name in ("pairs", "judge", "prompts"):
        for row in prepared_rows(tmp_path / "data", name):
            key = same_text(row["prompt"])
            spellings[key].add(row["prompt"])
            splits[key].add(row["split"])
            if name == "pairs":
                clients[key].add(row["client_id"])
    assert sum(len(s) == 2 for s in spellings.values()) > 25
    assert {"train", "test", "align"} <= set.union(*splits.values())
    assert all(len(s) == 1 for s in splits.values())
    assert all(len(c) == 1 for c in clients.values())


@pytest.mark.parametrize(
    ("source", "file"), [("jsonl", "pairs.jsonl"), ("hh-rlhf", "hh.jsonl"), ("auto-j", "auto_j.jsonl")]
)
def test_a_prompt_of_one_spelling_is_split_by_the_hash_of_its_text(source, file, fixtures):
    data = DataConfig(source=source, path=str(fixtures / file))
    loaded = sources.load(data, 0)
    rows = [*loaded.pairs, *loaded.judge]
    assert len(rows) > 5
    assert [r.split for r in rows] == assign_splits([r.prompt for r in rows], data.validation, data.test, 0)
    assert all(r.group == r.prompt for r in rows)


def test_the_smallest_spelling_is_the_group_of_all_in_any_order():
    spellings = ["b ", "B", "a", "b"]
    assert (
        one_spelling(spellings) == one_spelling(spellings[::-1]) == {"b ": "B", "B": "B", "b": "B", "a": "a"}
    )
    pairs = [Pair(prompt, "yes", "no") for prompt in spellings]
    assert [pair.group for pair in grouped(pairs)] == ["B", "B", "a", "B"]


def test_groups_that_share_a_prompt_become_the_smallest_of_them_and_others_stay():
    asked = [("hi", "t3"), ("order?", "t3"), ("Hi ", "t1"), ("bye", "t2"), ("hi", None), ("else", None)]
    pairs = [Pair(prompt, "yes", "no", group=group) for prompt, group in asked]
    assert [pair.group for pair in grouped(pairs)] == ["t1", "t1", "t1", "t2", "t1", "else"]
    assert [pair.group for pair in grouped(pairs[::-1])] == ["else", "t1", "t2", "t1", "t1", "t1"]


def turns_of(name, count=3):
    """Pairs of one conversation: the prompt of each goes on after that of the one before and its answer."""
    prompt = f"Where is parcel {name}?"
    pairs = []
    for n in range(count):
        pairs.append(Pair(prompt, f"At stop {n}.", f"Gone, {n}.", split=""))
        answer = (f"At stop {n}.", f"Gone, {n}.")[n % 2]
        begin = prompt if n else f"Human: {prompt}"
        prompt = f"{begin}\n\nAssistant: {answer}\n\nHuman: And {n}?"
    return pairs


def test_pairs_that_go_on_with_a_conversation_of_another_split_are_counted():
    rows = [(*pair.texts, split) for pair, split in zip(turns_of(1), ("train", "test", "train"), strict=True)]
    assert conversation_warning(rows).startswith(
        "2 of 3 pairs go on with the conversation of a pair in another"
    )
    assert "column group" in conversation_warning(rows)
    assert conversation_warning([(*texts, "train") for *texts, _ in rows]) == ""


def test_conversations_that_only_begin_alike_or_quote_an_answer_are_not_counted():
    others = [
        "Human: Hi?\n\nAssistant: What?\n\nHuman: So?",
        "Hi?\nHello.\nSo?",
        "Human: Hi? Hello.\n\nAssistant: a",
        "Assistant: Hello.\n\nHuman: Well?",
    ]
    rows = [("Hi?", "Hello.", "Go.", "train"), *((text, "a", "b", "test") for text in others)]
    assert conversation_warning(rows) == ""


def test_many_conversations_that_begin_alike_are_counted_in_linear_time():
    greeted = [
        (f"Human: Hi?\n\nAssistant: Hello.\n\nHuman: Question {n}?", "a", "b", "test") for n in range(5000)
    ]
    started = time.monotonic()
    warning = conversation_warning([("Hi?", "Hello.", "Go.", "train"), *greeted])
    assert warning.startswith("5,000 of 5,001 pairs")
    assert time.monotonic() - started < 20


def test_turns_of_conversations_whose_rows_name_a_group_are_in_one_split(tmp_path):
    rows = [
        asdict(pair) | {"client_id": f"o{n % 6}", "group": f"g{n}"} for n in range(60) for pair in turns_of(n)
    ]
    data = data_config(source="jsonl", path=write_jsonl(tmp_path / "p.jsonl", rows), options=WHOLE_FILE)
    assert not any("conversation" in text for text in assemble(data, 0).warnings)
    alone = [{name: value for name, value in row.items() if name != "group"} for row in rows]
    data = data_config(source="jsonl", path=write_jsonl(tmp_path / "q.jsonl", alone), options=WHOLE_FILE)
    assert any("go on with the conversation" in text for text in assemble(data, 0).warnings)


def test_tldrs_copies_of_a_post_that_differ_in_spacing_are_in_one_split(tmp_path):
    def comparison(i, k):
        info = {
            "id": f"{i}-{k}",
            "post": f"It rained on day {i}." if k else f"It  RAINED on day {i}.",
            "title": "Rain",
            "subreddit": "tales",
        }
        return {
            "info": info,
            "summaries": [
                {"text": f"Rain {i}" + " again" * (i % 3)},
                {"text": f"Sun {k}" + " too" * (i % 2)},
            ],
            "choice": i % 2,
            "worker": f"w{i % 4}",
        }

    post = {"subreddit": "tales", "title": "Sun", "post": "The sun shone.", "summary": "Sun."}
    for name, rows in (
        ("comparisons", [comparison(i, k) for i, k in product(range(60), (0, 1))]),
        ("posts", [post]),
        ("posts_test", [post | {"post": "It snowed."}]),
    ):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    prepare(
        DataConfig(source="tldr", path=str(tmp_path), options={"judge_workers": 1, "align_share": 1.0}),
        0,
        tmp_path / "data",
    )
    splits = defaultdict(set)
    for row in (*prepared_rows(tmp_path / "data"), *prepared_rows(tmp_path / "data", "judge")):
        splits[same_text(row["prompt"])].add(row["split"])
    assert len(splits) == 60
    assert all(len(s) == 1 for s in splits.values())


def test_both_directions_of_a_disagreement_survive(tmp_path):
    """The reference code lost half of the pairs by an append under `if choice == 1`."""
    rows = [
        {"prompt": f"q{i}", "chosen": f"{'ab'[o]}{i}", "rejected": f"{'ba'[o]}{i}", "client_id": f"c{o}"}
        for i, o in product(range(40), (0, 1))
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    options = {"align_share": 0.0, "judge_clients": 0.0}
    prepare(DataConfig(source="jsonl", path=str(tmp_path / "p.jsonl"), options=options), 0, tmp_path / "data")
    key = ("prompt", "chosen", "rejected", "client_id")
    assert Counter(tuple(r[k] for k in key) for r in rows) == Counter(
        tuple(r[k] for k in key) for r in prepared_rows(tmp_path / "data")
    )


def test_the_prepared_folder_has_the_files_that_records_describes(own, tmp_path):
    folder = tmp_path / "runs" / "data"
    report = prepare(DataConfig(**own, partition="natural"), 0, folder, docs=True)
    assert {p.name for p in folder.iterdir()} == {
        "pairs.parquet",
        "judge.parquet",
        "prompts.parquet",
        "clients.json",
        "report.json",
        "docs",
    }
    assert (folder / "docs" / "index.html").is_file()
    assert read_report(folder) == report
    clients = read_clients(folder)
    for client, row in clients.items():
        for split in ("train", "validation", "test"):
            assert row[split] == len(read_rows(folder / "pairs.parquet", client_id=client, split=split))
    assert report.partition.clients == len(clients) == 3
    assert report.partition.samples == len(prepared_rows(folder))
    assert [p.name for p in folder.parent.iterdir()] == ["data"]


def test_preparing_again_replaces_the_folder_with_the_same_rows(own, tmp_path):
    folder = tmp_path / "data"
    prepare(DataConfig(**own), 0, folder)
    first = (folder / "pairs.parquet").read_bytes()
    (folder / "left-over").touch()
    prepare(DataConfig(**own), 0, folder)
    assert (folder / "pairs.parquet").read_bytes() == first
    assert not (folder / "left-over").exists()
    prepare(DataConfig(**own), 1, folder)
    assert (folder / "pairs.parquet").read_bytes() != first


def test_fewer_clients_than_owners_are_those_with_most_pairs_and_the_rest_is_counted(tmp_path):
    rows = []
    for c in range(4):
        for i in range(10 * (c + 1)):
            rows.append({"prompt": f"q{c}{i}", "chosen": f"y{i}", "rejected": f"n{i}", "client_id": f"c{c}"})
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    recipe = {
        "source": "jsonl",
        "path": str(tmp_path / "p.jsonl"),
        "options": {"align_share": 0.0, "judge_clients": 0.0},
    }
    report = prepare(DataConfig(**recipe, clients=2), 0, tmp_path / "data")
    assert set(read_clients(tmp_path / "data")) == {"c2", "c3"}
    assert report.rows.source == 100
    assert report.rows.pairs == 70
    assert report.rows.left_out == {"owner not among the clients": 30}
    assert report.rows.judge == 0
    assert report.rows.dropped == {}
    with pytest.raises(DataError, match=r"data.clients is 5, but source jsonl has only 4 owners"):
        prepare(DataConfig(**recipe, clients=5), 0, tmp_path / "data")


def test_max_pairs_samples_whole_prompts_of_every_split(own, tmp_path):
    whole = prepare(DataConfig(**own, partition="iid", clients=2), 0, tmp_path / "all")
    report = prepare(DataConfig(**own, partition="iid", clients=2, max_pairs=30), 0, tmp_path / "some")
    before, after = (Counter(r["prompt"] for r in prepared_rows(tmp_path / name)) for name in ("all", "some"))
    assert sum(after.values()) <= 30
    assert all(before[p] == n for p, n in after.items())
    assert report.splits["train"]
    assert report.splits["test"]
    assert report.rows.pairs + report.rows.left_out["over max_pairs"] == whole.rows.pairs


def test_owners_are_needed_for_the_natural_partition(fixtures, tmp_path):
    with pytest.raises(DataError, match="have no client_id: partition 'natural' needs an owner"):
        prepare(DataConfig(source="hh-rlhf", path=str(fixtures / "hh.jsonl")), 0, tmp_path / "data")
    with pytest.raises(DataError, match="partition 'iid': 50 clients cannot each own one of"):
        prepare(
            DataConfig(source="hh-rlhf", path=str(fixtures / "hh.jsonl"), partition="iid", clients=50),
            0,
            tmp_path / "data",
        )


def write_pairs(path, count, chosen, rejected):
    """A file of pairs with numbered prompts, whose completions begin in the same way."""
    rows = [
        {"prompt": f"question {n}?", "chosen": f"{chosen} {n}", "rejected": f"{rejected} {n}"}
        for n in range(count)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


# --- texts that are too long


@pytest.fixture
def one_long(tmp_path):
    """A file of 40 pairs, the last of which has a completion of 500 characters."""
    path = write_pairs(tmp_path / "long.jsonl", 40, chosen="yes", rejected="no, never")
    *rows, last = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows.append(last | {"rejected": "x" * 500})
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    owners = {"partition": "iid", "clients": 3}
    return {"source": "jsonl", "path": str(path), "options": {"align_share": 0.0}, **owners}


def test_a_pair_that_is_too_long_is_dropped_and_counted(one_long, tmp_path):
    report = prepare(DataConfig(**one_long, max_characters=499), 0, tmp_path / "data")
    assert report.rows.dropped["pair over max_characters"] == 1
    assert report.rows.pairs == 32
    rows = prepared_rows(tmp_path / "data", "pairs")
    assert max(len(row["rejected"]) for row in rows) < 500


def test_a_pair_of_just_the_maximum_is_kept(one_long, tmp_path):
    report = prepare(DataConfig(**one_long, max_characters=500), 0, tmp_path / "data")
    assert report.rows.pairs == 33
    assert not report.rows.dropped


def test_more_long_pairs_than_the_share_that_may_be_dropped_are_an_error(one_long, tmp_path):
    data = DataConfig(**one_long, max_characters=499, max_dropped=0.02)
    with pytest.raises(DataError, match=r"1 of 33 pairs of source jsonl.*499 characters.*data\.max_dropped"):
        prepare(data, 0, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_other_prompts_that_are_too_long_are_dropped_and_counted(one_long, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    texts = [f"another question {n}?" for n in range(30)] + ["y" * 600]
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in texts), encoding="utf-8")
    section = {"source": "safe-rlhf", "path": str(prompts)}
    data = DataConfig(**one_long, max_characters=550, align_prompts=section)
    report = prepare(data, 0, tmp_path / "data")
    assert report.prompts["align"].left_out == {"over max_characters": 1}
    assert report.rows.prompts["align"] == 30


def test_data_that_fail_leave_the_data_docs_and_the_earlier_folder_unchanged(own, tmp_path):
    folder = tmp_path / "data"
    prepare(DataConfig(**own), 0, folder)
    before = (folder / "pairs.parquet").read_bytes()
    equal = write_pairs(tmp_path / "equal.jsonl", 80, chosen="no", rejected="no")
    with pytest.raises(DataError, match=r"chosen differs from rejected \(data.max_equal\)") as error:
        data = DataConfig(source="jsonl", path=str(equal), partition="iid", clients=3)
        prepare(data, 0, folder, docs=True)
    equal.unlink()
    docs = tmp_path / "data.rejected" / "docs" / "index.html"
    assert "label balance" not in str(error.value)
    assert docs.is_file()
    assert str(docs) in str(error.value)
    assert (folder / "pairs.parquet").read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"data", "data.rejected"}
    prepare(DataConfig(**own), 0, folder)
    assert {p.name for p in tmp_path.iterdir()} == {"data"}


# --- the suite


def good(n: int = 60) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "prompt": f"question {i}",
                "chosen": f"yes {i}" + " indeed" * (i % 2),
                "rejected": f"no {i}" + " not at all" * (i % 3),
                "client_id": f"c{i % 3}",
                "domain": "d",
                "source": "s",
                "pair_id": f"p{i}",
                "split": "test" if i % 5 == 0 else "train",
                "group": f"question {i}",
            }
            for i in range(n)
        ]
    )


def check(
    pairs: pd.DataFrame,
    prompts: pd.DataFrame | None = None,
    judge: pd.DataFrame | None = None,
    docs=None,
    one_client_groups=True,
):
    prompts = (
        pd.DataFrame([{"prompt_id": "1", "prompt": "other", "references": [], "split": "align"}])
        if prompts is None
        else prompts
    )
    judge = pairs.iloc[:0] if judge is None else judge
    tables = {"pairs": pairs, "judge": judge, "prompts": prompts}
    return validate(tables, Limits(["c0", "c1", "c2"], 200, one_client_groups), docs)


def changed(column: str, rows: slice, value) -> pd.DataFrame:
    pairs = good()
    pairs.loc[rows, column] = value
    return pairs


def test_good_data_pass_and_every_expectation_is_reported():
    summary = check(good())
    names = {outcome.expectation for outcome in summary.expectations}
    assert summary.success
    assert all(outcome.success for outcome in summary.expectations)
    assert {
        "no prompt in two splits",
        "no group in two clients",
        "chosen differs from rejected (data.max_equal)",
        "the client is known",
    } <= names
    assert sum(name.startswith("label balance") for name in names) == 2


@pytest.mark.parametrize(
    ("column", "rows", "value", "expectation", "count"),
    [
        ("prompt", slice(1, 2), "  \n", "prompt is not empty", 2),
        ("chosen", slice(1, 2), "", "chosen is not empty", 2),
        ("rejected", slice(3, 3), None, "rejected is there", 1),
        ("chosen", slice(0, 6), "x" * 201, "chosen has at most 200 characters", 7),
        ("client_id", slice(2, 2), "stranger", "the client is known", 1),
        ("split", slice(2, 2), "dev", "the split is known", 1),
        ("pair_id", slice(4, 5), "same", "the pair_id is unique", 2),
        ("prompt", slice(0, 1), "asked twice", "no prompt in two splits", 2),
        ("prompt", slice(0, 0), " Question\n1", "no prompt in two splits", 2),
        ("group", slice(0, 1), "one question", "no group in two splits", 2),
        ("group", slice(1, 2), "one question", "no group in two clients", 2),
    ],
)
def test_each_expectation_can_fail_and_names_itself_and_its_rows(column, rows, value, expectation, count):
    with pytest.raises(DataError, match=f"'{expectation}'.* fails in {count} of 60 rows"):
        check(changed(column, rows, value))


def test_pairs_of_equal_completions_are_refused_above_the_share_that_is_allowed():
    pairs = good()
    pairs.loc[7, "rejected"] = pairs.loc[7, "chosen"] + " "
    with pytest.raises(
        DataError, match=r"'chosen differs from rejected .data.max_equal.'.* fails in 1 of 60 rows"
    ):
        check(pairs)
    pairs = good()
    pairs.loc[:2, "rejected"] = pairs.loc[:2, "chosen"]
    tables = {"pairs": pairs, "judge": pairs.iloc[:0], "prompts": pairs.iloc[:0]}
    limits = Limits(["c0", "c1", "c2"], 200, True, max_equal=0.05)
    assert validate(tables, limits, None).success
    with pytest.raises(
        DataError, match=r"'chosen differs from rejected .data.max_equal.'.* fails in 3 of 60 rows"
    ):
        validate(tables, replace(limits, max_equal=0.04), None)


def test_a_client_without_a_pair_is_refused():
    pairs = good()
    with pytest.raises(DataError, match=r"'every client has a pair'.* fails for the 40 rows as a whole"):
        check(pairs[pairs["client_id"] != "c2"].reset_index(drop=True))


def test_groups_in_two_clients_are_refused_only_where_the_partition_promises_it():
    assert check(changed("group", slice(1, 2), "one question"), one_client_groups=False).success


def test_a_training_prompt_must_be_no_test_prompt_of_the_server_or_a_client():
    prompts = pd.DataFrame([{"prompt_id": "1", "prompt": "question 1", "references": [], "split": "test"}])
    with pytest.raises(DataError, match=r"pairs: 'no prompt in two splits'.* fails in 1 of 60 rows"):
        check(good(), prompts)
    judge = good(1).assign(client_id="judge", split="train", pair_id="j")
    with pytest.raises(DataError, match=r"'no prompt in two splits'.* fails in 2 of 61 rows"):
        check(good(), judge=judge)


@pytest.mark.parametrize(
    ("column", "other", "share"), [("chosen", "rejected", 100), ("rejected", "chosen", 0)]
)
def test_labels_that_are_nothing_but_lengths_are_a_warning_with_the_share(column, other, share):
    pairs = good()
    pairs[column] = pairs[other] + " and more"
    summary = check(pairs)
    assert summary.success
    (warning,) = summary.warnings
    assert warning.startswith(f"in {share}.0% of 60 pairs the chosen completion is the longer one")


def test_an_answer_that_always_wins_is_refused():
    with pytest.raises(DataError, match="chosen comes first in a label-free order'"):
        check(good().assign(chosen="A", rejected="B"))


def test_a_failure_names_five_rows_without_their_texts_and_prints_nothing(capfd):
    with pytest.raises(DataError) as error:
        check(changed("chosen", slice(0, 9), "word " * 60))
    (ids,) = [line for line in str(error.value).splitlines() if line.startswith("    pair_id: ")]
    assert len(ids.split(", ")) == 5
    assert "word" not in str(error.value)
    assert capfd.readouterr() == ("", "")  # no progress bars, no log lines


def test_a_client_that_is_an_owner_of_the_judges_pairs_too_is_refused(tmp_path):
    rows = [
        {
            "prompt": f"question {i}",
            "chosen": f"long answer {i}" if i % 2 else f"yes {i}",
            "rejected": f"no {i}" if i % 2 else f"a longer no {i}",
            "client_id": "judge" if i % 3 else "ada",
        }
        for i in range(60)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(DataError, match=r"owners are clients and the judge's too \(judge\)"):
        prepare(DataConfig(source="jsonl", path=str(path)), 0, tmp_path / "prepared")
