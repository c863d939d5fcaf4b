"""The files that a recipe names, read once when a run starts, so that a run depends on their bytes.

    <run>/recipe.yaml                     templates with their text, other files with their hash
    <run>/inputs/<sha256>/<file name>     copies of data files, question files, adapters and the like
    <run>/inputs/models.json              where the folders of local models are
    <run>/inputs/commits.json             which commits of the hub the other models are

A folder is copied with all its files, but hidden ones. The folder of a model is not copied, because
weights are large: its hash is part of the recipe, and a run does not resume with another one. Of a model of
the hub the recipe keeps the revision as its author wrote it, such as none for `main`. When a run starts,
`pin_models` asks which commit that is, once, and `open_inputs` puts it in the place of the revision: so
all phases load the same files, also after the hub has others, and fingerprints and keys have the commit.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel

from components.config import (
    InputFile,
    NamedModel,
    NameOrFolder,
    Recipe,
    RecipeError,
    TemplateFile,
    UserError,
)
from components.config.recipe_files import RecipeFile
from components.data import templates
from components.io import file_hash, read_json, write_json

T = TypeVar("T")
Named = RecipeFile | NamedModel
"""A file, or a section that names a model."""
MODELS = "models.json"
"""File beside the copies: by hash, where the folders of local models are, absolute and from there."""
COMMITS = "commits.json"
"""File beside the copies: by name and revision, the commits of models of the hub."""


def store_inputs(recipe: Recipe, folder: Path, known: dict[Path, Path] | None = None) -> Recipe:
    """Read the files that a recipe names, and copy them into a folder.

    Args:
        recipe: as its author wrote it, or as `open_inputs` gives it.
        folder: of the copies; created if there are any.
        known: by path, the copies of the other runs of a benchmark, which are linked and added to,
            so that all runs of a benchmark have the same bytes.

    Returns:
        the recipe with the texts of its templates and the hashes of the other files.

    Raises:
        RecipeError: a file is missing, cannot be read, or has another hash than the recipe says.
        DataError: a template is missing or is not text.
    """
    copies = {} if known is None else known

    def read(key: str, named: Named) -> Named:
        if isinstance(named, TemplateFile):
            return templates.with_text(named)
        if isinstance(named, NamedModel):
            return _record_model(key, named)
        file = cast(InputFile, named)
        source = Path(file).resolve()
        if isinstance(file, NameOrFolder) and not source.exists():
            return file
        stored = _store(source, folder, _copy_name(file), key, copies.get(source))
        if file.sha256 not in (None, stored.parent.name):
            raise RecipeError(
                f"{key}: the content of {source} is not that of the sha256 in the recipe: restore the file,"
                " or leave the hash out."
            )
        copies[source] = stored
        return replace(file, sha256=stored.parent.name)

    check_inputs(recipe)
    stored = map_named(recipe, read)
    models = [named for _, named in named_files(stored) if isinstance(named, NamedModel) and named.sha256]
    if models:
        places = {
            str(model.sha256): [model.location, os.path.relpath(model.location, folder)] for model in models
        }
        write_json(folder / MODELS, places)
    return stored


def pin_models(recipe: Recipe, folder: Path) -> bool:
    """Record the commits of the models of the hub that a recipe names, where none is recorded yet.

    What neither the hub nor its cache tells is left for the next call: such a model cannot be loaded now.

    Args:
        recipe: as it is stored.
        folder: of the copies; created if there are any.

    Returns:
        whether there are new ones.
    """
    from components.models.backbone import hub_commit

    path = folder / COMMITS
    known: dict[str, str] = read_json(path) if path.is_file() else {}
    commits = dict(known)
    for _, named in named_files(recipe):
        key = _hub_key(named)
        if isinstance(named, NamedModel) and key is not None and key not in commits:
            revision = getattr(named, "revision", None)
            commit = hub_commit(named.location, revision)
            if commit not in (None, revision):
                commits[key] = str(commit)
    if commits != known:
        write_json(path, commits)
    return commits != known


def _hub_key(named: Named) -> str | None:
    """The name and the revision of a model that may be on the hub, as one text; None for others."""
    if not isinstance(named, NamedModel) or "revision" not in type(named).model_fields:
        return None
    if named.model_name is None or named.sha256 is not None:
        return None
    return f"{named.model_name}@{getattr(named, 'revision', None) or 'main'}"


def open_inputs(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe of a run whose input files are read from their copies, and its models at their commits.

    Args:
        recipe: with the hashes of its files.
        folder: of the copies.
    """
    path, listed = folder / MODELS, folder / COMMITS
    places: dict[str, list[str]] = read_json(path) if path.is_file() else {}
    commits: dict[str | None, str] = read_json(listed) if listed.is_file() else {}

    def find(key: str, named: Named) -> Named:
        if (commit := commits.get(_hub_key(named))) is not None:
            return cast(NamedModel, named).model_copy(update={"revision": commit})
        if isinstance(named, NamedModel) and named.sha256 in places:
            absolute, relative = places[named.sha256]
            moved = (folder / relative).resolve()
            return named.at(str(moved) if moved.is_dir() else absolute, named.sha256)
        if isinstance(named, InputFile) and named.sha256 is not None:
            return replace(named, copy=str(folder / named.sha256 / _copy_name(named)))
        return named

    return map_named(recipe, find)


