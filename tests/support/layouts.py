"""Pairs in the layouts that the hub, `datasets` and other tools write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets

Rows = Sequence[Mapping[str, Any]]
datasets.disable_progress_bars()


def own_rows(numbers: range) -> list[dict[str, str]]:
    """Pairs with prompts of their own, of which neither completion is always the longer one."""
    return [
        {
            "prompt": f"Question {n}?",
            "chosen": f"Yes, {n}." + " Indeed." * (n % 2),
            "rejected": f"No, {n}." + " Never." * (n % 3),
        }
        for n in numbers
    ]


def write_shards(folder: Path, split: str, rows: Rows, count: int = 2) -> None:
    """Write rows as parquet shards, as the hub names them."""
    folder.mkdir(parents=True, exist_ok=True)
    size = -(-len(rows) // count)
    for n in range(count):
        part = datasets.Dataset.from_list([dict(row) for row in rows[n * size : (n + 1) * size]])
        part.to_parquet(folder / f"{split}-{n:05d}-of-{count:05d}.parquet")


def _flat_shards(folder: Path, splits: Mapping[str, Rows]) -> None:
    for split, rows in splits.items():
        write_shards(folder, split, rows)


def _shards_in_data(folder: Path, splits: Mapping[str, Rows]) -> None:
    _flat_shards(folder / "data", splits)
    (folder / "README.md").write_text("A data card.")


def _folder_for_each_split(folder: Path, splits: Mapping[str, Rows]) -> None:
    for split, rows in splits.items():
        (folder / split).mkdir(parents=True)
        datasets.Dataset.from_list([dict(row) for row in rows]).to_parquet(folder / split / "0000.parquet")


def _saved_splits(folder: Path, splits: Mapping[str, Rows]) -> None:
    saved = {name: datasets.Dataset.from_list([dict(row) for row in rows]) for name, rows in splits.items()}
    datasets.DatasetDict(saved).save_to_disk(folder)


LAYOUTS: dict[str, Callable[[Path, Mapping[str, Rows]], None]] = {
    "flat shards": _flat_shards,
    "shards in data": _shards_in_data,
    "a folder for each split": _folder_for_each_split,
    "save_to_disk": _saved_splits,
}
"""Writers of rows by split into a folder, by the name of their layout."""
