"""The source mixture: several sources, each a client, on small files written for these tests."""

import json
from collections import Counter, defaultdict

import pytest

from components.config import DataConfig, RecipeError
from components.data import sources
from components.data.prepare import prepare
from components.data.records import DataError, read_clients, read_rows
from components.data.splits import assign, normal, sample

PLAIN = {"align_share": 0.0, "judge_share": 0.0}
OWN = {"align_share": 0.0, "judge_clients": 0.0}


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pair(i, of, **more):
    return {"prompt": f"question {i}", "chosen": f"{of} says yes to {i}" + " indeed" * (i % 2), "rejected": f"{of} says no to {i}" + " not at all" * (i % 3)} | more


def own(folder, name, rows, **more):
    """A file of the user's own pairs as a part of a mixture."""
    return {"source": "jsonl", "name": name, "path": written(folder / f"{name}.jsonl", rows), "options": OWN} | more


def mixture(*parts, **more):
    return DataConfig(source="mixture", options={"sources": list(parts)}, **more)


def rows_of(folder, name="pairs"):
    return read_rows(folder / f"{name}.parquet").to_list()


def split_of(prompt, data):
    return assign([prompt], data.validation, data.test, 0)[0]


def test_each_source_is_a_client_under_its_name_and_keeps_its_domain_its_source_and_its_direction(tmp_path):
    code = [{"lang": ("Go", "PHP")[i % 2], "vulnerability": "", "system": "", "question": f"Write {i}.", "chosen": f"safe({i})" + "#" * (i % 2), "rejected": f"unsafe({i})"} for i in range(60)]
    parts = [{"source": "code-vulnerability", "path": written(tmp_path / "code.jsonl", code)}, own(tmp_path, "talk", [pair(i, "talk", margin=i, client_id="someone") for i in range(60)])]
    report = prepare(mixture(*parts), 0, tmp_path / "data")
    rows = rows_of(tmp_path / "data")
    assert {(r["client_id"], r["source"], r["domain"]) for r in rows} == {("code-vulnerability", "code-vulnerability", d) for d in ("Go", "PHP")} | {("talk", "jsonl", "talk")}
    assert list(read_clients(tmp_path / "data")) == ["code-vulnerability", "talk"] and report["partition"]["clients"] == 2
    assert all(r["chosen"].startswith(("safe", "talk says yes")) for r in rows) and len({r["pair_id"] for r in rows}) == len(rows)
    assert {r["prompt"]: r["margin"] for r in rows if r["client_id"] == "talk"} == {f"question {i}": float(i) for i in range(60)}
    judged, dropped = rows_of(tmp_path / "data", "judge"), report["rows"]["dropped"]
    assert {(r["client_id"], r["source"]) for r in judged} == {("judge", "code-vulnerability")} and set(dropped) == {"code-vulnerability: prompt given to the server"}
    assert len(rows) + len(judged) + sum(dropped.values()) == 120


def test_the_judges_pairs_and_the_servers_prompts_of_all_are_put_together(tmp_path):
    shares = {"align_share": 0.3, "judge_clients": 0.3}
    parts = [own(tmp_path, name, [pair(i, name) | {"prompt": f"{name} {i}"} for i in range(60)], options=shares) for name in ("tea", "coffee")]
    prepare(mixture(*parts), 0, tmp_path / "data")
    judged, asked = rows_of(tmp_path / "data", "judge"), rows_of(tmp_path / "data", "prompts")
    assert {r["client_id"] for r in judged} == {"judge"} and {r["prompt"].split()[0] for r in judged} == {"tea", "coffee"}
    assert {(r["prompt"].split()[0], r["split"]) for r in asked} == {(name, split) for name in ("tea", "coffee") for split in ("align", "test")}


def test_a_prompt_of_two_sources_is_drawn_into_one_split_of_itself_and_the_server_asks_it_once(tmp_path):
    parts = [own(tmp_path, name, [pair(i, name) for i in range(80)], options=OWN | {"align_share": 0.3}) for name in ("a", "b")]
    data = sources.load(mixture(*parts), 0)
    splits = defaultdict(set)
    for row in (*data.pairs, *data.prompts):
        splits[row["prompt"]].add(row["split"])
    assert len(splits) == 80 and all(len(s) == 1 for s in splits.values()) and set(data.dropped) == {"a: prompt given to the server", "b: prompt given to the server"}
    assert all(row["split"] == split_of(row["prompt"], mixture(*parts)) for row in data.pairs) and Counter(data.pairs["client_id"])["a"] == Counter(data.pairs["client_id"])["b"]
    tested = [row for row in data.prompts if row["split"] == "test"]
    assert len(data.prompts) == len({row["prompt"] for row in data.prompts}) and all(len(row["references"]) == 2 for row in tested) and len(tested) > 5


