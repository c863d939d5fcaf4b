"""The files of a federation for clients on nodes of Ray that do not see the run folder.

A shard is sent the files that its jobs read as objects of Ray's store, and sends back those that it writes.
A process of the cluster keeps the files that do not change in a temporary folder:

    inputs/                the copies of input files that the recipe's models and rewards name
    prepared/              data
    federation/rewards/    scores of frozen rewards, and the folders of trained ones
    federation-clients/    the private stores of the clients of the present shard alone
    exchange/adapters/     what the clients of the present shard receive and send
    exchange/updates/
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from components.config import InputFile, Recipe
from components.federation.clients.context import ClientContexts, rewards_folder
from components.federation.clients.worker import finished_update, update_path
from components.federation.protocol import Job
from components.inputs import named_files, open_inputs
from components.io import PRIVATE, read_json, write_atomically
from components.models.store import AdapterHash, AdapterStore
from tasks.ray_cluster import call_on_nodes, living_nodes

if TYPE_CHECKING:
    from ray import ObjectRef

Files = dict[str, bytes]
"""Contents by path, relative to a folder."""
PREFIX = "fed-rlhf-ray-"
"""The name of a temporary folder: this, and the ids of the sender, the node and the process."""


class Sender:
    """Puts the files of a federation into Ray's store, where they stay as long as the sender does."""

    def __init__(self, recipe: Recipe, contexts: ClientContexts) -> None:
        import ray

        self._contexts = contexts
        self._id = secrets.token_hex(8)
        self._adapters: dict[AdapterHash, ObjectRef[bytes]] = {}
        self._constant: dict[str, ObjectRef[bytes]] = {
            path: ray.put(content if isinstance(content, bytes) else content.read_bytes())
            for path, content in _constant_files(recipe, contexts).items()
        }

    def send(self, shards: Sequence[Sequence[Job]]) -> list[SentFiles]:
        """The files of each shard. Of adapters only those of these shards stay in the store."""
        import ray

        store = self._contexts.adapters
        received = {digest for shard in shards for job in shard for digest in job.received}
        self._adapters = {
            digest: self._adapters.get(digest) or ray.put(store.path(digest).read_bytes())
            for digest in sorted(received)
        }
        return [self._send_shard(shard) for shard in shards]

    def _send_shard(self, shard: Sequence[Job]) -> SentFiles:
        adapters = {digest: self._adapters[digest] for job in shard for digest in job.received}
        private = {job.client: _read_files(_private(self._contexts, job.client)) for job in shard}
        return SentFiles(self._id, self._constant, adapters, private)

    def close(self) -> None:
        """Remove what was sent from the nodes and from Ray's store."""
        self._adapters.clear()
        self._constant.clear()
        call_on_nodes(living_nodes(), remove_folders, self._id)

    def receive(self, written: Written) -> None:
        """Store what a shard has written. An update follows what it names."""
        for client, files in written.private.items():
            _replace_files(_private(self._contexts, client), files)
        exchange = self._contexts.adapters.root.parent
        for name, data in written.exchanged.items():
            write_atomically(exchange / name, data)


class Written:
    """What the jobs of a shard have written: the private stores, and adapters and updates in this order."""

    def __init__(self, private: dict[str, Files], exchanged: Files) -> None:
        self.private = private
        self.exchanged = exchanged