def set_chat_dates(recipe: Recipe, day: date) -> Recipe:
    """The recipe with the day that each chat template prints which asks for the present one.

    A day that the recipe sets stays. A recipe whose chat templates print no day is returned as it is,
    so nothing of its run depends on the day.

    Raises:
        BackboneError: the tokenizer of such a model cannot be loaded.
    """
    from components.models.chat_template import needs_date

    text = day.isoformat()
    policy = recipe.policy
    if needs_date(policy):
        policy = policy.model_copy(update={"chat_date": text})
    judge = recipe.evaluation.judge.with_chat_date(text)
    evaluation = recipe.evaluation.model_copy(update={"judge": judge})
    thoughts = recipe.thoughts
    if thoughts is not None and thoughts.evaluator.base_url is None and needs_date(thoughts.evaluator.local):
        evaluator = thoughts.evaluator.model_copy(update={"chat_date": text})
        thoughts = thoughts.model_copy(update={"evaluator": evaluator})
    return recipe.model_copy(update={"policy": policy, "evaluation": evaluation, "thoughts": thoughts})


@contextmanager
def original_names(recipe: Recipe) -> Iterator[None]:
    """Let errors about a run's copies name the files as the recipe's author wrote them."""
    try:
        yield
    except UserError as error:
        raise type(error)(with_original_names(recipe, str(error))) from error


def with_original_names(section: BaseModel, text: str) -> str:
    """A text about the copies of a recipe's or a section's files with the names that its author wrote."""
    for _, named in named_files(section):
        if isinstance(named, InputFile) and named.copy is not None:
            text = text.replace(named.copy, named.name)
    return text


def check_inputs(recipe: Recipe) -> None:
    """Refuse a recipe that names a missing file, or a missing folder of a model.

    Raises:
        RecipeError: naming the key and the file.
    """
    for key, named in named_files(recipe):
        if isinstance(named, NamedModel) and named.model_name is not None:
            _check_model_name(f"{key}.{named.model_key}", named.location)
        if isinstance(named, InputFile) and not isinstance(named, NameOrFolder):
            with _readable(Path(named), key):
                pass


def _check_model_name(key: str, name: str) -> None:
    """Require that the name of a model is a folder, unless it can be a hub id.

    Raises:
        RecipeError: naming the key and the path.
    """
    from components.hub import is_hub_id

    path = Path(name)
    if path.is_dir():
        return
    if path.exists():
        raise RecipeError(f"{key}: '{name}' is a file, and a model is a folder: give the folder.")
    if not is_hub_id(name):
        with _readable(path, key):
            pass


def verify_inputs(recipe: BaseModel) -> None:
    """Refuse to go on with files that are not those that the run has started with.

    Args:
        recipe: of a run, or one of its sections.

    Raises:
        RecipeError: naming the key and the folder or file.
    """
    for key, named in named_files(recipe):
        if isinstance(named, NamedModel) and named.sha256 is not None:
            _record_model(key, named)
        elif isinstance(named, TemplateFile) and named.text is None:
            raise RecipeError(
                f"{key}: the run was started by an earlier version of the project, which did not keep the"
                " texts of its templates: start a new run."
            )
        elif isinstance(named, InputFile) and named.copy is not None:
            with _readable(Path(named.copy), key):
                digest = hash_path(Path(named.copy))
            if digest != named.sha256:
                raise RecipeError(f"{key}: the run's own copy {named.copy} has changed: start a new run.")


def named_files(section: BaseModel) -> Iterator[tuple[str, Named]]:
    """The files and models that a section and those in it name, with their dotted keys."""
    found: list[tuple[str, Named]] = []

    def collect(key: str, named: Named) -> Named:
        found.append((key, named))
        return named

    map_named(section, collect)
    yield from found


def map_named(value: T, change: Callable[[str, Named], Named], key: str = "") -> T:
    """A section, list or mapping with its files and models replaced.

    Args:
        value: the section, at first.
        change: gets the dotted key and the file or section, and returns what takes its place.
        key: of the value.
    """
    if isinstance(value, RecipeFile):
        return cast(T, change(key, value))
    if isinstance(value, BaseModel):
        fields = {name: getattr(value, name) for name in type(value).model_fields}
        mapped = {
            name: map_named(field, change, f"{key}.{name}".lstrip(".")) for name, field in fields.items()
        }
        changed = {name: new for name, new in mapped.items() if new is not fields[name]}
        section: Any = value.model_copy(update=changed) if changed else value
        return cast(T, change(key, section) if isinstance(section, NamedModel) else section)
    if isinstance(value, list | tuple):
        items = [map_named(item, change, f"{key}[{n}]") for n, item in enumerate(value)]
        return (
            cast(T, type(value)(items))
            if any(a is not b for a, b in zip(items, value, strict=True))
            else value
        )
    if isinstance(value, Mapping):
        entries = {name: map_named(item, change, f"{key}.{name}") for name, item in value.items()}
        return cast(T, entries) if any(entries[name] is not value[name] for name in value) else value
    return value


