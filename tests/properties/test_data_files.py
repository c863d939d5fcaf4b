"""Any change of a file of rows is read as rows that can be trained on, or is refused in a sentence."""

import csv
import gzip
import io
import json
import math
import shutil
import sys
import tempfile
from functools import cache
from inspect import isabstract
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.config import DataConfig
from components.config.data import SOURCES
from components.config.name_checks import check_name, check_visible
from components.data import sources
from components.data.questions import names, read_questions
from components.data.questions.question_set import QUESTION_SETS
from components.data.raw import RawRow
from components.data.rows import SUFFIXES, read_file
from components.data.sources.own_files import OwnRow
from components.data.trees import Node, Tree, thought_pairs, tree_line
from tests.support.properties import KEYS, NUMBERS, PROPERTY, SCALARS, TIER, VALUES, accepted, damaged

pytestmark = TIER

ROWS = [
    {
        "prompt": f"What is {n}?",
        "chosen": f"It is {n}.",
        "rejected": "No idea.",
        "client_id": f"client-{n % 3}",
        "domain": "numbers",
        "group": f"question {n}",
        "split": "train" if n % 4 else "test",
        "margin": n / 7,
    }
    for n in range(60)
]
HALVES = st.text(st.characters(codec=None, exclude_categories=()), max_size=5)
"""Texts that may hold half a character."""


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)


@cache
def content(name):
    """The bytes of a file of ROWS."""
    if name.endswith(".parquet"):
        with tempfile.TemporaryDirectory() as place:
            datasets.Dataset.from_list(ROWS).to_parquet(Path(place) / name)
            return (Path(place) / name).read_bytes()
    if ".csv" in name:
        table = io.StringIO()
        writer = csv.DictWriter(table, ROWS[0])
        writer.writeheader()
        writer.writerows(ROWS)
        text = table.getvalue()
    else:
        text = json.dumps(ROWS) if ".json." in f"{name}." else "\n".join(map(json.dumps, ROWS))
    return gzip.compress(text.encode(), mtime=0) if name.endswith(".gz") else text.encode()


def source_of(path):
    """The source of own pairs that reads files of this kind."""
    suffix = path.name.removeprefix(path.name.partition(".")[0]) or ".arrow"
    return next(name for name in SOURCES.names() if suffix in getattr(SOURCES.load(name), "suffixes", ()))


def load(path):
    data = accepted(lambda: sources.load(DataConfig(source=source_of(path), path=str(path)), 0))
    if data is not None:
        pairs = [*data.pairs, *data.judge]
        prompts = {pair.prompt for pair in pairs}
        for pair in pairs:
            check_pair(pair, prompts)


def check_pair(pair, prompts):
    for text in (pair.prompt, pair.chosen, pair.rejected):
        assert text.encode("utf-8") is not None
    check_name(pair.client_id)
    check_name(pair.domain)
    if pair.group not in prompts:
        check_visible(pair.group or "")
    assert pair.split in ("train", "validation", "test")
    assert pair.margin is None or math.isfinite(pair.margin)


@pytest.mark.parametrize("name", [f"rows{suffix}" for suffix in SUFFIXES])
@PROPERTY
@given(data=st.data())
def test_any_bytes(name, data, folder):
    path = folder / name
    path.write_bytes(data.draw(damaged(content(name))))
    load(path)


@PROPERTY
@given(data=st.data())
def test_any_text_in_a_gzip(data, folder):
    path = folder / "text.jsonl.gz"
    path.write_bytes(gzip.compress(data.draw(damaged(content("rows.jsonl"))), mtime=0))
    load(path)


@pytest.fixture(scope="module")
def saved(folder):
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return {path.name: path.read_bytes() for path in (folder / "saved").iterdir()}


@PROPERTY
@given(data=st.data())
def test_any_bytes_of_a_saved_data_set(data, folder, saved):
    place = folder / "damaged"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    changed = data.draw(st.sampled_from(sorted(saved)))
    for name, original in saved.items():
        (place / name).write_bytes(data.draw(damaged(original)) if name == changed else original)
    load(place)


