"""The source mixture: several sources, each a client, on small files written for these tests."""

from collections import Counter, defaultdict
from itertools import product

import pytest

from components.config import DataConfig
from components.data import sources
from components.data.prepare import prepare
from components.data.records import DataError, read_clients
from components.data.same_text import same_text
from components.data.splits import assign_splits, sample
from tests.support.sources import WHOLE, WHOLE_FILE, data_config, prepared_rows, write_jsonl


def pair(i, of, **more):
    return {
        "prompt": f"question {i}",
        "chosen": f"{of} says yes to {i}" + " indeed" * (i % 2),
        "rejected": f"{of} says no to {i}" + " not at all" * (i % 3),
    } | more


def own(folder, name, rows, **more):
    """A file of the user's own pairs as a part of a mixture."""
    return {
        "source": "jsonl",
        "name": name,
        "path": write_jsonl(folder / f"{name}.jsonl", rows),
        "options": WHOLE_FILE,
    } | more


def mixture(*parts, **more):
    return data_config(source="mixture", options={"sources": list(parts)}, **more)


def split_of(prompt, data):
    return assign_splits([prompt], data.validation, data.test, 0)[0]


def test_each_source_is_a_client_with_its_own_domains_and_labels(tmp_path):
    code = [
        {
            "lang": ("Go", "PHP")[i % 2],
            "vulnerability": "",
            "system": "",
            "question": f"Write {i}.",
            "chosen": f"safe({i})" + "#" * (i % 2),
            "rejected": f"unsafe({i})",
        }
        for i in range(60)
    ]
    parts = [
        {"source": "code-vulnerability", "path": write_jsonl(tmp_path / "code.jsonl", code)},
        own(tmp_path, "talk", [pair(i, "talk", margin=i, client_id="someone") for i in range(60)]),
    ]
    report = prepare(mixture(*parts), 0, tmp_path / "data")
    rows = prepared_rows(tmp_path / "data")
    assert {(r["client_id"], r["source"], r["domain"]) for r in rows} == {
        ("code-vulnerability", "code-vulnerability", d) for d in ("Go", "PHP")
    } | {("talk", "jsonl", "talk")}
    assert list(read_clients(tmp_path / "data")) == ["code-vulnerability", "talk"]
    assert report.partition.clients == 2
    assert all(r["chosen"].startswith(("safe", "talk says yes")) for r in rows)
    assert len({r["pair_id"] for r in rows}) == len(rows)
    assert {r["prompt"]: r["margin"] for r in rows if r["client_id"] == "talk"} == {
        f"question {i}": float(i) for i in range(60)
    }
    judged = prepared_rows(tmp_path / "data", "judge")
    dropped = report.rows.dropped
    assert {(r["client_id"], r["source"]) for r in judged} == {("judge", "code-vulnerability")}
    assert set(dropped) == {"code-vulnerability: prompt given to the server"}
    assert len(rows) + len(judged) + sum(dropped.values()) == 120


def test_the_judges_pairs_and_the_servers_prompts_of_all_sources_are_concatenated(tmp_path):
    shares = {"align_share": 0.3, "judge_clients": 0.3}
    parts = [
        own(tmp_path, name, [pair(i, name) | {"prompt": f"{name} {i}"} for i in range(60)], options=shares)
        for name in ("tea", "coffee")
    ]
    prepare(mixture(*parts), 0, tmp_path / "data")
    judged = prepared_rows(tmp_path / "data", "judge")
    prompts = prepared_rows(tmp_path / "data", "prompts")
    assert {r["client_id"] for r in judged} == {"judge"}
    assert {r["prompt"].split()[0] for r in judged} == {
        "tea",
        "coffee",
    }
    assert {(r["prompt"].split()[0], r["split"]) for r in prompts} == set(
        product(("tea", "coffee"), ("align", "test"))
    )


