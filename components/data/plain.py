"""What sources of plain pairs have in common: a row of the hub is a prompt with two completions, and no owner is known.

Such a source is a function that makes a pair of a row; where the rows are, which make no pair, and their splits are seen to here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from components.config import DataConfig, Section
from components.data.records import DataError, SourceData
from components.data.reserve import set_apart
from components.data.rows import SUFFIXES, check_number, find_file, from_hub, read_file
from components.data.splits import assign, group_of, grouped, normal

FIELDS = ("prompt", "chosen", "rejected")
MakePair = Callable[[Mapping[str, Any], str], dict[str, Any] | str]
"""A row and its place, for errors, to a pair with FIELDS, or to the reason that it makes none."""


class PlainOptions(Section):
    """Options of a source of plain pairs."""

    align_share: float = Field(0.2, ge=0, lt=1, description="Share of the training prompts that become the server's unlabelled prompts; their pairs are left out.")
    judge_share: float = Field(0.1, ge=0, lt=1, description="Share of the prompts whose pairs train the judge.")


def load_plain(data: DataConfig, options: PlainOptions, seed: int, name: str, hub: str, columns: Sequence[str], make: MakePair, splits: Sequence[str] = ("train",)) -> SourceData:
    """The pairs of a hub data set, or of local files of its schema (data.path, see raw_rows), in splits, some set apart.

    Args:
        data, options, seed: as a source gets them.
        name: of the source.
        hub: id of the hub data set.
        columns: that every row must have.
        make: the pair of a row.
        splits: of the hub data set; its test split stays the test split.

    Raises:
        DataError: the data cannot be read, lack a column, or hold no usable pair.
    """
    by_split, dropped = {}, Counter()
    for split, (rows, where) in raw_rows(data, hub, columns, splits).items():
        by_split[split], counts = make_pairs(rows, where, columns, make)
        dropped.update(counts)
    rows, dropped["prompt also in the test split"] = in_splits(by_split, data, seed)
    return set_apart(rows, name, options.align_share, options.judge_share, seed, {reason: n for reason, n in dropped.items() if n})


def raw_rows(data: DataConfig, hub: str, columns: Sequence[str], splits: Sequence[str], data_dir: str | None = None) -> dict[str, tuple[Iterable[Mapping[str, Any]], str]]:
    """By split, the rows and what they come from, for errors.

    They are the hub's, or those of data.path: a file, whose rows are all 'train', or a folder with a file train and optionally test.

    Raises:
        DataError: the hub cannot be reached, or a file or column is missing.
    """
    if data.path is None:
        part = f"{data_dir}, " if data_dir else ""
        return {split: (from_hub(hub, split=split, revision=data.revision, data_dir=data_dir), f"{hub} ({part}split {split})") for split in splits}
    path = Path(data.path)
    if not path.is_dir():
        return {"train": (read_file(path, columns), str(path))}
    files = {split: find_file(path, split) for split in ("train", "test")}
    if files["train"] is None:
        raise DataError(f"{path}: expected a file train ({', '.join(SUFFIXES)}), and optionally test, in this folder")
    return {split: (read_file(file, columns), str(file)) for split, file in files.items() if file}


def make_pairs(rows: Iterable[Mapping[str, Any]], where: str, columns: Sequence[str], make: MakePair) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The pairs of raw rows, without white space around their texts, and how many rows made none, by reason.

    Beside the reasons of the source there are two: an empty text, and two completions that are the same.

    Raises:
        DataError: a column is missing or of the wrong type, or no row makes a pair.
    """
    pairs: list[dict[str, Any]] = []
    dropped: Counter[str] = Counter()
    for number, row in enumerate(rows, 1):
        here = f"{where}, row {number}"
        missing = [c for c in columns if c not in row]
        if missing:
            raise DataError(f"{here}: column {', '.join(map(repr, missing))} is missing; there are: {', '.join(map(str, row)) or 'none'}")
        pair = make(row, here)
        if isinstance(pair, str):
            dropped[pair] += 1
            continue
        pair |= {field: (pair[field] or "").strip() for field in FIELDS}
        if not all(pair[field] for field in FIELDS):
            dropped["empty text"] += 1
        elif pair["chosen"] == pair["rejected"]:
            dropped["both answers the same"] += 1
        else:
            pairs.append(pair)
    if not pairs:
        reasons = ", ".join(f"{reason}: {n}" for reason, n in dropped.items()) or "there are none"
        raise DataError(f"{where}: none of the {dropped.total()} rows makes a pair ({reasons}); see whether its columns hold what this source reads")
    return pairs, dict(dropped)


def in_splits(by_split: Mapping[str, list[dict[str, Any]]], data: DataConfig, seed: int) -> tuple[list[dict[str, Any]], int]:
    """Pairs with their splits, and how many were dropped because their prompt is in the test split too.

    A test split that is there stays the test split; else one is drawn by prompt. Prompts are the same where they differ
    in case and white space only.

    Args:
        by_split: pairs of 'train', and of 'test' where there is one.
        data: its shares of validation and test.
        seed: of the recipe.
    """
    tested = by_split.get("test")
    held_out = {normal(pair["prompt"]) for pair in tested or ()}
    kept = grouped([pair for pair in by_split["train"] if normal(pair["prompt"]) not in held_out])
    parts = assign(map(group_of, kept), data.validation, data.test if tested is None else 0.0, seed)
    rows = [pair | {"split": part} for pair, part in zip(kept, parts, strict=True)] + [pair | {"split": "test"} for pair in grouped(tested or [])]
    return rows, len(by_split["train"]) - len(kept)


def check_finite(row: Mapping[str, Any], columns: Iterable[str], where: str) -> None:
    """Refuse a row in which one of the columns is not a finite number.

    Raises:
        DataError: naming the row, the column and what it holds.
    """
    for column in columns:
        check_number(row, (column,), where)
        if row[column] is None or not math.isfinite(row[column]):
            raise DataError(f"{where}: column '{column}' must be a finite number, but is {row[column]!r}")
