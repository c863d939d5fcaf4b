"""Data sections and files of raw rows, for the tests of sources."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from components.config import DataConfig, check_section
from components.data.records import read_rows

WHOLE = {"align_share": 0.0, "judge_share": 0.0}
"""Options of a source of which nothing is reserved for the judge and the server."""

WHOLE_FILE = {"align_share": 0.0, "judge_clients": 0.0}
"""The same for the sources jsonl and parquet."""


def data_config(**values: Any) -> DataConfig:
    """The section `data` of a recipe, checked as a recipe is."""
    return check_section(DataConfig, values, "recipe.yaml", "data")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Write one JSON object per line, and return the path as a recipe names it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read one JSON object per line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prepared_rows(folder: Path, table: str = "pairs") -> list[dict[str, Any]]:
    """The rows of a table of a prepared folder."""
    rows: list[dict[str, Any]] = read_rows(folder / f"{table}.parquet")
    return rows
