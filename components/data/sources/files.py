"""Sources `jsonl` and `parquet`: the user's own preference pairs from a file or a folder.

Three columns are required: prompt, chosen, rejected. Optional ones are client_id (owner), domain,
group (rows that must stay with one client and in one split), split (train, validation or test) and
margin (a number), and a column of text of any name, if data.column names it.

In a folder whose files, subfolders or saved data sets have the names of splits, such as
train-00000-of-00002.parquet, these are the splits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, create_model

from components.config import DataConfig
from components.data.holdout import Shares, hold_out
from components.data.raw import NeededText, RawRow, Text, if_null
from components.data.records import DataError, Pair, SourceData
from components.data.rows import file_kinds, find_splits, read_file
from components.data.sources.base import AlignShare, Source
from components.data.splits import assign, connection_warning, grouped, in_splits


class OwnRow(RawRow):
    """A pair of a user's own file."""

    prompt: NeededText
    chosen: NeededText
    rejected: NeededText
    client_id: Text = ""
    domain: Text = ""
    group: Text = ""
    split: Annotated[Literal["", "train", "validation", "test"], if_null("")] = ""
    margin: float | None = None


class FileOptions(Source):
    """Options of the sources jsonl and parquet.

    Attributes:
        name: name of the source.
        suffixes: suffixes of the files that it reads.
    """

    file_columns: ClassVar[bool] = True
    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    align_share: AlignShare = 0.2
    judge_clients: float = Field(
        0.1,
        ge=0,
        lt=1,
        description=(
            "Share of the owners whose pairs train the judge; of the prompts where there are fewer than"
            " 10 owners."
        ),
    )

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Load pairs from a file or a folder.

        A folder's split of validation or test stays, and pairs of other splits whose prompt or group is
        in it are dropped and counted.

        Raises:
            DataError: see read_pairs; or a prompt connects so many groups that a split is empty.
        """
        if data.path is None:
            raise DataError(f"the data source {self.name} reads your own pairs: give the file as data.path")
        by_split: dict[str, list[Pair]] = {}
        for split, path in find_splits(Path(data.path)).items():
            self._check_kind(path)
            by_split[split] = read_pairs(path, data.column)
        whole = by_split.pop("", None)
        if whole is None:
            if "train" not in by_split:
                raise DataError(f"{data.path}: there is no split train in this folder: bring its pairs too")
            warning = connection_warning(by_split["train"])
            pairs, duplicates = in_splits(by_split, data, seed)
            dropped = {"prompt also in a held-out split": duplicates} if duplicates else {}
        else:
            warning = connection_warning(whole)
            pairs, dropped = _in_own_splits(whole, data, seed), {}
        if not warning:
            return self._hold_out(pairs, seed, dropped)
        try:
            held = self._hold_out(pairs, seed, dropped)
        except DataError:
            held = None
        if held is None or "test" not in held.pairs["split"]:
            raise DataError(f"{data.path}: {warning}.")
        return replace(held, warnings=(f"{data.path}: {warning}.",))

    def _hold_out(self, pairs: Sequence[Pair], seed: int, dropped: Mapping[str, int]) -> SourceData:
        return hold_out(pairs, self.name, Shares(self.align_share, self.judge_clients), seed, dropped)

    def _check_kind(self, path: Path) -> None:
        others = file_kinds(path) - set(self.suffixes)
        if others:
            raise DataError(
                f"{path}: the data source {self.name} reads {' or '.join(self.suffixes)} files, but here are"
                f" {' and '.join(sorted(others))}: for another kind, choose another data.source"
            )


def _in_own_splits(pairs: Sequence[Pair], data: DataConfig, seed: int) -> list[Pair]:
    """The pairs in the splits of their column, or drawn by group where it is empty."""
    pairs = grouped(pairs)
    splits = assign((pair.split_group for pair in pairs), data.validation, data.test, seed)
    return [
        pair if pair.split else replace(pair, split=split) for pair, split in zip(pairs, splits, strict=True)
    ]


class JsonlOptions(FileOptions):
    """Options of the source jsonl: one JSON object a line, or one list of them (.json)."""

    name: ClassVar[str] = "jsonl"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".jsonl.gz", ".json", ".json.gz")


class ParquetOptions(FileOptions):
    """Options of the source parquet; folders that save_to_disk of `datasets` wrote are read too."""

    name: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".arrow")


def read_pairs(path: Path, column: str | None = None) -> list[Pair]:
    """Read and check the pairs of a file or folder; columns without a meaning are ignored.

    Args:
        path: see rows.read_file.
        column: data.column of the recipe. If it is none of OwnRow's texts, its value is the pair's
            `column`.

    Raises:
        DataError: the file or a column is missing, a line is not JSON, a value has the wrong type,
            or a split is unknown.
    """
    row_type = OwnRow
    if column is not None and column not in OwnRow.model_fields.keys() - {"margin"}:
        row_type = create_model("OwnRow", __base__=OwnRow, column=(Text, Field(alias=column)))
    rows = row_type.read(read_file(path), str(path))
    return [Pair(**row.model_dump() | {"group": row.group or None}) for row in rows]