@pytest.mark.parametrize("name", ["values.jsonl", "values.json", "values.parquet"])
@PROPERTY
@given(data=st.data())
def test_any_values(name, data, folder):
    rows = [dict(row) for row in ROWS[:20]]
    column = st.one_of(st.sampled_from(list(ROWS[0])), KEYS)
    value = st.one_of(VALUES, SCALARS, HALVES)
    for changed in rows if data.draw(st.booleans()) else rows[:2]:
        if data.draw(st.booleans()):
            changed.pop(data.draw(st.sampled_from(list(ROWS[0]))), None)
        changed[data.draw(column)] = data.draw(value)
    path = folder / name
    if name.endswith(".parquet"):
        try:
            datasets.Dataset.from_list(rows).to_parquet(path)
        except Exception:  # arrow has no such column
            return
    else:
        text = json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows))
        path.write_text(text, encoding="utf-8")
    load(path)


def row_types(base=RawRow):
    """The models of all rows."""
    for row_type in base.__subclasses__():
        yield row_type
        yield from row_types(row_type)


def known_row_types():
    """The models of all rows by name, without those that calls in other tests derive from them."""
    for name in names():
        QUESTION_SETS.load(name)
    for name in SOURCES.names():
        SOURCES.load(name)
    found = {one for one in row_types() if vars(sys.modules[one.__module__]).get(one.__name__) is one}
    assert found
    return sorted(
        (one for one in found if one.__module__.startswith("components.") and not isabstract(one)),
        key=lambda row_type: (row_type.__module__, row_type.__name__),
    )


@pytest.mark.parametrize("row_type", known_row_types(), ids=lambda row_type: row_type.__name__)
@PROPERTY
@given(data=st.data())
def test_any_row_of_any_source(row_type, data):
    columns = [field.alias or name for name, field in row_type.model_fields.items()]
    value = st.one_of(VALUES, HALVES, st.sampled_from([0, 1, "0", "a", ["a", "b"], {"a": "b"}, "x\u200b"]))
    row = {column: data.draw(value) for column in columns if data.draw(st.integers(0, 9))}
    accepted(lambda: list(row_type.read([row], "here")))


@PROPERTY
@given(data=st.data())
def test_any_row_of_any_question_set(data):
    name = data.draw(st.sampled_from(names()))
    row_type = QUESTION_SETS.load(name).row
    columns = [field.alias or key for key, field in row_type.model_fields.items()]
    text = st.one_of(st.text(max_size=9), st.sampled_from(["A", "B", "a ) x , b ) y", "['a', 'b']", "yes"]))
    value = st.one_of(text, st.lists(text), st.dictionaries(text, text), NUMBERS, VALUES)
    row = {column: data.draw(value) for column in columns}
    accepted(lambda: read_questions(name, [row], "here"))


TREES = b"".join(
    tree_line(
        Tree(
            f"csqa/{n}",
            "csqa",
            "key",
            f"What is {n}?\nA) this\nB) that",
            (Node(0, -1, 1, "one", 6, 1), Node(1, -1, 1, "two", 8, 1), Node(2, 1, 2, "three", 9, 1)),
            (1, 2),
        )
    )
    for n in range(3)
)


@PROPERTY
@given(data=st.data())
def test_any_trees_of_thoughts(data, folder):
    path = folder / "trees.jsonl"
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(damaged(TREES)))
    else:
        tree = json.loads(TREES.splitlines()[0])
        changed = tree if data.draw(st.booleans()) else data.draw(st.sampled_from(tree["nodes"]))
        changed[data.draw(st.sampled_from([*changed, "other"]))] = data.draw(VALUES)
        path.write_bytes(json.dumps(tree).encode() + b"\n" + TREES)
    accepted(lambda: thought_pairs(path, "data.trees"))


def test_the_files_that_are_changed_are_accepted(folder):
    for suffix in SUFFIXES:
        path = folder / f"whole{suffix}"
        path.write_bytes(content(path.name))
        assert len(read_file(path)) == len(ROWS)
        assert sources.load(DataConfig(source=source_of(path), path=str(path)), 0).pairs
    assert len(known_row_types()) > 15
    assert OwnRow in known_row_types()
    (folder / "whole_trees.jsonl").write_bytes(TREES)
    assert thought_pairs(folder / "whole_trees.jsonl", "data.trees")[0]
