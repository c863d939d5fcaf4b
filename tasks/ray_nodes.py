"""Clients on nodes of Ray that do not see the run folder: they are sent requests, as owners' processes are.

The files of a request are objects of Ray's store. A process of the cluster writes them to a temporary folder,
which has the layout of components.owners.run_folder; the private stores of the clients of a shard are among
them, and come back with what the jobs have written.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from components.config import Recipe
from components.federation.clients.context import ClientContexts
from components.federation.clients.worker import finished_update, update_path
from components.federation.protocol import Job
from components.io import PRIVATE, write_atomically
from components.owners.codec import decode, encode
from components.owners.requests import Requests
from components.owners.run_folder import OwnerRunFolder
from tasks.ray_cluster import call_on_nodes, living_nodes

if TYPE_CHECKING:
    from ray import ObjectRef

Files = dict[str, bytes]
"""Contents by path in the folder of a run, in the order in which they are to be written."""
PREFIX = "fed-rlhf-ray-"
"""The name of a temporary folder: this, and the ids of the sender, the node and the process."""


class Sender:
    """Puts the files of requests into Ray's store, where they stay as long as requests name them."""

    def __init__(self, recipe: Recipe, contexts: ClientContexts) -> None:
        self._contexts = contexts
        self._owners = Requests(recipe, contexts)
        self._id = secrets.token_hex(8)
        self._sent: dict[str, ObjectRef[bytes]] = {}

    def send(self, shards: Sequence[Sequence[Job]]) -> list[SentRequest]:
        """The request of each shard."""
        import ray

        run = self._contexts.federation.parent
        requests = []
        for shard in shards:
            private = (path for job in shard for path in private_files(self._contexts, job.client))
            others = {path.relative_to(run).as_posix(): path for path in private}
            requests.append(self._owners.request(shard, others))
        named = {digest for request in requests for digest in request.files.values()}
        self._sent = {
            digest: self._sent.get(digest) or ray.put(self._owners.content(digest))
            for digest in sorted(named)
        }
        return [
            SentRequest(
                self._id, encode(request), {digest: self._sent[digest] for digest in request.files.values()}
            )
            for request in requests
        ]

    def receive(self, shard: Sequence[Job], files: Files) -> None:
        """Store what a shard has written, in place of its clients' private stores."""
        run = self._contexts.federation.parent
        stores = [self._contexts.open(job.client).store.folder for job in shard]
        for name, data in files.items():
            path = run / name
            is_private = any(path.is_relative_to(store) for store in stores)
            write_atomically(path, data, PRIVATE if is_private else 0o644)
        for job in shard:
            for path in private_files(self._contexts, job.client):
                if path.relative_to(run).as_posix() not in files:
                    path.unlink()
        for store in stores:
            for folder in (store, store.parent):
                if folder.is_dir():
                    folder.chmod(0o700)

    def close(self) -> None:
        """Remove what was sent from the nodes and from Ray's store."""
        self._sent.clear()
        call_on_nodes(living_nodes(), remove_folders, self._id)


class SentRequest:
    """A request of a shard. Not a dataclass: Prefect would fetch the objects of one for each task."""

    def __init__(self, sender: str, request: bytes, files: dict[str, ObjectRef[bytes]]) -> None:
        self._sender = sender
        self._request = request
        self._files = files

    def unpack(self) -> tuple[Recipe, ClientContexts]:
        """Have the files in this process's folder; the recipe and the contexts that read them there.

        Jobs that an earlier attempt of the shard has finished here stay finished.
        """
        import ray

        request = decode(self._request)
        folder = OwnerRunFolder(self._folder())
        contexts = folder.contexts(request)
        stores = {contexts.open(job.client).store.folder for job in request.jobs}
        for other in set(next(iter(stores)).parent.glob("*")) - stores:
            shutil.rmtree(other)
        folder.receive(request, lambda digests: ray.get([self._files[digest] for digest in digests]))
        return folder.recipe(request), contexts

    def written(self) -> Files:
        """What the jobs have written so far; a private state follows its modules, an update its adapter."""
        request = decode(self._request)
        contexts = OwnerRunFolder(self._folder()).contexts(request)
        store = contexts.adapters
        paths: list[Path] = []
        for job in request.jobs:
            private = private_files(contexts, job.client)
            paths += sorted(private, key=lambda path: (path.suffix == ".json", path))
            if (update := finished_update(job, store)) is not None:
                paths += [] if update.adapter is None else [store.path(update.adapter)]
                paths.append(update_path(job, store))
        return {path.relative_to(self._folder()).as_posix(): path.read_bytes() for path in paths}

    def _folder(self) -> Path:
        import ray

        node = ray.get_runtime_context().get_node_id()[:16]
        folder = Path(tempfile.gettempdir()) / f"{PREFIX}{self._sender}-{node}-{os.getpid()}"
        if not folder.is_dir():
            _remove_abandoned_folders(node)
            folder.mkdir(0o700)
        return folder


def private_files(contexts: ClientContexts, client: str) -> list[Path]:
    """The files of a client's private store."""
    folder = contexts.open(client).store.folder
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]


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