@pytest.mark.parametrize("spelled", ["question {}", " Question  {}"])
def test_where_two_sources_disagree_the_most_held_out_split_wins_and_the_other_rows_are_counted(tmp_path, spelled):
    first = [pair(i, "a", split=("train", "validation", "test")[i % 3]) for i in range(60)]
    second = [pair(i, "b", prompt=spelled.format(i), split=("train", "test")[i % 2]) for i in range(60)]
    data = sources.load(mixture(own(tmp_path, "a", first), own(tmp_path, "b", second)), 0)
    wanted = {i: "test" if i % 3 == 2 or i % 2 else "validation" if i % 3 == 1 else "train" for i in range(60)}
    kept = {(r["client_id"], int(r["prompt"].split()[1]), r["split"]) for r in data.pairs}
    assert kept == {("a", i, s) for i, s in wanted.items() if first[i]["split"] == s} | {("b", i, s) for i, s in wanted.items() if second[i]["split"] == s}
    assert data.dropped == {"a: prompt held out in another source": 20, "b: prompt held out in another source": 20}
    prepare(mixture(own(tmp_path, "a", first), own(tmp_path, "b", second)), 0, tmp_path / "data")      # whose suite refuses a prompt in two splits


def test_a_training_prompt_of_the_judge_that_another_source_holds_out_is_dropped_and_no_prompt_to_align_on_is_anyones(tmp_path):
    rows = [pair(i, "a", split="train") for i in range(60)]
    held_out = [pair(i, "b", split="test" if i < 30 else "train") for i in range(60)]
    data = sources.load(mixture(own(tmp_path, "a", rows, options={"align_share": 0.4, "judge_clients": 0.4}), own(tmp_path, "b", held_out)), 0)
    assert data.judge and {int(r["prompt"].split()[1]) for r in data.judge} <= set(range(30, 60)) and data.dropped["a: prompt held out in another source"] > 0
    assert set(data.prompts["split"]) == {"test"}
    alone = sources.load(DataConfig(source="jsonl", path=str(tmp_path / "a.jsonl"), options={"align_share": 0.4, "judge_clients": 0.4}), 0)
    assert {int(r["prompt"].split()[1]) for r in alone.judge} & set(range(30)) and "align" in alone.prompts["split"], "or nothing is tested here"


def test_groups_of_two_sources_do_not_meet_unless_they_are_the_prompt(tmp_path):
    parts = [own(tmp_path, name, [pair(i, name, prompt=f"{name} {i}", group=f"g{i % 20}") for i in range(60)] + [pair(99, name, prompt=text, split="train") for text in spelled])
             for name, spelled in (("a", ["Shared?", "SHARED?"]), ("b", ["shared? "]))]
    data = sources.load(mixture(*parts), 0)
    assert {r["group"] for r in data.pairs if r["client_id"] == "a"} - {"SHARED?"} == {f"a/g{i}" for i in range(20)}
    assert {r["group"] for r in data.pairs if normal(r["prompt"]) == "shared?"} == {"SHARED?"}
    prepare(mixture(*parts, partition="iid", clients=4), 0, tmp_path / "data")
    owners = defaultdict(set)
    for row in rows_of(tmp_path / "data"):
        owners[normal(row["prompt"])].add(row["client_id"])
    assert all(len(clients) == 1 for clients in owners.values())


