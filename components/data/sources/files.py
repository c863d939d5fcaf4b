"""Sources `jsonl` and `parquet`: the user's own preference pairs from one file.

Three columns are required: prompt, chosen, rejected. Optional ones are client_id (owner), domain,
group (rows that must stay with one client and in one split), split (train, validation or test) and
margin (a number), and a column of text of any name, if data.column names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from components.config import DataConfig
from components.data.holdout import Shares, hold_out
from components.data.records import SPLITS, DataError, Pair, SourceData
from components.data.rows import check_number, check_text, read_file
from components.data.sources.base import Source
from components.data.splits import assign, grouped

REQUIRED = ("prompt", "chosen", "rejected")
OPTIONAL = ("client_id", "domain", "group", "split")


class FileOptions(Source):
    """Options of the sources jsonl and parquet.

    Attributes:
        name: name of the source.
        suffixes: suffixes of the files that it reads.
    """

    file_columns: ClassVar[bool] = True
    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    align_share: float = Field(
        0.2,
        ge=0,
        lt=1,
        description=(
            "Share of the training prompts that become the server's unlabeled prompts; their pairs are"
            " dropped."
        ),
    )
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
        """Load pairs from a file.

        Raises:
            DataError: see read_pairs.
        """
        if data.path is None:
            raise DataError(f"the data source {self.name} reads your own pairs: give the file as data.path")
        if Path(data.path).is_file() and not data.path.name.endswith(self.suffixes):
            raise DataError(
                f"{data.path}: the data source {self.name} reads {' or '.join(self.suffixes)} files; for"
                " another kind, choose another data.source"
            )
        pairs = grouped(read_pairs(Path(data.path), data.column))
        splits = assign((pair.split_group for pair in pairs), data.validation, data.test, seed)
        pairs = [
            pair if pair.split else replace(pair, split=split)
            for pair, split in zip(pairs, splits, strict=True)
        ]
        return hold_out(pairs, self.name, Shares(self.align_share, self.judge_clients), seed, {})


class JsonlOptions(FileOptions):
    """Options of the source jsonl: one JSON object a line."""

    name: ClassVar[str] = "jsonl"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".jsonl.gz", ".json.gz")


class ParquetOptions(FileOptions):
    """Options of the source parquet."""

    name: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)


def read_pairs(path: Path, column: str | None = None) -> list[Pair]:
    """Read and check the pairs of a file; columns without a meaning are ignored.

    Args:
        path: of the file.
        column: data.column of the recipe. If it is neither required nor optional, its value is the
            pair's `column`.

    Raises:
        DataError: the file or a column is missing, a line is not JSON, a value has the wrong type,
            or a split is unknown.
    """
    own_column = None if column in (*REQUIRED, *OPTIONAL) else column
    required = [*REQUIRED, *([own_column] if own_column is not None else [])]
    return [
        _pair(row, own_column, f"{path}, row {number}")
        for number, row in enumerate(read_file(path, required), 1)
    ]


def _pair(row: Mapping[str, Any], own_column: str | None, where: str) -> Pair:
    own_columns = [own_column] if own_column is not None else []
    check_text(row, (*REQUIRED, *OPTIONAL, *own_columns), where)
    empty = [column for column in REQUIRED if row[column] is None]
    if empty:
        raise DataError(f"{where}: column '{empty[0]}' is null, but text is needed")
    if row.get("split") and row["split"] not in SPLITS:
        raise DataError(
            f"{where}: split '{row['split']}' is not known; there are: {', '.join(SPLITS)} (or leave it"
            " empty)"
        )
    check_number(row, ("margin",), where)
    return Pair(
        prompt=row["prompt"],
        chosen=row["chosen"],
        rejected=row["rejected"],
        client_id=row.get("client_id") or "",
        domain=row.get("domain") or "",
        split=row.get("split") or "",
        group=row.get("group") or None,
        margin=None if row.get("margin") is None else float(row["margin"]),
        column=None if own_column is None else row[own_column] or "",
    )
