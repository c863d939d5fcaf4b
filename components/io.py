"""Files and folders that are written whole or not at all, and JSON."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PRIVATE = 0o600
"""Mode of a file that its owner alone may read; its folder has 0700."""


class FullDiskError(OSError):
    """No space is left for a file. The message says what to do."""


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file so that it exists with all of its bytes or not at all, also after a crash.

    Raises:
        FullDiskError: no space is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if mode == PRIVATE:
        path.parent.chmod(0o700)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, mode)
        os.replace(scratch, path)
    except BaseException as error:
        Path(scratch).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            full = f"no space is left for {path}: free some, and resume the run"
            raise FullDiskError(error.errno, full) from None
        raise


def write_new(path: Path, content: bytes) -> None:
    """Write a file that its owner alone can read, and that appears complete, unless it is there already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another process was faster
            try:
                os.link(name, path)
            except FileExistsError:
                raise
            except OSError:  # a file system without links
                with path.open("xb") as file:
                    path.chmod(0o600)
                    file.write(content)
    finally:
        os.unlink(name)


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; what JSON does not know, such as a path, is written as text."""
    write_atomically(path, (json.dumps(content, indent=1, default=str) + "\n").encode())


class DamagedFileError(ValueError):
    """A file whose bytes are not those that were written."""


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        DamagedFileError: it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedFileError(f"{path} is damaged: it is no JSON ({error})") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a JSON file that has an object.

    Raises:
        DamagedFileError: it has none.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise DamagedFileError(f"{path} is damaged: it has no JSON object")
    return content


def file_hashes(folder: Path, paths: Iterable[Path]) -> dict[str, str]:
    """sha256 of files, by their paths relative to a folder."""
    return {path.relative_to(folder).as_posix(): file_hash(path) for path in sorted(paths)}


def verify_files(folder: Path, hashes: Mapping[str, str]) -> None:
    """Require that the files of a folder have their recorded hashes.

    Raises:
        DamagedFileError: a file is missing or has other bytes.
    """
    for name, expected in hashes.items():
        path = folder / name
        if not path.is_file():
            raise DamagedFileError(f"{path} is missing")
        if file_hash(path) != expected:
            raise DamagedFileError(f"{path} is damaged: its bytes are not those that were written")


def stored(path: Path, compute: Callable[[], Any]) -> Any:
    """The content of a JSON file, which is computed and written first where it is missing."""
    if not path.is_file():
        write_json(path, compute())
    return read_json(path)


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes (hexadecimal)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which replaces another one if no error is raised.

    Only between two renames neither of them exists. The folder's parents are created.
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
