"""Files that are damaged, endless or no files end in one sentence, soon."""

import gzip
import json
import os
import struct
import time

import datasets
import pytest

from components.config import RecipeError
from components.data.records import DataError
from components.data.rows import read_file
from components.data.sources.own_files import JsonlFile
from components.recipes import load_recipe
from components.recipes.inputs import check_inputs
from tests.support.sources import data_config

ROW = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}).encode() + b"\n"


def refused(path, words):
    """The refusal of a file: one line that names it, within seconds of the processor."""
    since = time.process_time()
    with pytest.raises(DataError, match=words) as error:
        read_file(path)
    assert time.process_time() - since < 20
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json.gz"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed[: len(packed) // 2],
        lambda packed: packed[:15] + b"\xff" * 9 + packed[24:],
        lambda packed: packed[:-8] + bytes(8),
        lambda packed: packed + b"trailing",
        lambda packed: b"PK\x03\x04" + packed,
        lambda packed: packed[:5],
    ],
    ids=["truncated", "overwritten", "checksum", "trailing bytes", "zip", "header alone"],
)
def test_a_damaged_gzip_is_one_sentence(name, damage, tmp_path):
    path = tmp_path / name
    path.write_bytes(damage(gzip.compress(b"".join(ROW.replace(b"a", b"%d" % n) for n in range(500)))))
    refused(path, r"cannot be read as gzipped UTF-8 text \(.*\): it is damaged")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.jsonl", ROW + b"\0\0\0\n", "line 2: this is not valid JSON"),
        ("rows.jsonl", ROW.replace(b"a", b"\0"), "line 1: this is not valid JSON"),
        ("rows.jsonl", ROW.decode().encode("utf-16"), "cannot be read as UTF-8 text"),
    ],
)
def test_what_json_cannot_hold_is_one_sentence(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name, words)


@pytest.mark.parametrize("margin", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_none_is_refused_with_its_row(margin, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(ROW + ROW.replace(b"}", b', "margin": %s}' % margin.encode()))
    with pytest.raises(DataError, match=r"row 2: column 'margin' must be a finite number, but is -?[ni]"):
        JsonlFile().read(data_config(source="jsonl", path=str(path)))


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    refused(tmp_path / "pipe.jsonl", "there is no such file")
    refused(tmp_path / "folder.jsonl", "no file of rows")
    recipe = load_recipe(
        "debug", ["data.source=jsonl", "data.options={}", f"data.path={tmp_path / 'pipe.jsonl'}"]
    )
    with pytest.raises(ValueError, match=r"^data.path: .*is a pipe, socket or device.*copy what it gives"):
        check_inputs(recipe)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.parquet"])
def test_a_file_that_may_not_be_read_says_so(name, tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    (tmp_path / name).write_bytes(ROW)
    monkeypatch.setattr("pathlib.Path.open", refuse)
    monkeypatch.setattr("gzip.open", refuse)
    monkeypatch.setattr("pyarrow.parquet.ParquetFile", refuse)
    refused(tmp_path / name, r"cannot be read \(Permission denied\): see its permissions")


def test_a_saved_data_set_whose_texts_lie_outside_of_it_is_refused(tmp_path):
    datasets.Dataset.from_dict({"prompt": ["eight..."] * 60}).save_to_disk(tmp_path / "saved")
    (path,) = (tmp_path / "saved").glob("*.arrow")
    offsets = struct.pack("<4i", 0, 8, 16, 24)
    assert path.read_bytes().count(offsets) == 1
    path.write_bytes(path.read_bytes().replace(offsets, struct.pack("<4i", 0, 8, 2**30, 24)))
    refused(tmp_path / "saved", "cannot be read as a data set that save_to_disk wrote")


def test_a_folder_that_may_not_be_searched_says_so(tmp_path, monkeypatch):
    (tmp_path / "rows" / "part").mkdir(parents=True)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.iterdir", refuse)
    refused(tmp_path / "rows", r"cannot be read \(Permission denied\): see its permissions")


def test_a_folder_that_contains_itself_is_read_once(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_bytes(ROW)
    for name in ("one", "two"):
        (tmp_path / "rows" / name).symlink_to(tmp_path / "rows")
    assert len(read_file(tmp_path / "rows")) == 1


@pytest.mark.parametrize(
    "path", ["x" * 256, "/".join(["x" * 200] * 30), "a\\0b"], ids=["name", "path", "null"]
)
@pytest.mark.parametrize("key", ["data.trees", "policy.template", "policy.backbone.name"])
def test_a_path_that_no_file_can_have_is_refused(key, path):
    with pytest.raises(
        RecipeError, match=rf"'{key.removesuffix('.name')}'.* can be no file: .*correct it"
    ) as error:
        load_recipe("debug", [f'{key}="{path}"'])
    assert len(str(error.value)) < 500