def test_a_prompt_of_two_sources_is_in_one_split_and_once_among_the_servers_prompts(tmp_path):
    parts = [
        own(tmp_path, name, [pair(i, name) for i in range(80)], options=WHOLE_FILE | {"align_share": 0.3})
        for name in ("a", "b")
    ]
    data = sources.load(mixture(*parts), 0)
    splits = defaultdict(set)
    for row in (*data.pairs, *data.prompts):
        splits[row.prompt].add(row.split)
    assert len(splits) == 80
    assert all(len(s) == 1 for s in splits.values())
    assert set(data.dropped) == {"a: prompt given to the server", "b: prompt given to the server"}
    assert all(row.split == split_of(row.prompt, mixture(*parts)) for row in data.pairs)
    counts = Counter(row.client_id for row in data.pairs)
    assert counts["a"] == counts["b"]
    tested = [row for row in data.prompts if row.split == "test"]
    assert len(data.prompts) == len({row.prompt for row in data.prompts})
    assert all(len(row.references) == 2 for row in tested)
    assert len(tested) > 5


@pytest.mark.parametrize("spelled", ["question {}", " Question  {}"])
def test_where_splits_of_two_sources_differ_the_most_held_out_one_is_used_and_other_rows_are_counted(
    tmp_path, spelled
):
    first = [pair(i, "a", split=("train", "validation", "test")[i % 3]) for i in range(60)]
    second = [pair(i, "b", prompt=spelled.format(i), split=("train", "test")[i % 2]) for i in range(60)]
    data = sources.load(mixture(own(tmp_path, "a", first), own(tmp_path, "b", second)), 0)
    expected_splits = {
        i: "test" if i % 3 == 2 or i % 2 else "validation" if i % 3 == 1 else "train" for i in range(60)
    }
    rows = {(r.client_id, int(r.prompt.split()[1]), r.split) for r in data.pairs}
    assert rows == {("a", i, s) for i, s in expected_splits.items() if first[i]["split"] == s} | {
        ("b", i, s) for i, s in expected_splits.items() if second[i]["split"] == s
    }
    assert data.dropped == {
        "a: prompt held out in another source": 20,
        "b: prompt held out in another source": 20,
    }
    prepare(
        mixture(own(tmp_path, "a", first), own(tmp_path, "b", second)), 0, tmp_path / "data"
    )  # whose suite refuses a prompt in two splits


def test_prompts_of_the_judge_and_the_server_that_another_source_holds_out_are_dropped(
    tmp_path,
):
    rows = [pair(i, "a", split="train") for i in range(60)]
    held_out = [pair(i, "b", split="test" if i < 30 else "train") for i in range(60)]
    data = sources.load(
        mixture(
            own(tmp_path, "a", rows, options={"align_share": 0.4, "judge_clients": 0.4}),
            own(tmp_path, "b", held_out),
        ),
        0,
    )
    assert data.judge
    assert {int(r.prompt.split()[1]) for r in data.judge} <= set(range(30, 60))
    assert data.dropped["a: prompt held out in another source"] > 0
    assert {row.split for row in data.prompts} == {"test"}
    alone = sources.load(
        DataConfig(
            source="jsonl", path=str(tmp_path / "a.jsonl"), options={"align_share": 0.4, "judge_clients": 0.4}
        ),
        0,
    )
    assert {int(r.prompt.split()[1]) for r in alone.judge} & set(range(30))
    assert "align" in [row.split for row in alone.prompts], "or nothing is tested here"


def test_groups_of_two_sources_are_distinct_unless_they_are_the_prompt(tmp_path):
    parts = [
        own(
            tmp_path,
            name,
            [pair(i, name, prompt=f"{name} {i}", group=f"g{i % 20}") for i in range(60)]
            + [pair(99, name, prompt=text, split="train") for text in spelled],
        )
        for name, spelled in (("a", ["Shared?", "SHARED?"]), ("b", ["shared? "]))
    ]
    data = sources.load(mixture(*parts), 0)
    assert {r.group for r in data.pairs if r.client_id == "a"} - {"SHARED?"} == {f"a/g{i}" for i in range(20)}
    assert {r.group for r in data.pairs if same_text(r.prompt) == "shared?"} == {"SHARED?"}
    prepare(mixture(*parts, partition="iid", clients=4), 0, tmp_path / "data")
    owners = defaultdict(set)
    for row in prepared_rows(tmp_path / "data"):
        owners[same_text(row["prompt"])].add(row["client_id"])
    assert all(len(clients) == 1 for clients in owners.values())


