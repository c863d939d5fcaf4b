"""The requests of a run to its owners. A run that simulates them has their rows, and sends each its own."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from pydantic import JsonValue

from components.config import InputFile, Recipe
from components.data.data_report import CLIENTS_FILE
from components.data.records import published_digests
from components.federation.clients.context import ClientContexts, client_positions, rewards_folder
from components.federation.protocol import Job
from components.io import file_hash, read_json
from components.owners.codec import OwnerRequest
from components.owners.jobs import OwnerJob
from components.recipes.inputs import named_files

SIMULATED = "simulated"
"""Name of the run at its own simulated owners; the folder of the run may be moved."""
Content = bytes | Path
"""The bytes of a file, or where they are."""


class Requests:
    """Makes the requests of a run, and has the contents of the files that they name by hash."""

    def __init__(self, recipe: Recipe, contexts: ClientContexts, run: str = SIMULATED) -> None:
        """The requests of a run.

        Args:
            recipe: of the run.
            contexts: of the clients.
            run: its name at the owners. Only simulated owners are sent rows.
        """
        self._contexts = contexts
        self._name = run
        self._run = contexts.federation.parent
        self._recipe: dict[str, JsonValue] = recipe.model_dump(mode="json")
        self._contents: dict[str, Content] = {}
        self._common = self._hashes(_common_files(recipe, contexts))
        self._own = cache(self._hash_own_rows)
        prepared = contexts.pairs.parent
        is_prepared = (prepared / CLIENTS_FILE).is_file()  # owners publish before it is
        self._positions = client_positions(prepared) if is_prepared else {}
        self._digests = published_digests(prepared)

    def request(self, jobs: Sequence[Job], others: Mapping[str, Path] | None = None) -> OwnerRequest:
        """The request of jobs of clients that have one owner.

        Args:
            jobs: the jobs.
            others: further files that are sent, by path in the folder of the run.
        """
        exchange = self._inner(self._contexts.adapters.root.parent)
        about_data = all(isinstance(job, OwnerJob) for job in jobs)  # such jobs read no file of the server's
        files = {} if about_data else self._common | self._hashes(others or {})
        for job in jobs:
            for digest in job.received:
                files[f"{exchange}/adapters/{digest}.safetensors"] = digest
        clients = sorted({job.client for job in jobs})
        if self._name == SIMULATED:
            files |= self._own(tuple(clients))
        return OwnerRequest(
            run=self._name,
            recipe=self._recipe,
            exchange=exchange,
            pairs=self._inner(self._contexts.pairs),
            jobs=tuple(jobs),
            digests={}
            if about_data
            else {name: self._digests[name] for name in clients if name in self._digests},
            positions={client: self._positions[client] for client in clients if client in self._positions},
            files=files,
        )

    def content(self, digest: str) -> bytes:
        """The bytes of a file by its hash."""
        content = self._contents.get(digest, self._contexts.adapters.path(digest))
        return content if isinstance(content, bytes) else content.read_bytes()

    def _inner(self, path: Path) -> str:
        return path.relative_to(self._run).as_posix()

    def _hash_own_rows(self, clients: tuple[str, ...]) -> dict[str, str]:
        """The file of pairs, with those of some clients alone."""
        own = {self._inner(self._contexts.pairs): rows_of(self._contexts.pairs, clients)}
        return self._hashes(own)

    def _hashes(self, files: Mapping[str, Content]) -> dict[str, str]:
        hashes = {}
        for name, content in files.items():
            hashes[name] = (
                hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else file_hash(content)
            )
            self._contents[hashes[name]] = content
        return hashes


def rows_of(path: Path, clients: Iterable[str]) -> bytes:
    """The rows of some clients of a table, as the bytes of a parquet file."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path, filters=[("client_id", "in", list(clients))])
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()


def _common_files(recipe: Recipe, contexts: ClientContexts) -> dict[str, Content]:
    """What all clients are sent in all rounds, by path in the folder of the run."""
    found: dict[str, Content] = {}
    rewards = rewards_folder(contexts.federation)
    for path in rewards.glob("*.trained.json"):
        trained = Path(path.name).stem
        found |= _tree(rewards / str(read_json(path)["folder"]), f"federation/rewards/{trained}")
        found[f"federation/rewards/{path.name}"] = json.dumps({"folder": trained}).encode()
    for key, named in named_files(recipe):
        if isinstance(named, InputFile) and named.copy is not None and not key.startswith("data."):
            copy = Path(named.copy)
            found |= _tree(copy, f"inputs/{copy.parent.name}/{copy.name}")
    return found


def _tree(path: Path, name: str) -> dict[str, Content]:
    """A file, or the files of a folder, by where they are to be."""
    if path.is_file():
        return {name: path}
    return {f"{name}/{file.relative_to(path).as_posix()}": file for file in path.rglob("*") if file.is_file()}
