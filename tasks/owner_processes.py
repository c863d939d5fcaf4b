"""The processes of simulated owners: this process's host of them, and jobs that are sent to them."""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from components.config import Recipe, UserError
from components.federation.clients.context import ClientContexts
from components.federation.clients.worker import update_path
from components.federation.protocol import Failure, Job, Update
from components.io import FullDiskError, stored, write_atomically
from components.names import file_name
from components.owners.codec import FULL_DISK, CodecError
from components.owners.home import find_owner, socket_path
from components.owners.link import OwnerAway, OwnerEnded, ask, release
from components.owners.requests import Requests
from components.progress import ClientDone, progress
from tasks.devices import device_places

log = logging.getLogger(__name__)
NAME_AT_OWNERS = "name-at-owners.json"


class JobFailed(Exception):
    """A job without an update. The text says why, without a word of the owner's rows."""


class ResidentHost:
    """The host of owners' processes, which starts with the first job and ends with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._devices: list[str] = []
        self._address = ""
        self._listener: socket.socket | None = None

    def ask(self, job: Job, owners: Requests, contexts: ClientContexts, recipe: Recipe) -> Update:
        """The update of a client's job, which its owner's process carries out; it is stored.

        Raises:
            JobFailed: it has none.
        """
        home = owners_root(contexts.federation) / file_name(job.client)
        address = self._start([device for device, _ in device_places(recipe.runtime)])
        try:
            return _ask(job, owners, contexts, address, home, self._runs)
        except FullDiskError:  # which simulated owners have in common with the run
            full = f"no space is left for {home}: free some, and resume the run"
            raise FullDiskError(errno.ENOSPC, full) from None

    def release(self) -> None:
        """Let the owners' processes end, whose models are not needed for now."""
        if self._runs():
            with contextlib.suppress(OSError, EOFError):
                release(self._address)

    def end(self) -> None:
        """End the host, and the owners' processes with it."""
        with self._lock:
            self._end_process()
            if self._listener is not None:
                self._listener.close()
                self._listener = None

    def _end_process(self) -> None:
        """The host ends with its standard input, and removes the folder of the socket."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
        self._process = None

    def _runs(self, seconds: float = 0.0) -> bool:
        """Whether the host still runs after some seconds."""
        process = self._process
        if process is None:
            return False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return True
        return False

    def _start(self, devices: Sequence[str]) -> str:
        """The address of a host with processes on these devices."""
        if sys.platform != "linux":
            raise UserError("runtime.transport 'processes' needs Linux: use 'prefect'.")
        with self._lock:
            if self._devices != devices:
                self._end_process()
            if not self._runs():
                self._address, self._listener = _listen()
                descriptor = str(self._listener.fileno())
                arguments = [descriptor, str(Path(self._address).parent), *devices]
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "components.owners.host", *arguments],
                    stdin=subprocess.PIPE,
                    pass_fds=[self._listener.fileno()],
                )
                self._devices = list(devices)
            return self._address


def ask_owner(
    job: Job, owners: Requests, contexts: ClientContexts, sockets: Path, limit: float | None = None
) -> Update:
    """The update of a job of an owner that has started its own process; it is stored.

    Args:
        job: for the owner.
        owners: makes the request.
        contexts: of the clients at the server.
        sockets: folder of the owners' sockets.
        limit: seconds after which an owner without an answer is given up; None: none.

    Raises:
        JobFailed: it has none.
    """
    deadline = None if limit is None else time.monotonic() + limit

    def waits(seconds: float = 0.0) -> bool:
        return deadline is None or time.monotonic() < deadline

    try:
        address = str(socket_path(sockets, job.client))
        return _ask(job, owners, contexts, address, Path(job.client), waits)
    except OwnerAway:
        raise JobFailed(find_owner(sockets, job.client).reason) from None
    except FullDiskError as error:
        raise JobFailed(error.strerror or FULL_DISK) from None
    except JobFailed:
        if not waits():
            raise JobFailed(f"the owner has not answered within {limit:g} s") from None
        raise


def _ask(
    job: Job,
    owners: Requests,
    contexts: ClientContexts,
    address: str,
    home: Path,
    runs: Callable[[float], bool],
) -> Update:
    store = contexts.adapters
    try:
        for answer, adapter in ask(address, home, owners.request([job]), owners.content, runs):
            if isinstance(answer, Failure):
                raise JobFailed(answer.reason)
            if (answer.job, answer.client) != (job.key(), job.client):
                raise JobFailed(f"its update answers job {answer.job}, not that of this step")
            if answer.adapter is not None and adapter is not None:
                write_atomically(store.path(answer.adapter), adapter)
            write_atomically(update_path(job, store), answer.model_dump_json().encode())
            log.info("client %s is done", job.client, extra=progress(ClientDone(job.client)))
            return answer
    except OwnerEnded as error:
        if str(error) == FULL_DISK:
            raise FullDiskError(errno.ENOSPC, FULL_DISK) from None
        raise JobFailed(str(error)) from None
    except CodecError as error:
        raise JobFailed(str(error)) from None
    raise JobFailed("there is no answer")


def release_owner(name: str, sockets: Path) -> None:
    """Let the idle process of an owner end, whose model is not needed for now."""
    with contextlib.suppress(OSError, EOFError):
        release(str(socket_path(sockets, name)), seconds=5.0)


def is_known_to_owners(run: Path) -> bool:
    """Whether owners that have started their own processes were ever asked for a run."""
    return (run / NAME_AT_OWNERS).is_file()


def name_at_owners(run: Path) -> str:
    """What a run is called at its owners: its folder may be moved, and two may have one name."""
    name: str = stored(run / NAME_AT_OWNERS, lambda: f"{run.name}-{secrets.token_hex(4)}")
    return name


def _listen() -> tuple[str, socket.socket]:
    """A socket in a new folder of its own; the path of one is at most 107 bytes long."""
    folder = Path(tempfile.mkdtemp(prefix="fed-rlhf-owners-"))
    if len(bytes(folder)) > 90:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="fed-rlhf-owners-", dir="/tmp"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "host"))
    listener.listen(128)
    return str(folder / "host"), listener


HOST = ResidentHost()


def owners_root(federation: Path) -> Path:
    """The folder of the owners' homes: beside the federation's folder, as that of private stores is."""
    return federation.with_name("owners")
