"""Raw rows from a local file or from the Hugging Face hub, with errors that name the file and the line."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from components.data.records import DataError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
UNREADABLE = (UnicodeDecodeError, gzip.BadGzipFile, EOFError)
Row = dict[str, Any]


def read_file(path: Path, needed: Sequence[str] = ()) -> list[Row]:
    """The rows of a JSON-lines file (gzipped or not), a JSON file of one list (.json), or a parquet file, in order.

    Args:
        path: its suffix says what it is, see SUFFIXES.
        needed: columns that every row must have.

    Raises:
        DataError: the file is missing, empty or of another kind, a line is not a JSON object, or a column is missing.
    """
    if not path.is_file():
        raise DataError(f"{path}: there is no such file (data.path)")
    if not path.name.endswith(SUFFIXES):
        raise DataError(f"{path}: expected a file that ends in one of {', '.join(SUFFIXES)}")
    rows = _parquet(path) if path.name.endswith(".parquet") else _json(path)
    if not rows:
        raise DataError(f"{path}: the file holds no rows")
    for number, row in enumerate(rows, 1):
        missing = [c for c in needed if c not in row]
        if missing:
            raise DataError(f"{path}, row {number}: column {', '.join(map(repr, missing))} is missing; there are: {', '.join(map(str, row)) or 'none'}")
    return rows


def find_file(folder: Path, stem: str) -> Path | None:
    """The file of that name in a folder, whichever suffix of SUFFIXES it has."""
    return next((folder / (stem + s) for s in SUFFIXES if (folder / (stem + s)).is_file()), None)


def from_hub(name: str, config: str | None = None, *, split: str, revision: str | None = None, data_dir: str | None = None) -> Iterable[Row]:
    """A split of a hub data set. No remote code is ever run.

    Raises:
        DataError: the hub cannot be reached, or has no such data set, revision or split.
    """
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split, revision=revision, data_dir=data_dir)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _unreached(f"{name} (split {split})", error) from error


def from_hub_file(name: str, file: str, revision: str | None = None) -> list[Row]:
    """The rows of one file of a hub data set that is not read whole (its other files, or a script, are of no use here).

    Raises:
        DataError: the hub cannot be reached, has no such data set, revision or file, or the file cannot be read.
    """
    import huggingface_hub

    try:
        path = huggingface_hub.hf_hub_download(name, file, repo_type="dataset", revision=revision)
    except (OSError, ValueError) as error:
        raise _unreached(f"{name} (file {file})", error) from error
    return read_file(Path(path))


def check_text(row: Mapping[str, Any], columns: Iterable[str], where: str) -> None:
    """Refuse a row in which one of the columns is there but is not text.

    Raises:
        DataError: naming the row, the column and what it holds.
    """
    for column in columns:
        value = row.get(column)
        if value is not None and not isinstance(value, str):
            raise DataError(f"{where}: column '{column}' must be text, but is {value!r} ({type(value).__name__})")
        if value is not None and not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                raise DataError(f"{where}: column '{column}' holds half a character at position {error.start} (a lone surrogate), which is not text: repair the file") from None


def check_number(row: Mapping[str, Any], columns: Iterable[str], where: str) -> None:
    """Refuse a row in which one of the columns is there but is not a number, or is one that no float can hold.

    Raises:
        DataError: naming the row, the column and what it holds.
    """
    for column in columns:
        value = row.get(column)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise DataError(f"{where}: column '{column}' must be a number, but is {value!r} ({type(value).__name__})")
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise DataError(f"{where}: column '{column}' is a number of {len(str(abs(value)))} digits, which is too large: repair the file")


def _unreached(what: str, error: Exception) -> DataError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return DataError(f"{what} cannot be loaded from the Hugging Face hub: {reason.rstrip('.')}. "
                     "Give a local copy as data.path, or see whether the hub can be reached from here.")


def _json(path: Path) -> list[Row]:
    rows = _json_list(path) if path.name.endswith((".json", ".json.gz")) else None
    return _json_lines(path) if rows is None else rows


def _json_list(path: Path) -> list[Row] | None:
    """The rows of a file that holds one list of objects; None where it begins otherwise (JSON lines are named .json, too)."""
    try:
        with _opened(path) as file:
            text = file.read()
    except UNREADABLE as error:
        raise _unreadable(path, error) from None
    if not text.lstrip().startswith("["):
        return None
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: this is not valid JSON ({error.msg}, column {error.colno}); expected a list of objects") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: this JSON cannot be read ({unparsed(error)}); expected a list of objects") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {number}: expected a JSON object with named columns, but this is {str(row)[:60]!r}")
    return rows


def unparsed(error: Exception) -> str:
    """Why Python cannot hold what is well-formed JSON: it is nested too deeply, or a number has too many digits."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]


def _opened(path: Path) -> IO[str]:
    return (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8")


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: the file cannot be read as {'gzipped ' if path.suffix == '.gz' else ''}UTF-8 text ({error})")


def _json_lines(path: Path) -> list[Row]:
    rows = []
    try:
        with _opened(path) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{path}, line {number}: this is not valid JSON ({error.msg}, column {error.colno}); expected one object a line") from None
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{path}, line {number}: this JSON cannot be read ({unparsed(error)}); expected one object a line") from None
                if not isinstance(row, dict):
                    raise DataError(f"{path}, line {number}: expected a JSON object with named columns, but this is {line.strip()[:60]!r}")
                rows.append(row)
    except UNREADABLE as error:
        raise _unreadable(path, error) from None
    return rows


def _parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: this is not a parquet file ({error})") from None
