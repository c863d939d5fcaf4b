"""Files of rows, read within bounds on their size; damaged and special files are refused."""

from __future__ import annotations

import gzip
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from components.data.records import DataError

if TYPE_CHECKING:
    import pyarrow as pa

MAX_BYTES = 16 * 2**30
"""Of the rows of one file, unpacked."""
MAX_LINE = 32 * 2**20
"""Characters of a line."""
MAX_BLANK_LINES = 1_000_000
MAX_EXPANSION = 200
"""How many times its own size a packed file may unpack to, once that is more than UNPACKED."""
UNPACKED = 64 * 2**20
ROW = 64
"""Bytes that a row counts beside those of its values, since rows become objects of Python."""
BATCH = 256
"""Rows of a table that are unpacked at once."""
TO_DO = "it is damaged, incomplete or of another kind; write or copy it again"


def lines(path: Path, newline: str | None = None, blank: bool = False) -> Iterator[tuple[int, str]]:
    """The lines of a text file, gzipped or not, with their numbers.

    Args:
        path: of the file.
        newline: see open.
        blank: whether blank lines are among them.
    """
    limit = _limit(path)
    size = blanks = number = 0
    with _open_text(path, newline) as file:
        while line := file.readline(MAX_LINE + 1):
            number += 1
            size += len(line) + ROW
            if len(line) > MAX_LINE:
                raise DataError(
                    f"{path}, line {number}: expected one row a line, but this line has more than"
                    f" {MAX_LINE:,} characters: write each row on a line of its own"
                )
            if size > limit:
                raise _too_large(path, limit)
            if line.isspace():
                blanks += 1
                if blanks > MAX_BLANK_LINES:
                    raise DataError(
                        f"{path}: expected rows, but more than {MAX_BLANK_LINES:,} lines are blank: write the"
                        " file without them"
                    )
                if not blank:
                    continue
            yield number, line


def list_text(path: Path) -> str | None:
    """The text of a file of one JSON list, gzipped or not; None if it begins with something else."""
    limit = _limit(path)
    chunks: list[str] = []
    size = 0
    with _open_text(path) as file:
        while chunk := file.read(2**20):
            size += len(chunk)
            if size > limit:
                raise _too_large(path, limit)
            if not chunks:
                chunk = chunk.lstrip()
                if chunk and chunk[0] != "[":
                    return None
            chunks += [chunk] if chunk else []
    return "".join(chunks) or None


def table_rows(path: Path, batches: Iterator[pa.RecordBatch | pa.Table]) -> Iterator[dict[str, Any]]:
    """The rows of a table of several batches.

    Raises:
        ArrowInvalid: values lie outside of the table.
        DataError: it exceeds a bound.
    """
    limit = _limit(path)
    size = 0
    for batch in batches:
        batch.validate(full=True)  # or wrong offsets of a damaged file end the process
        size += batch.nbytes + ROW * batch.num_rows
        if size > limit:
            raise _too_large(path, limit)
        yield from batch.to_pylist()


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Report what a reader raises about a file or folder by its name.

    Args:
        path: of the file or folder.
        kind: what it is read as.

    Raises:
        DataError: it cannot be read.
    """
    try:
        yield
    except DataError:
        raise
    except PermissionError as error:
        raise DataError(f"{path}: this cannot be read ({error.strerror}): see its permissions") from None
    except Exception as error:  # pyarrow and datasets raise any kind on damaged bytes
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise DataError(f"{path}: this cannot be read as {kind} ({reason.rstrip('.')}): {TO_DO}") from None


@contextmanager
def _open_text(path: Path, newline: str | None = None) -> Iterator[IO[str]]:
    require_regular(path)
    packing = "gzipped " if path.suffix == ".gz" else ""
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
            if packing
            else path.open(encoding="utf-8-sig", newline=newline) as file
        ):
            yield file
    except PermissionError as error:
        raise DataError(f"{path}: this cannot be read ({error.strerror}): see its permissions") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: the file cannot be read as {packing}UTF-8 text ({error}): {TO_DO}"
        ) from None


def require_regular(path: Path) -> None:
    """Refuse what is no regular file, such as a pipe, from which nothing may ever come."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise DataError(f"{path}: expected a file with rows, but this is {kind}: copy the rows to a file")


def _limit(path: Path) -> int:
    """Bytes that a file, or the files of a folder, may unpack to."""
    files = [path] if path.is_file() else [file for file in path.glob("*") if file.is_file()]
    return min(MAX_BYTES, max(UNPACKED, MAX_EXPANSION * sum(file.stat().st_size for file in files)))


def _too_large(path: Path, limit: int) -> DataError:
    return DataError(
        f"{path}: this unpacks to more than {limit:,} bytes, the most that is read of data of its size: if it"
        " is not damaged, unpack it yourself, or write it as several files"
    )
