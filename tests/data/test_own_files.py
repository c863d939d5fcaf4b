"""Users' own files: prompts that connect most pairs, and folders in folders."""

import json

import pytest

from components.data.prepare import prepare
from components.data.records import DataError
from components.data.rows import find_splits, read_file
from components.data.sources import load
from tests.support.sources import WHOLE_FILE, data_config, write_jsonl

ROW = {"prompt": "p", "chosen": "c", "rejected": "r"}


def conversations(count, greeting=lambda n: "Hello"):
    """Groups of two pairs each, the first of which answers a greeting."""
    return [
        {"prompt": prompt, "chosen": f"yes {n} {prompt}", "rejected": f"no {n}", "group": f"talk-{n}"}
        for n in range(count)
        for prompt in (greeting(n), f"question {n}")
    ]


def section(path, rows):
    return data_config(source="jsonl", path=write_jsonl(path, rows), options=WHOLE_FILE, partition="iid")


# --- prompts that connect groups


def test_a_prompt_that_connects_all_groups_is_named_where_a_split_is_empty(tmp_path):
    data = section(tmp_path / "p.jsonl", conversations(60))
    with pytest.raises(DataError, match=r"120 of 120 pairs \(100%\) .*several groups \(one in 60\)"):
        load(data, 0)


def test_a_prompt_that_connects_more_than_half_of_the_pairs_is_a_warning(tmp_path):
    rows = conversations(60, lambda n: "Hello" if n < 40 else f"Hello {n}")
    (warning,) = load(section(tmp_path / "p.jsonl", rows), 0).warnings
    assert "80 of 120 pairs (67%)" in warning
    assert "several groups (one in 40)" in warning
    assert "hello" not in warning, "texts of owners stay out of logs"


def test_groups_that_no_prompt_connects_give_no_warning(tmp_path):
    rows = conversations(60, lambda n: f"Hello {n}")
    assert load(section(tmp_path / "p.jsonl", rows), 0).warnings == ()
    rows = [row | {"group": "one"} if n < 80 else row for n, row in enumerate(rows)]
    assert load(section(tmp_path / "p.jsonl", rows), 0).warnings == ()


def test_the_warning_is_in_the_report_of_the_preparation(tmp_path):
    rows = conversations(60, lambda n: "Hello" if n < 40 else f"Hello {n}")
    data = data_config(
        source="jsonl",
        path=write_jsonl(tmp_path / "p.jsonl", rows),
        options=WHOLE_FILE,
        partition="iid",
        clients=2,
    )
    report = prepare(data, 0, tmp_path / "data")
    assert any("several groups (one in 40)" in warning for warning in report.warnings)


# --- folders in folders, byte order marks


def written(folder, *names, text=None):
    """Files of a row each, whose prompt is the file's name."""
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text or json.dumps(ROW | {"prompt": name}) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("inner", ["more/b.jsonl", "data/b.jsonl", "more/still/b.jsonl", "b.d/c.jsonl.gz"])
def test_rows_below_a_folder_with_rows_are_refused_and_named(tmp_path, inner):
    folder = written(tmp_path, "a.jsonl", inner)
    with pytest.raises(DataError, match=f"{inner.replace('.', '[.]')} lies in a folder beside a[.]jsonl"):
        read_file(folder)


@pytest.mark.parametrize(
    "names", [("part-0/a.jsonl", "part-1/a.jsonl"), ("default/part-0/a.jsonl", "default/part-1/a.jsonl")]
)
def test_folders_of_shards_are_read_in_order(tmp_path, names):
    assert [row["prompt"] for row in read_file(written(tmp_path, *names))] == list(names)


def test_a_split_may_be_a_folder_of_folders(tmp_path):
    folder = written(tmp_path, "train/default/a.jsonl", "train/default/b.jsonl", "test/default/a.jsonl")
    splits = find_splits(folder)
    assert splits == {"train": folder / "train", "test": folder / "test"}
    assert len(read_file(splits["train"])) == 2


def test_splits_in_folders_below_are_not_read_together(tmp_path):
    folder = written(tmp_path, "default/train.jsonl", "default/test.jsonl")
    with pytest.raises(DataError, match=r"default/test.jsonl and default/train.jsonl are of several splits"):
        read_file(folder)


def test_hidden_folders_and_metadata_hold_no_rows(tmp_path):
    folder = written(tmp_path, "a.jsonl", ".cache/b.jsonl", "_old/b.jsonl", "more/dataset_info.json")
    assert len(read_file(folder)) == 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    text = "\ufeff" + json.dumps(ROW | {"prompt": "\ufeffHuman: a"}) + "\n"
    (row,) = read_file(written(tmp_path, name, text=text))
    assert row == ROW | {"prompt": "Human: a"}
    (row,) = read_file(written(tmp_path, "list.json", text=f"\ufeff[{json.dumps(ROW)}]") / "list.json")
    assert row == ROW