def test_max_pairs_of_a_source_samples_whole_prompts_as_that_of_the_recipe_does(tmp_path):
    rows = [pair(i // 2, "a", chosen=f"yes {i}" + " so" * (i % 3)) for i in range(160)]
    parts = [
        own(tmp_path, "a", rows),
        own(tmp_path, "b", [pair(i, "b", prompt=f"other {i}") for i in range(60)]),
    ]
    whole = sources.load(mixture(*parts), 0)
    some = sources.load(mixture(parts[0] | {"max_pairs": 50}, parts[1]), 0)
    sampled = Counter(r.prompt for r in some.pairs if r.client_id == "a")
    assert 40 < sampled.total() <= 50
    assert set(sampled.values()) == {2}
    assert some.dropped == {"a: over max_pairs": 160 - sampled.total()}
    assert [r for r in some.pairs if r.client_id == "b"] == [r for r in whole.pairs if r.client_id == "b"]
    prepare(
        DataConfig(
            source="jsonl",
            path=parts[0]["path"],
            options=WHOLE_FILE,
            max_pairs=50,
            partition="iid",
            clients=2,
        ),
        0,
        tmp_path / "data",
    )
    assert {r["prompt"] for r in prepared_rows(tmp_path / "data")} == set(sampled)
    own_rows = [r for r in whole.pairs if r.client_id == "a"]
    assert sample([r.prompt for r in own_rows], [r.split for r in own_rows], 50, 1) != set(sampled), (
        "another seed, another sample"
    )


def test_max_pairs_of_each_split_limits_it_alone(tmp_path):
    parts = [own(tmp_path, name, [pair(i, name) for i in range(200)]) for name in ("a", "b")]
    everything = sources.load(mixture(*parts, test=0.2, validation=0.1), 0)
    whole = Counter(row.split for row in everything.pairs if row.client_id == "a")
    limited = parts[0] | {"max_pairs": {"train": 50, "test": 7}}
    loaded = sources.load(mixture(limited, parts[1], test=0.2, validation=0.1), 0)
    counts = Counter((row.client_id, row.split) for row in loaded.pairs)
    assert (counts["a", "train"], counts["a", "test"]) == (50, 7)
    assert counts["a", "validation"] == whole["validation"]
    assert counts["b", "train"] == whole["train"]


def test_a_source_may_have_a_test_share_of_its_own(tmp_path):
    parts = [
        own(tmp_path, name, [pair(i, name, prompt=f"{name} {i}") for i in range(400)]) for name in ("a", "b")
    ]
    loaded = sources.load(mixture(parts[0] | {"test": 0.5}, parts[1], test=0.1, validation=0.0), 0)
    counts = Counter((row.client_id, row.split) for row in loaded.pairs)
    assert 170 <= counts["a", "test"] <= 230
    assert 20 <= counts["b", "test"] <= 60


def test_one_source_may_be_in_a_mixture_twice_under_two_names_even_with_the_same_rows(tmp_path):
    rows = [pair(i, "a") for i in range(60)]
    prepare(mixture(own(tmp_path, "one", rows), own(tmp_path, "two", rows)), 0, tmp_path / "data")
    assert Counter(r["client_id"] for r in prepared_rows(tmp_path / "data")) == {"one": 60, "two": 60}


def test_a_source_with_owners_is_one_client_and_its_judges_are_separate(fixtures, tmp_path):
    parts = [
        {
            "source": "tldr",
            "path": str(fixtures / "tldr"),
            "options": {"judge_workers": 1, "align_share": 1.0},
        },
        {"source": "hh-rlhf", "path": str(fixtures / "hh.jsonl"), "options": WHOLE},
    ]
    prepare(mixture(*parts), 0, tmp_path / "data")
    rows = prepared_rows(tmp_path / "data")
    judged = prepared_rows(tmp_path / "data", "judge")
    assert {r["client_id"] for r in rows} == {"tldr", "hh-rlhf"}
    assert judged
    assert not {r["client_id"] for r in judged} & {"tldr", "hh-rlhf"}
    assert all(r["split"] == split_of(r["group"], mixture(*parts)) for r in (*rows, *judged)), (
        "tldr leaves its splits to the one who draws them"
    )


def test_a_column_of_the_users_files_and_the_source_itself_can_name_the_clients(tmp_path):
    parts = [
        own(
            tmp_path,
            name,
            [pair(i, name, prompt=f"{name} {i}", region=("north", "south")[i % 2]) for i in range(60)],
        )
        for name in ("a", "b")
    ]
    prepare(mixture(*parts, partition="column", column="region"), 0, tmp_path / "data")
    assert Counter(r["client_id"] for r in prepared_rows(tmp_path / "data")) == {"north": 60, "south": 60}
    prepare(
        mixture(*parts, partition="column", column="domain", column_clients={"first": ["a"]}),
        0,
        tmp_path / "data",
    )
    assert Counter(r["client_id"] for r in prepared_rows(tmp_path / "data")) == {"first": 60}


def test_a_source_of_which_others_hold_out_everything_is_refused(tmp_path):
    held_out = own(
        tmp_path,
        "out",
        [
            pair(i, "b", split="test" if i else "train", prompt=f"question {i}" if i else "another")
            for i in range(60)
        ],
    )
    first = own(tmp_path, "first", [pair(i, "a", split="train") for i in range(1, 60)])
    with pytest.raises(
        DataError, match=r"data.options.sources\[0\]: the source first has no pairs for its client"
    ):
        sources.load(mixture(first, held_out), 0)


def test_each_source_is_loaded_from_the_hub_with_its_own_revision(monkeypatch):
    import datasets

    requests = []

    def load_dataset(name, config=None, **more):
        requests.append((name, more["split"], more["revision"]))
        return [pair(i, name) for i in (range(80) if more["split"] == "train" else range(80, 90))]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = sources.load(mixture({"source": "py-dpo", "revision": "abc"}, {"source": "ultrafeedback"}), 0)
    assert requests == [
        ("jondurbin/py-dpo-v0.1", "train", "abc"),
        ("kaitchup/UltraFeedback-prompt-chosen-rejected", "train", None),
        ("kaitchup/UltraFeedback-prompt-chosen-rejected", "test", None),
    ]
    assert {row.client_id for row in data.pairs} == {"py-dpo", "ultrafeedback"}
    assert all(r.chosen.startswith("jondurbin") == (r.client_id == "py-dpo") for r in data.pairs)


def test_two_real_samples_are_two_clients_and_no_row_is_lost_uncounted(samples, tmp_path):
    parts = [
        {"source": "hh-rlhf", "path": str(samples / "hh_rlhf" / "harmless_base_even.jsonl.gz")},
        {"source": "auto-j", "path": str(samples / "auto_j" / "pairwise_human_even.jsonl")},
    ]
    report = prepare(mixture(*parts), 0, tmp_path / "data")
    rows = report.rows
    assert rows.pairs + rows.judge + sum(rows.dropped.values()) == 1156 + 696
    assert report.clients_without_train == []
    assert {
        name: sum(counts[s] for s in ("train", "validation", "test"))
        for name, counts in read_clients(tmp_path / "data").items()
    } == {"hh-rlhf": 905, "auto-j": 408}


def test_warnings_of_the_parts_name_them(tmp_path):
    rows = [{"prompt": f"p{n}", "chosen": "c", "rejected": "r"} for n in range(40)]
    one = write_jsonl(tmp_path / "one.jsonl", [*rows, {"prompt": "no"}])
    two = write_jsonl(tmp_path / "two.jsonl", [row | {"prompt": f"q{n}"} for n, row in enumerate(rows)])
    parts = [{"source": "jsonl", "name": name, "path": path} for name, path in (("a", one), ("b", two))]
    found = sources.load(data_config(source="mixture", options={"sources": parts}, drop_invalid=0.1), 0)
    (warning,) = found.warnings
    assert warning.startswith("a: invalid rows: 1 (left out), the first: ")
