"""What a kill leaves on disk, at every atomic write of a federation.

A process that gets SIGKILL runs no more code, so what it leaves is the content of its folder at
that moment. An uninterrupted run is observed: at each of its atomic writes (a scratch file that is
renamed) its folder is copied twice, as it is in the middle of the write, with half a scratch file,
and as it is right after it; at each deletion it is copied once, right after it. Such a copy is a
disk image; to resume in it is to resume after a kill at that moment.

A run that is resumed from an image needs to reach the next commit alone: a process remembers
nothing beyond its folder, and the folder with that commit is the next image, from which a run is
resumed too.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

SCRATCH = ".writing-"
"""How the name of a file begins that is being written; see write_atomically."""


@dataclass(frozen=True)
class DiskImage:
    """A folder as a kill leaves it.

    Attributes:
        write: number of the write or deletion, from 1.
        torn: whether the kill is in the middle of the write, before the rename, or right after it.
        file: what was written or deleted, relative to the folder.
        folder: the copy.
        deleted: whether the file was deleted rather than written.
    """

    write: int
    torn: bool
    file: Path
    folder: Path
    deleted: bool = False

    @property
    def is_commit(self) -> bool:
        """Whether a step has just been committed."""
        return is_commit(self.file) and not self.torn

    def __str__(self) -> str:
        return f"killed {'in' if self.torn else 'after'} write or deletion {self.write} ({self.file})"


class StoppedError(Exception):
    """The run was stopped after a commit."""


def is_commit(file: Path) -> bool:
    """Whether a file is a commit."""
    return file.parent.name == "commits"


@contextmanager
def stopped_after_commit() -> Iterator[None]:
    """Stop a run right after its next commit; a run without a further commit ends by itself."""
    rename = os.replace

    def stop(source: Any, target: Any, **options: Any) -> None:
        rename(source, target, **options)
        if is_commit(Path(target)):
            raise StoppedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", stop)
        with suppress(StoppedError):
            yield


@contextmanager
def observed_writes(folder: Path, images: Path) -> Iterator[list[DiskImage]]:
    """The disk images of all atomic writes and deletions in a folder while the context lasts, in `images`."""
    images_so_far: list[DiskImage] = []
    numbers = count(1)
    rename = os.replace
    unlink = os.unlink

    def observed(source: Any, target: Any, **options: Any) -> None:
        file = Path(target)
        if folder not in file.parents:
            rename(source, target, **options)
            return
        assert Path(source).name.startswith(SCRATCH), f"{file} is not written atomically"
        write = next(numbers)
        name = file.relative_to(folder)
        images_so_far.append(DiskImage(write, True, name, copy_folder(folder, images / f"in-{write}")))
        tear(images_so_far[-1].folder / Path(source).relative_to(folder))
        rename(source, target, **options)
        images_so_far.append(DiskImage(write, False, name, copy_folder(folder, images / f"after-{write}")))

    def observed_deletion(path: Any, **options: Any) -> None:
        file = Path(path)
        existed = file.exists()
        unlink(path, **options)
        if existed and folder in file.parents and not file.name.startswith(SCRATCH):
            number = next(numbers)
            image = copy_folder(folder, images / f"deleted-{number}")
            images_so_far.append(DiskImage(number, False, file.relative_to(folder), image, True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", observed)
        patch.setattr(os, "unlink", observed_deletion)
        yield images_so_far


def copy_folder(folder: Path, target: Path) -> Path:
    """Copy a folder; its files are linked, since atomic writes replace files and change none."""
    shutil.copytree(folder, target, copy_function=os.link)
    return target


def tear(scratch: Path) -> None:
    """Leave half of a scratch file, which is a link to the one that is being written."""
    content = scratch.read_bytes()
    scratch.unlink()
    scratch.write_bytes(content[: len(content) // 2])


def restore(image: DiskImage, folder: Path) -> None:
    """Replace a folder by what a kill left in it; an image can be restored once."""
    shutil.rmtree(folder)
    image.folder.rename(folder)


def distinct_images(images: Sequence[DiskImage]) -> list[DiskImage]:
    """All disk images, without those that differ from the next one in its scratch file alone."""
    following = [*images[1:], None]
    return [
        image
        for image, after in zip(images, following, strict=True)
        if image.torn or after is None or folder_content(image.folder) != folder_content(after.folder)
    ]


def content_at_commits(images: Sequence[DiskImage]) -> dict[int, dict[str, Any]]:
    """Content of the folder right after each commit, by the number of its write."""
    return {image.write: folder_content(image.folder) for image in images if image.is_commit}


def folder_content(folder: Path) -> dict[str, Any]:
    """All files by name, scratch files apart: JSON as values without timings, others as bytes."""
    content: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(SCRATCH):
            data = path.read_bytes()
            name = str(path.relative_to(folder))
            content[name] = without_timings(json.loads(data)) if path.suffix == ".json" else data
    return content


def without_timings(value: Any) -> Any:
    """A JSON value without the entries whose names say that they are seconds."""
    if isinstance(value, dict):
        return {key: without_timings(item) for key, item in value.items() if "seconds" not in key}
    if isinstance(value, list):
        return [without_timings(item) for item in value]
    return value
