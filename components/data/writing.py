"""Writes a prepared folder, so that it appears complete or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from components.data.ownership import is_missing
from components.data.records import PAIR_COLUMNS, PROMPT_COLUMNS
from components.data.tables import OPTIONAL_COLUMNS, PreparedTables

if TYPE_CHECKING:
    import pandas as pd


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which replaces another one if no error is raised.

    Only between two renames neither of them exists.

    Args:
        folder: to replace; its parents are created.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield building
        building.chmod(0o755)  # mkdtemp's is private
        if folder.exists():
            old = building.with_name(f"{building.name}.old")
            folder.rename(old)
            building.rename(folder)
            shutil.rmtree(old)
        else:
            building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def write_tables(folder: Path, tables: PreparedTables) -> None:
    """Write pairs.parquet, judge.parquet and prompts.parquet into a folder."""
    for name, frame in (("pairs", tables.pairs), ("judge", tables.judge)):
        optional = [column for column in OPTIONAL_COLUMNS if column in frame]
        _write_table(folder / f"{name}.parquet", frame, [*PAIR_COLUMNS, *optional])
    _write_table(folder / "prompts.parquet", tables.prompts, PROMPT_COLUMNS)


def _write_table(path: Path, frame: pd.DataFrame, columns: Sequence[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    types = {name: getattr(pa, kind)() for name, kind in OPTIONAL_COLUMNS.items()}
    arrays = {}
    for column in columns:
        if column == "references":
            references = [list(texts) for texts in frame[column]]
            arrays[column] = pa.array(references, type=pa.list_(pa.string()))
        else:
            values = [None if is_missing(value) else value for value in frame[column].tolist()]
            arrays[column] = pa.array(values, type=types.get(column, pa.string()))
    pyarrow.parquet.write_table(pa.table(arrays), path)