def test_max_pairs_of_a_source_keeps_whole_prompts_as_the_recipes_own_does(tmp_path):
    rows = [pair(i // 2, "a", chosen=f"yes {i}" + " so" * (i % 3)) for i in range(160)]
    parts = [own(tmp_path, "a", rows), own(tmp_path, "b", [pair(i, "b", prompt=f"other {i}") for i in range(60)])]
    whole, some = sources.load(mixture(*parts), 0), sources.load(mixture(parts[0] | {"max_pairs": 50}, parts[1]), 0)
    kept = Counter(r["prompt"] for r in some.pairs if r["client_id"] == "a")
    assert 40 < kept.total() <= 50 and set(kept.values()) == {2} and some.dropped == {"a: over max_pairs": 160 - kept.total()}
    assert [r for r in some.pairs if r["client_id"] == "b"] == [r for r in whole.pairs if r["client_id"] == "b"]
    prepare(DataConfig(source="jsonl", path=parts[0]["path"], options=OWN, max_pairs=50, partition="iid", clients=2), 0, tmp_path / "data")
    assert {r["prompt"] for r in rows_of(tmp_path / "data")} == set(kept)
    own_rows = [r for r in whole.pairs if r["client_id"] == "a"]
    assert sample([r["prompt"] for r in own_rows], [r["split"] for r in own_rows], 50, 1) != set(kept), "another seed, another sample"


def test_one_source_may_stand_in_it_twice_under_two_names_even_with_the_same_rows(tmp_path):
    rows = [pair(i, "a") for i in range(60)]
    prepare(mixture(own(tmp_path, "one", rows), own(tmp_path, "two", rows)), 0, tmp_path / "data")
    assert Counter(r["client_id"] for r in rows_of(tmp_path / "data")) == {"one": 60, "two": 60}


def test_a_source_with_owners_gives_one_client_and_its_judges_stay_apart(fixtures, tmp_path):
    parts = [{"source": "tldr", "path": str(fixtures / "tldr"), "options": {"judge_workers": 1, "align_share": 1.0}}, {"source": "hh-rlhf", "path": str(fixtures / "hh.jsonl"), "options": PLAIN}]
    prepare(mixture(*parts), 0, tmp_path / "data")
    rows, judged = rows_of(tmp_path / "data"), rows_of(tmp_path / "data", "judge")
    assert {r["client_id"] for r in rows} == {"tldr", "hh-rlhf"} and judged and not {r["client_id"] for r in judged} & {"tldr", "hh-rlhf"}
    assert all(r["split"] == split_of(r["group"], mixture(*parts)) for r in (*rows, *judged)), "tldr leaves its splits to the one who draws them"


def test_a_column_of_the_users_files_and_the_source_itself_can_name_the_clients(tmp_path):
    parts = [own(tmp_path, name, [pair(i, name, prompt=f"{name} {i}", region=("north", "south")[i % 2]) for i in range(60)]) for name in ("a", "b")]
    prepare(mixture(*parts, partition="column", column="region"), 0, tmp_path / "data")
    assert Counter(r["client_id"] for r in rows_of(tmp_path / "data")) == {"north": 60, "south": 60}
    prepare(mixture(*parts, partition="column", column="domain", column_clients={"first": ["a"]}), 0, tmp_path / "data")
    assert Counter(r["client_id"] for r in rows_of(tmp_path / "data")) == {"first": 60}


def test_errors_of_a_source_name_its_key_in_the_mixture(tmp_path):
    good = own(tmp_path, "good", [pair(i, "a") for i in range(60)])
    with pytest.raises(DataError, match=r"^data.options.sources\[1\]: .*none.jsonl: there is no such file \(data.options.sources\[1\].path\)$"):
        sources.load(mixture(good, {"source": "jsonl", "path": str(tmp_path / "none.jsonl")}), 0)
    with pytest.raises(DataError, match=r"give the file as data.options.sources\[1\].path$"):
        sources.load(mixture(good, {"source": "jsonl"}), 0)
    with pytest.raises(RecipeError, match=r"unknown key 'data.options.sources\[1\].options.judge_share'; did you mean 'data.options.sources\[1\].options.align_share'"):
        sources.load(mixture(good, {"source": "jsonl", "options": {"judge_share": 0.1}}), 0)
    for key in ("path", "revision"):
        with pytest.raises(DataError, match=f"data.{key} is given, but a mixture has none of its own: give it for each of data.options.sources"):
            sources.load(mixture(good, good | {"name": "other"}, **{key: "x"}), 0)
    held_out = own(tmp_path, "out", [pair(i, "b", split="test" if i else "train", prompt=f"question {i}" if i else "another") for i in range(60)])
    first = own(tmp_path, "first", [pair(i, "a", split="train") for i in range(1, 60)])
    with pytest.raises(DataError, match=r"data.options.sources\[0\]: the source first has no pairs for its client"):
        sources.load(mixture(first, held_out), 0)


def test_the_hub_is_asked_for_each_source_with_its_own_revision(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, config=None, **more):
        asked.append((name, more["split"], more["revision"]))
        return [pair(i, name) for i in range(80)]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = sources.load(mixture({"source": "py-dpo", "revision": "abc"}, {"source": "ultrafeedback"}), 0)
    assert asked == [("jondurbin/py-dpo-v0.1", "train", "abc"), ("kaitchup/UltraFeedback-prompt-chosen-rejected", "train", None)]
    assert set(data.pairs["client_id"]) == {"py-dpo", "ultrafeedback"} and all(r["chosen"].startswith("jondurbin") == (r["client_id"] == "py-dpo") for r in data.pairs)


@pytest.mark.slow
def test_two_real_samples_are_two_clients_and_no_row_is_lost_uncounted(samples, tmp_path):
    parts = [{"source": "hh-rlhf", "path": str(samples / "hh_rlhf" / "harmless_base_even.jsonl.gz")}, {"source": "auto-j", "path": str(samples / "auto_j" / "pairwise_human_even.jsonl")}]
    report = prepare(mixture(*parts), 0, tmp_path / "data")
    rows = report["rows"]
    assert rows["pairs"] + rows["judge"] + sum(rows["dropped"].values()) == 1156 + 696 and report["clients_without_train"] == []
    assert {name: sum(counts[s] for s in ("train", "validation", "test")) for name, counts in read_clients(tmp_path / "data").items()} == {"hh-rlhf": 905, "auto-j": 408}
