"""Raw rows from local files or the Hugging Face hub, with errors that name the file and the line."""

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
OBJECTS_EXPECTED = "expected a JSON object with named columns"
Row = dict[str, Any]
"""A raw row: values of any JSON type by column."""


def read_file(path: Path, required: Sequence[str] = ()) -> list[Row]:
    """Read the rows of a file in order.

    Args:
        path: a JSON-lines file (gzipped or not), a JSON file of one list (.json), or a parquet
            file; the suffix is one of SUFFIXES.
        required: columns that every row must have.

    Raises:
        DataError: the file is missing, empty or of another kind, a line is not a JSON object, or a
            column is missing.
    """
    if not path.is_file():
        raise DataError(f"{path}: there is no such file (data.path)")
    if not path.name.endswith(SUFFIXES):
        raise DataError(f"{path}: expected a file that ends in one of {', '.join(SUFFIXES)}")
    rows = _parquet(path) if path.name.endswith(".parquet") else _json(path)
    if not rows:
        raise DataError(f"{path}: the file holds no rows")
    for number, row in enumerate(rows, 1):
        check_columns(row, required, f"{path}, row {number}")
    return rows


def find_file(folder: Path, stem: str) -> Path | None:
    """The file of that name in a folder, with any of SUFFIXES; None if there is none."""
    paths = [folder / (stem + suffix) for suffix in SUFFIXES]
    return next((path for path in paths if path.is_file()), None)


def require_file(folder: Path, stem: str) -> Path:
    """The file of that name in a folder.

    Raises:
        DataError: there is none.
    """
    file = find_file(folder, stem)
    if file is None:
        raise DataError(f"{folder}: the file {stem} ({', '.join(SUFFIXES)}) is missing in this folder")
    return file


CONVERSION = "refs/convert/parquet"
"""Branch on which the hub converts a data set to parquet, in a folder for each configuration."""


def from_hub(
    name: str,
    config: str | None = None,
    *,
    split: str,
    revision: str | None = None,
    data_dir: str | None = None,
) -> Iterable[Row]:
    """Load a split of a hub data set. No remote code is run.

    Raises:
        DataError: the hub cannot be reached, or has no such data set, revision or split.
    """
    import datasets

    try:
        rows: Iterable[Row] = datasets.load_dataset(
            name, config, split=split, revision=revision, data_dir=data_dir
        )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _hub_error(f"{name} (split {split})", error) from error
    return rows


def from_hub_file(name: str, file: str, revision: str | None = None) -> list[Row]:
    """Read one file of a hub data set whose other files, or loading script, are not used.

    Raises:
        DataError: the hub cannot be reached, has no such data set, revision or file, or the file
            cannot be read.
    """
    import huggingface_hub

    try:
        path = huggingface_hub.hf_hub_download(name, file, repo_type="dataset", revision=revision)
    except (OSError, ValueError) as error:
        raise _hub_error(f"{name} (file {file})", error) from error
    return read_file(Path(path))


def check_columns(row: Mapping[str, Any], required: Iterable[str], where: str) -> None:
    """Refuse a row without a required column.

    Raises:
        DataError: naming the row, the missing columns and the existing ones.
    """
    missing = [column for column in required if column not in row]
    if missing:
        raise DataError(
            f"{where}: column {', '.join(map(repr, missing))} is missing; there are:"
            f" {', '.join(map(str, row)) or 'none'}"
        )


def check_text(row: Mapping[str, Any], columns: Iterable[str], where: str) -> None:
    """Refuse a row in which one of the columns has a value that is not text.

    Raises:
        DataError: naming the row, the column and its value.
    """
    for column in columns:
        value = row.get(column)
        if value is None:
            continue
        if not isinstance(value, str):
            raise DataError(f"{where}: column '{column}' must be text, but is {describe(value)}")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: column '{column}' holds half a character at position {error.start} (a lone"
                " surrogate), which is not text: repair the file"
            ) from None


def check_number(row: Mapping[str, Any], columns: Iterable[str], where: str) -> None:
    """Refuse a row in which one of the columns has a value that is not a number, or too large.

    Raises:
        DataError: naming the row, the column and its value.
    """
    for column in columns:
        value = row.get(column)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise DataError(f"{where}: column '{column}' must be a number, but is {describe(value)}")
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise DataError(
                f"{where}: column '{column}' is a number of {len(str(abs(value)))} digits, which is too"
                " large: repair the file"
            )


def text_of(row: Mapping[str, Any], column: str) -> str:
    """A checked text of a row without white space around it; empty where the column is null."""
    return (row[column] or "").strip()


def describe(value: Any) -> str:
    """A value and its type, for messages."""
    return f"{value!r} ({type(value).__name__})"


def parse_failure(error: Exception) -> str:
    """Why Python cannot parse well-formed JSON: its nesting is too deep, or a number too long."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]


def _hub_error(name: str, error: Exception) -> DataError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return DataError(
        f"{name} cannot be loaded from the Hugging Face hub: {reason.rstrip('.')}. "
        "Give a local copy as data.path, or see whether the hub can be reached from here."
    )


def _json(path: Path) -> list[Row]:
    rows = _json_list(path) if path.name.endswith((".json", ".json.gz")) else None
    return _json_lines(path) if rows is None else rows


def _json_list(path: Path) -> list[Row] | None:
    """The rows of a file of one list of objects; None for others, since JSON lines may be .json."""
    try:
        with _open_text(path) as file:
            text = file.read()
    except UNREADABLE as error:
        raise _unreadable(path, error) from None
    if not text.lstrip().startswith("["):
        return None
    rows = _parse(text, path, 0, "expected a list of objects")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {number}: {OBJECTS_EXPECTED}, but this is {str(row)[:60]!r}")
    checked: list[Row] = rows
    return checked


def _json_lines(path: Path) -> list[Row]:
    rows: list[Row] = []
    try:
        with _open_text(path) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = _parse(line, path, number, "expected one object a line")
                if not isinstance(row, dict):
                    raise DataError(
                        f"{path}, line {number}: {OBJECTS_EXPECTED}, but this is {line.strip()[:60]!r}"
                    )
                rows.append(row)
    except UNREADABLE as error:
        raise _unreadable(path, error) from None
    return rows


def _parse(text: str, path: Path, line: int, expected: str) -> Any:
    """Parse JSON; line is the number of the line, 0 where the text is the whole file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        column = "" if line else f", column {error.colno}"
        raise DataError(
            f"{path}, line {line or error.lineno}: this is not valid JSON ({error.msg}{column}); {expected}"
        ) from None
    except (ValueError, RecursionError) as error:
        where = f"{path}, line {line}" if line else str(path)
        raise DataError(f"{where}: this JSON cannot be read ({parse_failure(error)}); {expected}") from None


def _open_text(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open("rt", encoding="utf-8")


def _unreadable(path: Path, error: Exception) -> DataError:
    packing = "gzipped " if path.suffix == ".gz" else ""
    return DataError(f"{path}: the file cannot be read as {packing}UTF-8 text ({error})")


def _parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: this is not a parquet file ({error})") from None
    return rows
