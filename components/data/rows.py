"""Raw rows from local files and folders or the Hugging Face hub, with line ends as '\\n'.

Errors name the file and the line. A carriage return, alone or before a line feed, becomes a line
feed, as Python reads text files: models and dialogues know one line end. Other separators, such as
U+2028, are characters that tokenizers encode by themselves, and stay. A byte order mark (U+FEFF) at
the beginning of a file or of a text is removed.
"""

from __future__ import annotations

import csv
import glob
import gzip
import json
import re
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, groupby, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar

from components.data.raw import describe
from components.data.records import DataError
from components.hub import unreachable_reason

if TYPE_CHECKING:
    import pyarrow as pa

BATCH = 256
"""Rows of a table that are unpacked at once."""
TO_DO = "it is damaged, incomplete or of another kind; write or copy it again"

Row = dict[str, Any]
"""A raw row: values of any JSON type by column."""
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".csv", ".csv.gz")
"""Endings of the files that are read, in small letters or not."""
OBJECTS_EXPECTED = "expected a JSON object with named columns"
SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""By split, the names that files, folders and saved data sets have for it, as on the hub."""
_KNOWN_NAMES = frozenset(chain.from_iterable(SPLIT_NAMES.values()))
SAVED = ("state.json", "dataset_info.json")
"""Files of a folder that `datasets.Dataset.save_to_disk` wrote."""
SAVED_SPLITS = "dataset_dict.json"
"""File of a folder that `datasets.DatasetDict.save_to_disk` wrote."""
METADATA = (*SAVED, SAVED_SPLITS, "dataset_infos.json")
_ROWS = re.compile(
    r"\.(?:jsonl|json|parquet|csv|ndjson|tsv|arrow|feather|orc|avro)(?:\.(?:gz|bz2|xz|zst|lz4|zip))?\Z",
    re.IGNORECASE,
)
"""The ending of a file of rows, of which SUFFIXES are read."""
_BESIDE = re.compile(
    r"^cache-\w+\.arrow\Z|(?:^|[._-])(?:meta|metadata|stats|statistics|schema|config|infos?|croissant)\.",
    re.IGNORECASE,
)
"""The names of files that say something of the rows of others, or are a cache of `datasets`."""
_SHARD_PATTERN = "-[0-9][0-9][0-9][0-9][0-9]-of-*"
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\b")
T = TypeVar("T")


class RawRows(NamedTuple):
    """Raw rows, and where they are from, for errors: a file, or a part of a data set of the hub."""

    rows: Iterable[Row]
    where: str


def from_file(path: Path) -> RawRows:
    """The rows of a file or folder, see read_file."""
    return RawRows(read_file(path), str(path))


def read_file(path: Path, limit: int | None = None) -> list[Row]:
    """Read the rows of a file, or of the files of a folder, in order.

    Args:
        path: a JSON-lines file (gzipped or not), a JSON file of one list (.json), a parquet file or one
            of comma-separated values, whose suffix is one of SUFFIXES; a folder of such files, or one that
            `datasets.Dataset.save_to_disk` wrote; or the pattern of shards that `find_file` found.
        limit: maximum number of rows that are read; None reads all.

    Raises:
        DataError: the file is missing, empty, damaged or of another kind, a folder holds several
            splits, a line is not a JSON object, or one of csv has more or fewer values than the first.
    """
    files = [path] if is_saved(path) else _files(path)
    rows = list(islice(chain.from_iterable(map(_read_one, files)), limit))
    if not rows:
        raise DataError(f"{path}: the {'folder' if path.is_dir() else 'file'} holds no rows")
    return [normalize_line_ends(row) for row in rows]


def is_saved(path: Path) -> bool:
    """Whether a folder is one that `datasets.Dataset.save_to_disk` wrote."""
    return all((path / name).is_file() for name in SAVED)


def ending(file: Path) -> str:
    """The ending of a file of rows in small letters, such as '.jsonl.gz'; empty for other files."""
    found = _ROWS.search(file.name)
    return found[0].lower() if found else ""


def file_kinds(path: Path) -> set[str]:
    """The endings of the files that read_file reads; '.arrow' for a folder of save_to_disk."""
    return {".arrow"} if is_saved(path) else set(map(ending, _files(path)))


def find_file(folder: Path, stem: str) -> Path | None:
    """What read_file reads of that name in a folder, or in its folder data; None if there is none.

    It is a file with any of SUFFIXES; the pattern of shards such as train-00000-of-00002.parquet; or
    a folder, with such files or saved by `datasets`.

    Raises:
        DataError: there are several, or the file's ending is not read.
    """
    return _only(folder, stem, _parts(folder, (stem,)).get(stem, []))


def from_folder(folder: Path, stem: str, stems: Sequence[str]) -> RawRows:
    """The rows of what `find_file` finds in a folder that has a file of each stem."""
    if not folder.is_dir():
        raise DataError(f"{folder}: expected a folder with files {', '.join(stems)} ({', '.join(SUFFIXES)})")
    file = find_file(folder, stem)
    if file is None:
        raise DataError(f"{folder}: the file {stem} ({', '.join(SUFFIXES)}) is missing in this folder")
    return from_file(file)


def find_splits(path: Path) -> dict[str, Path]:
    """What read_file reads by split; {'': path} for a file, and for a folder without named splits."""
    if not path.is_dir() or is_saved(path):
        return {"": path}
    found = _named_splits(path)
    if not found:
        _refuse_saved_splits(path)
        return {"": path}
    others = [name for name in _parts(path) if name not in _KNOWN_NAMES]
    if others:
        raise DataError(
            f"{path}: {', '.join(others[:5])} lies beside {', '.join(found)}, but is the name of no split"
            f" ({', '.join(SPLIT_NAMES)}): remove it, or give one of them alone as data.path"
        )
    return found


def split_name_warning(path: Path) -> str:
    """A sentence where files that are read as rows without splits have names of splits; empty for others."""
    held: dict[str, Path] = {}
    for file in [] if is_saved(path) else _all_row_files(path):
        own = file.relative_to(path)
        words = {*re.split(r"[^a-z]+", str(own).lower())}
        held.setdefault(next((split for split, names in SPLIT_NAMES.items() if words & {*names}), ""), own)
    if len(held) < 2:
        return ""
    one, other = list(held.values())[:2]
    return (
        f"{path}: the rows of {one} and {other} are read together, and their splits are drawn, although a"
        f" split is in their names: to keep it, name the files or folders {', '.join(SPLIT_NAMES)}."
    )


def normalize_line_ends(value: T) -> T:
    """A value of JSON with '\\n' for each '\\r\\n' and '\\r' of its texts, which begin with no U+FEFF."""
    changed: Any = value
    if isinstance(value, str):
        text = value.removeprefix("\ufeff")
        changed = text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
    elif isinstance(value, Mapping):
        changed = {name: normalize_line_ends(item) for name, item in value.items()}
    elif isinstance(value, list | tuple):
        changed = type(value)(normalize_line_ends(item) for item in value)
    result: T = changed
    return result


CONVERSION = "refs/convert/parquet"
"""Branch on which the hub converts a data set to parquet, in a folder for each configuration."""


def from_hub(
    name: str,
    config: str | None = None,
    *,
    split: str,
    revision: str | None = None,
    data_dir: str | None = None,
) -> RawRows:
    """Load a split of a hub data set. No remote code is run."""
    import datasets

    where = f"{name} ({data_dir + ', ' if data_dir else ''}split {split})"
    unreachable = unreachable_reason(name, revision, "dataset")
    try:
        rows = datasets.load_dataset(name, config, split=split, revision=revision, data_dir=data_dir)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _hub_error(where, error, unreachable) from error
    return RawRows(map(normalize_line_ends, rows), where)


def from_hub_file(name: str, file: str, revision: str | None = None) -> RawRows:
    """Read one file of a hub data set whose other files, or loading script, are not used."""
    import huggingface_hub

    where = f"{name} (file {file})"
    unreachable = unreachable_reason(name, revision, "dataset")
    try:
        path = huggingface_hub.hf_hub_download(name, file, repo_type="dataset", revision=revision)
    except (OSError, ValueError) as error:
        raise _hub_error(where, error, unreachable) from error
    return RawRows(read_file(Path(path)), where)


def _hub_error(name: str, error: Exception, unreachable: str | None) -> DataError:
    is_absent = isinstance(error, ConnectionError | FileNotFoundError)
    reason = (
        unreachable if unreachable and is_absent else (str(error).splitlines() or [type(error).__name__])[0]
    )
    return DataError(
        f"{name} cannot be loaded from the Hugging Face hub: {reason.rstrip('.')}. "
        "Give a local copy as data.path, or see whether the hub can be reached from here."
    )


def _row_files(folder: Path) -> list[Path]:
    """Files with rows in a folder, also of endings that are not read; none if there is no such folder."""
    return [
        file
        for file in _entries(folder)
        if ending(file) and file.name not in METADATA and not _BESIDE.search(file.name) and not file.is_dir()
    ]


def _all_row_files(folder: Path) -> list[Path]:
    """Files with rows in a folder and in the folders below it, sorted."""
    files: list[Path] = []
    below = [folder]
    seen: set[Path] = set()  # links may lead back to a folder above
    while below:
        place = below.pop()
        if place.resolve() in seen:
            continue
        seen.add(place.resolve())
        with reading(folder, "a folder of rows"):
            files += _row_files(place)
            inner = [path for path in _entries(place) if path.is_dir()]
            below += [path for path in reversed(inner) if not is_saved(path)]
    return files


def _entries(folder: Path) -> list[Path]:
    """What is in a folder and not hidden, sorted; nothing if there is no such folder."""
    with reading(folder, "a folder of rows"):
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in paths if path.name[0] not in "._"]


def _refuse_unread(folder: Path, files: Iterable[Path]) -> None:
    """Refuse files of rows beside others, of endings that are not read."""
    for file in files:
        if ending(file) not in SUFFIXES and not file.is_dir():
            raise DataError(
                f"{folder}: {file.relative_to(folder)} has rows that would not be read, since its name ends"
                f" with none of {', '.join(SUFFIXES)}: unpack or convert it, or move it out of this folder"
            )


def _only(folder: Path, name: str, parts: Sequence[Path]) -> Path | None:
    """The one of the parts of a folder that have this name."""
    _refuse_unread(folder, parts)
    if len(parts) > 1:
        one, other = (str(part.relative_to(folder)).replace(_SHARD_PATTERN, "-*") for part in parts[:2])
        raise DataError(
            f"{folder}: {name} is there twice, as {one} and as {other}, of which one would be read: put all"
            " rows into one of them, or move the other out of this folder"
        )
    return parts[0] if parts else None


def _refuse_unclear(folder: Path, files: Sequence[Path]) -> None:
    """Refuse rows of several levels of folders, or of several splits in folders below."""
    first = {file.parent: file for file in reversed(files)}
    for inner, file in first.items():
        above = next((first[place] for place in inner.parents if place in first), None)
        if above is not None:
            raise DataError(
                f"{folder}: {file.relative_to(folder)} lies in a folder beside"
                f" {above.relative_to(folder)}, and either could be all rows: put all files into one folder,"
                " or give one as data.path"
            )
    splits: dict[str, Path] = {}
    for file in files:
        path = file.relative_to(folder)
        parts = (_stem(path), *path.parts[:-1])
        named = (split for part in parts for split, names in SPLIT_NAMES.items() if part in names)
        splits[next(named, "")] = file  # that its file or a folder names; empty if none
    if len(splits) > 1 and any(file.parent != folder for file in files):
        one, other = (file.relative_to(folder) for file in list(splits.values())[:2])
        raise DataError(
            f"{folder}: {one} and {other} are of several splits, but one table of rows is expected here:"
            " name files or folders by split at the first level, or give one split as data.path"
        )


def _stem(path: Path) -> str:
    """The name of a file without its suffixes and the number of its shard."""
    shard = _SHARD.match(path.name)
    return shard["stem"] if shard else path.name.partition(".")[0]


def _parts(folder: Path, names: Collection[str] | None = None) -> dict[str, list[Path]]:
    """What has the rows of each name in a folder, or in its folder data: files, patterns of shards, folders.

    Args:
        folder: with rows.
        names: that are looked for; None: all.
    """
    parts: dict[str, dict[Path, None]] = {}
    for place in (folder, folder / "data"):
        for file in _row_files(place):
            shard = _SHARD.match(file.name)
            name = shard["stem"] if shard else file.name[: -len(ending(file))]
            is_read = shard and ending(file) in SUFFIXES
            pattern = f"{glob.escape(name)}{_SHARD_PATTERN}{file.name[-len(ending(file)) :]}"
            parts.setdefault(name, {})[place / pattern if is_read else file] = None
        for inner in _entries(place):
            if not inner.is_dir() or (names is not None and inner.name not in names):
                continue
            if is_saved(inner) or (inner.name != "data" and _all_row_files(inner)):
                parts.setdefault(inner.name, {})[inner] = None
    return {name: list(own) for name, own in parts.items()}


def _named_splits(folder: Path) -> dict[str, Path]:
    parts = _parts(folder, _KNOWN_NAMES)
    found: dict[str, Path] = {}
    for split, names in SPLIT_NAMES.items():
        path = _only(folder, f"the split {split}", [part for name in names for part in parts.get(name, [])])
        if path is not None:
            found[split] = path
    return found


def _refuse_saved_splits(folder: Path) -> None:
    """Refuse several saved data sets, none of which is to be taken for the whole."""
    names = list(_parts(folder)) if (folder / SAVED_SPLITS).is_file() else []
    if names:
        raise DataError(
            f"{folder}: the splits of this saved data set are {', '.join(names)}, but expected"
            f" {', '.join(SPLIT_NAMES)}: give the folder of one, such as {folder / names[0]}"
        )


def _files(path: Path) -> list[Path]:
    """The files that a path of `read_file` stands for."""
    if path.is_dir():
        return _files_of_folder(path)
    if path.is_file():
        if ending(path) not in SUFFIXES:
            saved = "; of a saved data set, give the folder" if ending(path) == ".arrow" else ""
            raise DataError(f"{path}: expected a file that ends in one of {', '.join(SUFFIXES)}{saved}")
        return [path]
    files = sorted(path.parent.glob(path.name)) if _SHARD_PATTERN in path.name else []
    if not files:
        raise DataError(f"{path}: there is no such file (data.path)")
    return _whole(files)


def _files_of_folder(folder: Path) -> list[Path]:
    files = _row_files(folder) or _row_files(folder / "data")
    splits = _named_splits(folder)
    if len(splits) > 1 or (not files and splits):
        raise DataError(
            f"{folder}: this folder holds the splits {', '.join(splits)}, but one table of rows is expected"
            " here: give the file or folder of one"
        )
    files = _all_row_files(folder)
    if not files:
        _refuse_saved_splits(folder)
        raise DataError(
            f"{folder}: there is no file of rows ({', '.join(SUFFIXES)}) in this folder, nor a data set that"
            " save_to_disk of the package datasets wrote"
        )
    _refuse_unread(folder, files)
    _refuse_unclear(folder, files)
    kinds = set(map(ending, files))
    if len(kinds) > 1:
        raise DataError(
            f"{folder}: this folder holds files of several kinds ({', '.join(sorted(kinds))}), such as"
            f" {files[0].name} and {files[-1].name}: give one of them, or a folder of one kind"
        )
    return [file for _, own in groupby(files, key=lambda file: file.parent) for file in _whole(list(own))]


def _whole(files: list[Path]) -> list[Path]:
    """The files, of which each shard `-00000-of-00002` must be there."""
    shards = [match for match in (_SHARD.match(file.name) for file in files) if match]
    expected = {(shard["stem"], n) for shard in shards for n in range(int(shard["count"]))}
    missing = sorted(expected - {(shard["stem"], int(shard["number"])) for shard in shards})
    if missing:
        stem, number = missing[0]
        raise DataError(
            f"{files[0].parent}: {len(missing)} of {len(expected)} shards are missing, such as"
            f" {stem}-{number:05d}: bring all of them"
        )
    return files


def _read_one(file: Path) -> Iterator[Row]:
    if file.is_dir():
        import datasets

        with reading(file, "a data set that save_to_disk wrote"):
            saved = datasets.Dataset.load_from_disk(str(file)).with_format("arrow")
            yield from table_rows(saved.iter(BATCH))
    elif ending(file) == ".parquet":
        import pyarrow.parquet

        with reading(file, "a parquet file"):
            yield from table_rows(pyarrow.parquet.ParquetFile(file).iter_batches(BATCH))
    elif ending(file) in (".csv", ".csv.gz"):
        yield from _csv(file)
    else:
        rows = _json_list(file) if ending(file) in (".json", ".json.gz") else None
        yield from _json_lines(file) if rows is None else rows


def _json_lines(path: Path) -> Iterator[Row]:
    for number, line in lines(path):
        row = _parse(line, path, number, "expected one object a line")
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: {OBJECTS_EXPECTED}, but this is {describe(row)}")
        yield row


def _json_list(path: Path) -> list[Row] | None:
    """The rows of a file of one list of objects; None for others, since JSON lines may be .json."""
    with _open_text(path) as file:
        text = file.read().lstrip()
    if not text.startswith("["):
        return None
    rows = _parse(text, path, 0, "expected a list of objects")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {number}: {OBJECTS_EXPECTED}, but this is {describe(row)}")
    checked: list[Row] = rows
    return checked


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader((line for _, line in lines(path, newline="", blank=True)), strict=True)
    try:
        names = next(reader, [])
        if len(names) == 1 and re.search(r"[;\t]", names[0]):
            found = "a tab" if "\t" in names[0] else "a semicolon"
            raise DataError(f"{path}, line 1: the separator must be a comma, but {found} is in the line")
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise DataError(
                f"{path}, line 1: expected the names of the columns, but {repeated!r} is there twice"
            )
        for values in filter(None, reader):
            if len(values) != len(names):
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(values)} values, but line 1 names {len(names)}"
                    " columns; texts with commas, quotes or line ends need quotes around them"
                )
            yield dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: this is not valid csv ({error})") from None


def _object(pairs: list[tuple[str, Any]]) -> Row:
    """An object of JSON, whose names must differ: of two values, readers would take one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the name {repeated!r} twice")
    return found


