"""Pairs and prompts as data frames, and as the parquet files of a prepared folder."""

from dataclasses import replace

from components.data.records import (
    Pair,
    Prompt,
    pair_id,
    pairs_frame,
    prompts_frame,
    read_pairs,
    read_prompts,
    unique_prompts,
    write_table,
)

PAIRS = [Pair("p", "good", "bad", client_id="ann", split="train"), Pair("q", "yes", "no", source="other")]


def test_pairs_have_the_columns_of_the_record_and_the_named_source_unless_they_name_their_own():
    required = ["prompt", "chosen", "rejected", "client_id", "domain", "source", "pair_id", "split"]
    assert list(pairs_frame(PAIRS, "mine")) == [*required, "group"]
    deep = Pair("p", "good", "bad", margin=0.5, tree="t", depth=2, column="c")
    assert list(pairs_frame([*PAIRS, deep], "mine")) == [
        *required,
        *("margin", "group", "tree", "depth", "column"),
    ]
    assert list(pairs_frame([], "mine")) == [*required, "group"]
    assert list(pairs_frame(PAIRS, "mine")["source"]) == ["mine", "other"]


def test_an_id_is_a_hash_of_what_identifies_the_pair_and_repetitions_are_numbered():
    ids = list(pairs_frame([PAIRS[0]] * 3, "mine")["pair_id"])
    identity = ("mine", "ann", "p", "good", "bad")
    assert ids == [pair_id(*identity), pair_id(*identity, "1"), pair_id(*identity, "2")]


def test_of_equal_prompts_the_first_is_in_the_table():
    prompts = [Prompt("p", ["a"], "align"), Prompt("q", [], "test"), Prompt("p", ["b"], "test")]
    frame = prompts_frame(unique_prompts(prompts)[0], "mine")
    assert list(frame) == ["prompt_id", "prompt", "references", "split"]
    assert [list(texts) for texts in frame["references"]] == [["a"], []]
    assert list(frame["split"]) == ["align", "test"]
    assert frame["prompt_id"][0] == pair_id("mine", "p")


def test_rows_are_read_as_they_were_written_and_what_is_missing_is_none(tmp_path):
    pairs = [Pair("p", "good", "bad", margin=0.5, depth=2), Pair("q", "yes", "no", tree="t")]
    write_table(tmp_path / "pairs.parquet", pairs_frame(pairs, "mine"))
    rows = read_pairs(tmp_path / "pairs.parquet")
    assert rows == [replace(pair, source="mine", pair_id=pair_id("mine", "", *pair.texts)) for pair in pairs]
    assert type(rows[0].depth) is int
    prompt = Prompt("p", ["a", "b"], "test")
    write_table(tmp_path / "prompts.parquet", prompts_frame([prompt], "mine"))
    assert read_prompts(tmp_path) == [replace(prompt, prompt_id=pair_id("mine", "p"))]