def hash_path(path: Path) -> str:
    """sha256 of a file's bytes, or of the names and bytes of all files in a folder but hidden ones."""
    if path.is_file():
        return file_hash(path)
    digest = hashlib.sha256()
    for file in _visible_files(path):
        digest.update(f"{file.relative_to(path).as_posix()}\0{file_hash(file)}\n".encode())
    return digest.hexdigest()


def is_larger(paths: Iterable[Path], limit: int) -> bool:
    """Whether files, and those in folders, have more bytes; no more files are seen than that takes."""
    size = 0
    for path in paths:
        for file in [path] if path.is_file() else _walk(path):
            size += file.stat().st_size
            if size > limit:
                return True
    return False


def _walk(folder: Path, hidden: bool = True) -> Iterator[Path]:
    """The files below a folder, in no order, with or without hidden ones; links are followed once."""
    seen: set[Path] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        seen.add(Path(place).resolve())
        inner = [name for name in folders if hidden or not name.startswith(".")]
        folders[:] = [name for name in inner if (Path(place) / name).resolve() not in seen]
        paths = [Path(place) / name for name in names if hidden or not name.startswith(".")]
        yield from (path for path in paths if path.is_file())


@contextmanager
def _readable(path: Path, key: str) -> Iterator[None]:
    """Report a path that does not exist, or cannot be read, by the key that names it."""
    try:
        if not path.exists():
            raise RecipeError(
                f"{key}: there is no file or folder '{path}' (relative paths start at {Path.cwd()}): correct"
                " the path."
            )
        if not (path.is_file() or path.is_dir()):
            raise RecipeError(
                f"{key}: '{path}' is a pipe, socket or device, and nothing may ever come from it: copy what"
                " it gives to a file."
            )
        yield
    except OSError as error:
        raise RecipeError(
            f"{key}: {error.filename} cannot be read ({error.strerror}): see its permissions."
        ) from None


def _visible_files(folder: Path) -> list[Path]:
    """The files below a folder but hidden ones, in the order of their names."""
    return sorted(_walk(folder, hidden=False), key=lambda path: path.relative_to(folder))


def _record_model(key: str, section: NamedModel) -> NamedModel:
    """The section with the place and the hash of a local folder; one of a hub id as it is.

    Raises:
        RecipeError: the section has a hash, and the folder another one.
    """
    if section.model_name is None or (section.sha256 is None and not Path(section.location).is_dir()):
        return section
    folder = Path(section.location).resolve()
    with _readable(folder, f"{key}.{section.model_key}"):
        digest = _hash_model(folder, tuple(map(_stamp, _visible_files(folder))))
    if section.sha256 not in (None, digest):
        raise RecipeError(
            f"{key}.{section.model_key}: the files of the folder {folder} are not those of {key}.sha256,"
            " as they were when the run started: restore them, or start a new run."
        )
    return section.at(str(folder), digest)


@lru_cache(maxsize=64)
def _hash_model(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> str:
    """The hash of a folder, computed once as long as no file has another size or time."""
    return hash_path(folder)


def _stamp(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


def _copy_name(file: InputFile) -> str:
    """The name of a copy, whose suffix says what is in the file."""
    name = Path(file.name).name
    return "folder" if name in ("", "..") else name


def _store(path: Path, folder: Path, name: str, key: str, twin: Path | None) -> Path:
    """Copy a file or folder, or link the copy `twin`, to `<folder>/<sha256>/<name>`, whole or not at all."""
    if folder.resolve().is_relative_to(path):
        raise RecipeError(
            f"{key}: the folder {path} contains the run, which keeps a copy of it ({folder}): put the data"
            " into a folder of their own."
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".copying-") as scratch, _readable(path, key):
        building = Path(scratch) / name
        _copy(path if twin is None else twin, building, shutil.copyfile if twin is None else link_file)
        target = folder / hash_path(building) / name
        target.parent.mkdir(exist_ok=True)
        if not target.exists():
            building.rename(target)
        return target


def _copy(source: Path, target: Path, copy: Callable[[Path, Path], Any]) -> None:
    (target.parent if source.is_file() else target).mkdir(parents=True, exist_ok=True)
    for file in [source] if source.is_file() else _visible_files(source):
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        copy(file, place)


def link_file(source: Path, target: Path) -> None:
    """Let a file have a second name, or a copy where that is not possible."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
