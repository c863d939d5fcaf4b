"""Sources `jsonl` and `parquet`: the user's own preference pairs from one file.

Three columns are needed: prompt, chosen, rejected. Optional ones: client_id (owner), domain, group (what must stay
with one client and in one split), split (train, validation or test), margin (a number); and a column of text of any
name, where data.column names it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from components.config import DataConfig, Section
from components.data.records import SPLITS, DataError, SourceData
from components.data.registry import source
from components.data.reserve import set_apart
from components.data.rows import check_number, check_text, read_file
from components.data.splits import assign, group_of, grouped

NEEDED = ("prompt", "chosen", "rejected")
OPTIONAL = ("client_id", "domain", "group", "split")


class FileOptions(Section):
    """Options of the sources jsonl and parquet."""

    align_share: float = Field(0.2, ge=0, lt=1, description="Share of the training prompts that become the server's unlabelled prompts; their pairs are left out.")
    judge_clients: float = Field(0.1, ge=0, lt=1, description="Share of the owners whose pairs train the judge; of the prompts where there are fewer than 10 owners.")


@source("jsonl", FileOptions, own_columns=True)
def load_jsonl(data: DataConfig, options: FileOptions, seed: int) -> SourceData:
    """Pairs from a JSON-lines file (.jsonl, .jsonl.gz), one object a line.

    Raises:
        DataError: see read_pairs.
    """
    return _load(data, options, seed, "jsonl", (".jsonl", ".jsonl.gz", ".json.gz"))


@source("parquet", FileOptions, own_columns=True)
def load_parquet(data: DataConfig, options: FileOptions, seed: int) -> SourceData:
    """Pairs from a parquet file.

    Raises:
        DataError: see read_pairs.
    """
    return _load(data, options, seed, "parquet", (".parquet",))


def read_pairs(path: Path, column: str | None = None) -> list[dict[str, Any]]:
    """The pairs of a file, checked; absent optional columns stay absent, extra columns are left out.

    Args:
        path: of the file.
        column: data.column of the recipe. Where it is none of the columns that are read anyway, its value is the pair's `column`.

    Raises:
        DataError: the file or a column is missing, a line is not JSON, a value has the wrong type, or a split is unknown.
    """
    pairs = []
    own = [column] if column is not None and column not in (*NEEDED, *OPTIONAL) else []
    for number, row in enumerate(read_file(path, (*NEEDED, *own)), 1):
        where = f"{path}, row {number}"
        check_text(row, (*NEEDED, *OPTIONAL, *own), where)
        empty = [c for c in NEEDED if row[c] is None]
        if empty:
            raise DataError(f"{where}: column '{empty[0]}' is null, but text is needed")
        if row.get("split") and row["split"] not in SPLITS:
            raise DataError(f"{where}: split '{row['split']}' is not known; there are: {', '.join(SPLITS)} (or leave it empty)")
        pair = {c: row[c] for c in NEEDED} | {c: row[c] for c in OPTIONAL if row.get(c)}
        if own:
            pair["column"] = row[column] or ""
        check_number(row, ("margin",), where)
        if row.get("margin") is not None:
            pair["margin"] = float(row["margin"])
        pairs.append(pair)
    return pairs


def _load(data: DataConfig, options: FileOptions, seed: int, name: str, suffixes: tuple[str, ...]) -> SourceData:
    if data.path is None:
        raise DataError(f"the data source {name} reads your own pairs: give the file as data.path")
    if Path(data.path).is_file() and not data.path.endswith(suffixes):
        raise DataError(f"{data.path}: the data source {name} reads {' or '.join(suffixes)} files; for another kind, choose another data.source")
    rows = grouped(read_pairs(Path(data.path), data.column))
    splits = assign(map(group_of, rows), data.validation, data.test, seed)
    rows = [r if r.get("split") else r | {"split": split} for r, split in zip(rows, splits, strict=True)]
    return set_apart(rows, name, options.align_share, options.judge_clients, seed, {})