class SentFiles:
    """What a shard is sent. Not a dataclass: Prefect would fetch the objects of one for each task."""

    def __init__(
        self,
        sender: str,
        constant: dict[str, ObjectRef[bytes]],
        adapters: dict[AdapterHash, ObjectRef[bytes]],
        private: dict[str, Files],
    ) -> None:
        self._sender = sender
        self._constant = constant
        self._adapters = adapters
        self._private = private

    def unpack(self, shard: Sequence[Job], recipe: Recipe) -> tuple[Recipe, ClientContexts]:
        """Write the files into this process's folder; the recipe and the contexts that read them there.

        Jobs that an earlier attempt of the shard has finished here stay finished.
        """
        folder = self._folder()
        contexts = _contexts(folder)
        store = contexts.adapters
        _keep_only(store.root.parent / "updates", {update_path(job, store) for job in shard})
        updates = [(job.client, finished_update(job, store)) for job in shard]
        unfinished = {client for client, update in updates if update is None}
        private = {client: _private(contexts, client) for client, _ in updates}
        _keep_only(next(iter(private.values())).parent, set(private.values()))
        for client in unfinished:
            _replace_files(private[client], self._private[client])
        sent = {update.adapter for _, update in updates if update is not None and update.adapter is not None}
        _keep_only(store.root, {store.path(digest) for digest in self._adapters.keys() | sent})
        _fetch({store.path(digest): ref for digest, ref in self._adapters.items()})
        return open_inputs(recipe, folder / "inputs"), contexts

    def written(self, shard: Sequence[Job]) -> Written:
        """What the shard's jobs have written so far."""
        contexts = _contexts(self._folder())
        private = {job.client: _read_files(_private(contexts, job.client)) for job in shard}
        exchanged: Files = {}
        store = contexts.adapters
        for job in shard:
            if (update := finished_update(job, store)) is None:
                continue
            paths = [] if update.adapter is None else [store.path(update.adapter)]
            for path in (*paths, update_path(job, store)):
                exchanged[path.relative_to(store.root.parent).as_posix()] = path.read_bytes()
        return Written(private, exchanged)

    def _folder(self) -> Path:
        import ray

        node = ray.get_runtime_context().get_node_id()[:16]
        folder = Path(tempfile.gettempdir()) / f"{PREFIX}{self._sender}-{node}-{os.getpid()}"
        if not folder.is_dir():
            _remove_abandoned_folders(node)
            folder.mkdir(0o700)
        _fetch({folder / name: ref for name, ref in self._constant.items()})
        return folder


def remove_folders(sender: str) -> None:
    """Remove what this node was sent by a sender."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}{sender}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned_folders(node: str) -> None:
    """Remove the folders of this node's processes that have ended, whose sender was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-{node}-*"):
        process = folder.name.rpartition("-")[2]
        if process.isdecimal() and not psutil.pid_exists(int(process)):
            shutil.rmtree(folder, ignore_errors=True)


def _contexts(folder: Path) -> ClientContexts:
    return ClientContexts(
        AdapterStore(folder / "exchange" / "adapters"),
        folder / "prepared" / "pairs.parquet",
        folder / "federation",
    )


def _private(contexts: ClientContexts, client: str) -> Path:
    """The folder of a client's private store."""
    return contexts.open(client).store.folder


def _constant_files(recipe: Recipe, contexts: ClientContexts) -> dict[str, Path | bytes]:
    """The files that are the same in all rounds: places or contents, by path in the folder of a process."""
    found: dict[str, Path | bytes] = {}
    for pattern in ("*.parquet", "clients.json"):
        found |= {f"prepared/{path.name}": path for path in contexts.pairs.parent.glob(pattern)}
    rewards = rewards_folder(contexts.federation)
    for path in rewards.glob("*.parquet"):
        found[f"federation/rewards/{path.name}"] = path
    for path in rewards.glob("*.trained.json"):
        trained = Path(path.name).stem
        found |= _tree(rewards / str(read_json(path)["folder"]), f"federation/rewards/{trained}")
        found[f"federation/rewards/{path.name}"] = json.dumps({"folder": trained}).encode()
    for key, named in named_files(recipe):
        if isinstance(named, InputFile) and named.copy is not None and not key.startswith("data."):
            copy = Path(named.copy)
            found |= _tree(copy, f"inputs/{copy.parent.name}/{copy.name}")
    return found


def _tree(path: Path, name: str) -> dict[str, Path]:
    """A file, or the files of a folder, by where they are to be."""
    if path.is_file():
        return {name: path}
    return {f"{name}/{file.relative_to(path).as_posix()}": file for file in path.rglob("*") if file.is_file()}


def _read_files(folder: Path) -> Files:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def _replace_files(folder: Path, files: Files) -> None:
    """Let a client's private store have these files: first the modules, then the states that name them."""
    for name in sorted(files, key=lambda name: (name.endswith(".json"), name)):
        write_atomically(folder / name, files[name], PRIVATE)
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in files:
            path.unlink()
    if files:
        for private in (folder, folder.parent):
            private.chmod(0o700)


def _keep_only(folder: Path, kept: set[Path]) -> None:
    for path in folder.glob("*"):
        if path not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _fetch(objects: dict[Path, ObjectRef[bytes]]) -> None:
    """Write objects of Ray's store to files, unless they are there."""
    import ray

    missing = {path: ref for path, ref in objects.items() if not path.is_file()}
    for path, data in zip(missing, ray.get(list(missing.values())), strict=True):
        write_atomically(path, data)
