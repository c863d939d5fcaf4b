"""An owner's folder of one run. It has the layout of a run folder, with what the owner's clients have alone.

<home>/runs/<run>/
    request.json           the last request
    files/<sha256>         what the server has sent; the other names of these files are links
    inputs/                files that the recipe names
    prepared/              the clients' pairs
    federation/            rewards, and adapters and updates of the rounds
    federation-clients/    the clients' private stores
    exchange/              adapters and updates after the rounds
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from components.config import Recipe
from components.federation.clients.context import ClientContexts
from components.federation.clients.worker import finished_update, update_path
from components.io import PRIVATE, write_atomically
from components.models.store import AdapterStore
from components.owners.codec import CodecError, OwnerRequest, decode, encode
from components.owners.jobs import Receipt
from components.recipes.inputs import link_file, open_inputs

REQUEST = "request.json"
Fetch = Callable[[Sequence[str]], Sequence[bytes]]
"""Gives the contents of files by their sha256."""


@dataclass(frozen=True)
class OwnerRunFolder:
    """The folder; nobody but the owner may read it."""

    folder: Path

    def receive(self, request: OwnerRequest, fetch: Fetch) -> None:
        """Have the files of a request, and of earlier ones no others; answers to its jobs are kept.

        Raises:
            CodecError: a file has not the bytes that its hash names.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        for name in self._earlier_names() - request.files.keys():
            (self.folder / name).unlink(missing_ok=True)
        write_atomically(self.folder / REQUEST, encode(request), PRIVATE)
        store = self._files
        missing = sorted({digest for digest in request.files.values() if not (store / digest).is_file()})
        for digest, data in zip(missing, fetch(missing), strict=True):
            if hashlib.sha256(data).hexdigest() != digest:
                raise CodecError(f"a file that was sent has not the hash {digest[:12]} of its name")
            write_atomically(store / digest, data, PRIVATE)
        kept = self._kept(request)
        for path in (*store.glob("*"), *self._exchanged(request)):
            if path not in kept:
                path.unlink()
        for name, digest in request.files.items():
            link, file = self.folder / name, store / digest
            if not (link.is_file() and link.samefile(file)):
                link.parent.mkdir(parents=True, exist_ok=True)
                link.unlink(missing_ok=True)
                link_file(file, link)

    def remove(self) -> Receipt:
        """Remove the folder with all that is in it, and say how much that was."""
        found = [path.stat() for path in self.folder.rglob("*") if path.is_file()]
        sizes = {(one.st_dev, one.st_ino): one.st_size for one in found}  # some have several names
        if found:
            shutil.rmtree(self.folder)
        return Receipt(files=len(sizes), bytes=sum(sizes.values()))

    def contexts(self, request: OwnerRequest, secret: Path | None = None) -> ClientContexts:
        """The clients' contexts of a request; `secret` is that of the owner in all its runs."""
        return ClientContexts(
            AdapterStore(self.folder / request.exchange / "adapters"),
            self.folder / request.pairs,
            self.folder / "federation",
            request.positions,
            secret,
        )

    def recipe(self, request: OwnerRequest) -> Recipe:
        """The recipe of a request, whose input files are read from this folder.

        Raises:
            CodecError: it is no recipe of this version.
        """
        try:
            recipe = Recipe.model_validate(request.recipe)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise CodecError(f"the owner cannot read the recipe at {place}: {first['msg']}") from None
        return open_inputs(recipe, self.folder / "inputs")

    def _earlier_names(self) -> set[str]:
        """The paths of the last request's files."""
        path = self.folder / REQUEST
        try:
            return set(decode(path.read_bytes()).files) if path.is_file() else set()
        except CodecError:  # of another version
            return set()

    @property
    def _files(self) -> Path:
        return self.folder / "files"

    def _kept(self, request: OwnerRequest) -> set[Path]:
        store = self.contexts(request).adapters
        kept = {self.folder / name for name in request.files}
        kept |= {self._files / digest for digest in request.files.values()}
        for job in request.jobs:
            update = finished_update(job, store)
            kept.add(update_path(job, store))
            if update is not None and update.adapter is not None:
                kept.add(store.path(update.adapter))
        return kept

    def _exchanged(self, request: OwnerRequest) -> Iterator[Path]:
        exchange = self.folder / request.exchange
        for name in ("adapters", "updates"):
            yield from (exchange / name).glob("*")