def _parse(text: str, path: Path, line: int, expected: str) -> Any:
    """Parse JSON; line is the number of the line, 0 where the text is the whole file."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        column = "" if line else f", column {error.colno}"
        raise DataError(
            f"{path}, line {line or error.lineno}: this is not valid JSON ({error.msg}{column}); {expected}"
        ) from None
    except ValueError as error:
        where = f"{path}, line {line}" if line else str(path)
        raise DataError(f"{where}: this JSON cannot be read ({error}); {expected}") from None


def lines(path: Path, newline: str | None = None, blank: bool = False) -> Iterator[tuple[int, str]]:
    """The lines of a text file, gzipped or not, with their numbers.

    Args:
        path: of the file.
        newline: see open.
        blank: whether blank lines are among them.
    """
    with _open_text(path, newline) as file:
        for number, line in enumerate(file, 1):
            if blank or not line.isspace():
                yield number, line


def table_rows(batches: Iterator[pa.RecordBatch | pa.Table]) -> Iterator[Row]:
    """The rows of a table of several batches.

    Raises:
        ArrowInvalid: values lie outside of the table.
    """
    for batch in batches:
        batch.validate(full=True)  # or wrong offsets of a damaged file end the process
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
    packing = "gzipped " if path.suffix.lower() == ".gz" else ""
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
