"""Sources whose raw rows are a prompt with two completions, without owners.

Such a source is a function that makes a pair of a raw row. This module reads the rows, drops those
without a pair, draws the splits, and reserves pairs for the judge and the server.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from components.config import DataConfig
from components.data.holdout import Shares, hold_out
from components.data.records import SPLITS, DataError, Pair, SourceData, trailing_space
from components.data.rows import SUFFIXES, check_columns, check_number, find_file, from_hub, read_file
from components.data.splits import assign, connected, grouped

FIELDS = ("prompt", "chosen", "rejected")
MakePair = Callable[[Mapping[str, Any], str], Pair | str]
"""Makes a pair of a raw row and its place (for errors), or names the reason why it gives none."""


@dataclass(frozen=True)
class RawSplit:
    """The raw rows of a split.

    Attributes:
        rows: the rows.
        where: the file or the part of the hub data set, for errors.
    """

    rows: Iterable[Mapping[str, Any]]
    where: str


@dataclass(frozen=True)
class HubDataset:
    """A data set of the hub, or local files of its schema.

    Attributes:
        name: id on the hub.
        columns: columns that every row must have.
        splits: its splits; its test split stays the test split.
        folder: folder of the data set that is read; None: all of it.
        revision: read where a recipe names none, e.g. the hub's conversion to parquet of a data set
            with a loading script, which is not run.
    """

    name: str
    columns: Sequence[str]
    splits: Sequence[str] = ("train",)
    folder: str | None = None
    revision: str | None = None

    def raw_splits(self, data: DataConfig) -> dict[str, RawSplit]:
        """Read the raw rows, by split.

        They are the hub's, or those of data.path: a file or a folder without splits, whose rows are
        all 'train', or a folder with a file train and optionally a file test, see `rows.find_file`.

        Raises:
            DataError: the hub cannot be reached, or a file or column is missing.
        """
        if data.path is None:
            return {split: self._hub_split(split, data.revision) for split in self.splits}
        path = Path(data.path)
        files = {split: find_file(path, split) for split in ("train", "test")}
        if files["train"] is None and files["test"] is None:
            files["train"] = path
        elif files["train"] is None:
            raise DataError(
                f"{path}: expected a file train ({', '.join(SUFFIXES)}), and optionally test, in this folder"
            )
        return {
            split: RawSplit(read_file(file, self.columns), str(file))
            for split, file in files.items()
            if file is not None
        }

    def _hub_split(self, split: str, revision: str | None) -> RawSplit:
        part = f"{self.folder}, " if self.folder else ""
        rows = from_hub(self.name, split=split, revision=revision or self.revision, data_dir=self.folder)
        return RawSplit(rows, f"{self.name} ({part}split {split})")


@dataclass(frozen=True)
class PlainSource:
    """A source of plain pairs.

    Attributes:
        name: name of the source.
        dataset: its raw rows.
        make_pair: makes a pair of a raw row.
        continues: whether completions continue the text of their prompt, see `make_pairs`.
    """

    name: str
    dataset: HubDataset
    make_pair: MakePair
    continues: bool = False

    def load(self, data: DataConfig, shares: Shares, seed: int) -> SourceData:
        """Load the pairs with their splits, and reserve some of them.

        Args:
            data: the recipe's section.
            shares: of the judge and of the server.
            seed: of the recipe.

        Raises:
            DataError: the data cannot be read, lack a column, or have no usable pair.
        """
        by_split: dict[str, list[Pair]] = {}
        dropped: Counter[str] = Counter()
        for split, raw in self.dataset.raw_splits(data).items():
            by_split[split], counts = make_pairs(raw, self.dataset.columns, self.make_pair, self.continues)
            dropped.update(counts)
        pairs, duplicates = in_splits(by_split, data, seed)
        return hold_out(pairs, self.name, shares, seed, nonzero(dropped, duplicates))


def nonzero(dropped: Mapping[str, int], duplicates: int) -> dict[str, int]:
    """Counts of dropped rows with those of training rows whose prompt is held out, without zeros."""
    counts = {**dropped, "prompt also in the test split": duplicates}
    return {reason: count for reason, count in counts.items() if count}


def make_pairs(
    raw: RawSplit, columns: Sequence[str], make_pair: MakePair, continues: bool = False
) -> tuple[list[Pair], dict[str, int]]:
    """Make pairs of raw rows, without white space around their texts.

    Args:
        raw: the rows.
        columns: columns that every row must have.
        make_pair: makes a pair of a raw row.
        continues: completions continue the text of their prompt. The white space between the two
            stays, at the beginning of the completion, so that prompt and completion together are
            the text of the data set.

    Returns:
        the pairs, and the number of rows without one, by reason: those of the source, an empty
        text, or two completions that are the same.

    Raises:
        DataError: a column is missing or of the wrong type, or no row makes a pair.
    """
    pairs: list[Pair] = []
    dropped: Counter[str] = Counter()
    for number, row in enumerate(raw.rows, 1):
        where = f"{raw.where}, row {number}"
        check_columns(row, columns, where)
        result = make_pair(row, where)
        if isinstance(result, str):
            dropped[result] += 1
            continue
        pair = _stripped(result, continues)
        if not (pair.prompt and pair.chosen.strip() and pair.rejected.strip()):
            dropped["empty text"] += 1
        elif pair.chosen.strip() == pair.rejected.strip():
            dropped["both answers the same"] += 1
        else:
            pairs.append(pair)
    if not pairs:
        reasons = ", ".join(f"{reason}: {n}" for reason, n in dropped.items()) or "there are none"
        raise DataError(
            f"{raw.where}: none of the {dropped.total()} rows makes a pair ({reasons}); see whether its"
            " columns hold what this source reads"
        )
    return pairs, dict(dropped)


def _stripped(pair: Pair, continues: bool) -> Pair:
    prompt = pair.prompt.strip()
    chosen, rejected = pair.chosen, pair.rejected
    if continues:
        between = trailing_space(pair.prompt)
        return replace(
            pair, prompt=prompt, chosen=(between + chosen).rstrip(), rejected=(between + rejected).rstrip()
        )
    return replace(pair, prompt=prompt, chosen=chosen.strip(), rejected=rejected.strip())


def in_splits(by_split: Mapping[str, Sequence[Pair]], data: DataConfig, seed: int) -> tuple[list[Pair], int]:
    """Assign splits to pairs, and drop training pairs whose prompt is in the test split too.

    An existing split of validation or test stays; others are drawn by group, or prompt. Prompts are
    the same if they differ only in case and white space.

    Args:
        by_split: pairs of 'train', and of 'validation' and 'test' if they exist.
        data: its shares of validation and test.
        seed: of the recipe.

    Returns:
        the pairs, and the number of those dropped because their group or prompt is held out.
    """
    everything: list[Pair] = []
    for split in reversed(SPLITS):
        everything += [replace(pair, split=split) for pair in by_split.get(split, ())]
    splits: dict[int, str] = {}  # the most held-out one of each component
    kept: dict[str, list[Pair]] = {split: [] for split in SPLITS}
    for component, pair in zip(connected(everything), everything, strict=True):
        if splits.setdefault(component, pair.split) == pair.split:
            kept[pair.split].append(pair)
    training = grouped(kept["train"])
    validation, test = (
        0.0 if split in by_split else share
        for split, share in (("validation", data.validation), ("test", data.test))
    )
    drawn = assign((pair.split_group for pair in training), validation, test, seed)
    pairs = [replace(pair, split=split) for pair, split in zip(training, drawn, strict=True)]
    pairs += [*grouped(kept["validation"]), *grouped(kept["test"])]
    return pairs, len(everything) - len(pairs)


def plain_pair(row: Mapping[str, Any]) -> Pair:
    """The pair of a row with the columns FIELDS; null is empty text."""
    return Pair(row["prompt"] or "", row["chosen"] or "", row["rejected"] or "")


def check_finite(row: Mapping[str, Any], columns: Iterable[str], where: str) -> None:
    """Refuse a row in which one of the columns is not a finite number.

    Raises:
        DataError: naming the row, the column and its value.
    """
    for column in columns:
        check_number(row, (column,), where)
        if row[column] is None or not math.isfinite(row[column]):
            raise DataError(f"{where}: column '{column}' must be a finite number, but is {row[column]!r}")
