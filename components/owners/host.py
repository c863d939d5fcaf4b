"""The host of owners' processes: it starts them, gives them connections, and ends those that take too long.

    python -m components.owners.host LISTENER FOLDER DEVICE...

The host imports the libraries once and forks, so that an owner's process starts at once and shares their
memory. For simulated owners on the CPU it also loads their model once, which processes that are forked later
share until they write to it. It computes nothing itself, and holds no row. Each process has a device; where
all devices are taken, a process that waits for requests ends for one that has some, and its model's memory is
free.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

from components.environment import configure_libraries
from components.federation.protocol import Failure
from components.io import PRIVATE, write_atomically
from components.owners.codec import RELEASE, Greeting, encode_answer
from components.owners.process import ENDS, IDLE, STARTS, OwnerProcess
from components.owners.shared_model import SHARED

log = logging.getLogger(__name__)
LIBRARIES = ("torch", "transformers", "peft", "datasets", "components.federation.clients.policy_trainer")


MAX_GREETING = 1 << 24
BEAT_SECONDS = 30.0
"""How often it is told that the host still runs."""
RECEIVE_SECONDS = 60
RECEIVE_TIMEOUT = struct.pack("ll", RECEIVE_SECONDS, 0)
"""How long a peer may be silent within a message (a struct timeval)."""


@dataclass
class Child:
    """An owner's process."""

    pid: int
    home: Path
    device: str
    control: socket.socket
    used: float  # when it was last given a connection
    connection: Connection | None = None  # that it answers; None while it waits
    deadline: float = float("inf")  # of its job
    limit: str = ""  # seconds of its job
    released: bool = False  # whether it ends when it waits
    step: str = ""  # its job, in words


class OwnerHost:
    """Forks a process for each owner that is asked; call `serve` in a process without further threads."""

    def __init__(
        self,
        listener: socket.socket,
        devices: Sequence[str],
        lifeline: int | None = None,
        home: Path | None = None,
        peer: int | None = None,
        tell: Callable[[str, bool], None] = lambda step, busy: None,
    ) -> None:
        """The host.

        Args:
            listener: whose connections begin with the home of an owner, followed by a request.
            devices: a process runs on each of them at a time.
            lifeline: file descriptor at whose end the host ends; None: it does not end by itself.
            home: of the only owner, whatever connections begin with; None: simulated owners have many.
            peer: user whose connections are taken; None: of all that may connect.
            tell: is told each job, in words, as it starts and as it ends (whether the owner is busy), and the
                last one every BEAT_SECONDS.
        """
        self._home = home
        self._peer = peer
        self._tell = tell
        self._last = ("", False)  # what was told last
        self._beat = time.monotonic()
        self._listener = listener
        self._free = list(reversed(devices))
        self._lifeline = lifeline
        self._children: dict[Path, Child] = {}
        self._waiting: deque[tuple[Path, Greeting, Connection]] = deque()
        self._releasing: list[Connection] = []
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Serve until the lifeline ends."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        if self._lifeline is not None:
            self._selector.register(self._lifeline, selectors.EVENT_READ)
        try:
            while True:
                first = min([self._beat, *(child.deadline for child in self._children.values())])
                for key, _ in self._selector.select(max(0.0, first - time.monotonic())):
                    if key.fd == self._lifeline:
                        return
                    self._take(key)
                if self._beat <= time.monotonic():
                    self._say(*self._last)
                self._end_late()
                self._give_connections()
                self._release()
        finally:
            for child in list(self._children.values()):
                self._end(child, "the host of its process has ended")

    def _take(self, key: selectors.SelectorKey) -> None:
        """Take a new connection, the home that begins one, or a message of a child."""
        if key.fileobj is self._listener:
            accepted = self._listener.accept()[0]
            if self._peer is not None and peer_user(accepted) != self._peer:
                accepted.close()
                return
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, RECEIVE_TIMEOUT)
            connection = Connection(accepted.detach())
            self._selector.register(connection, selectors.EVENT_READ, connection)
        elif isinstance(key.data, Connection):
            self._selector.unregister(key.data)
            self._begin(key.data)
        else:
            child: Child = key.data
            if self._children.get(child.home) is child:  # it may have ended meanwhile
                self._hear(child)

    def _begin(self, connection: Connection) -> None:
        try:
            message = connection.recv_bytes(MAX_GREETING)
            greeting = None if message == RELEASE else Greeting.model_validate_json(message)
        except (EOFError, OSError, ValueError):
            connection.close()
            return
        if greeting is None:
            for child in self._children.values():
                child.released = True
            self._releasing.append(connection)
        else:
            self._waiting.append((self._home or Path(greeting.home), greeting, connection))

    def _end_late(self) -> None:
        """End the processes whose job has taken too long."""
        for child in list(self._children.values()):
            if child.deadline <= time.monotonic():
                seconds = float(child.limit)
                self._end(child, f"no answer within {seconds:g} s (runtime.client_timeout)")

    def _release(self) -> None:
        """End idle processes where a server asks for it, and tell it when none is left."""
        for child in list(self._children.values()):
            if child.released and child.connection is None:
                self._end(child)
        if not any(child.released for child in self._children.values()):
            while self._releasing:
                self._releasing.pop().close()

    def _say(self, step: str, busy: bool) -> None:
        self._last = step, busy
        self._beat = time.monotonic() + BEAT_SECONDS
        self._tell(step, busy)

    def _hear(self, child: Child) -> None:
        """Take a message of a child, or its end."""
        try:
            message = child.control.recv(256)
        except OSError:
            message = b""
        if message.startswith(STARTS):
            child.limit, _, child.step = message.removeprefix(STARTS).decode().partition(" ")
            self._say(child.step, True)
            if child.limit:
                child.deadline = time.monotonic() + float(child.limit)
        elif message:
            child.deadline = float("inf")
            if message == ENDS:
                self._say(child.step, False)
            if message == IDLE and child.connection is not None:
                child.connection.close()
                child.connection = None
        else:
            self._end(child)

    def _give_connections(self) -> None:
        """Give waiting connections to the processes of their owners, of which new ones are forked."""
        for _ in range(len(self._waiting)):
            waiting = home, greeting, connection = self._waiting.popleft()
            child = self._children.get(home) or self._fork(home, greeting, connection)
            if child is None or child.connection is not None:
                self._waiting.append(waiting)
                continue
            try:
                socket.send_fds(child.control, [b"c"], [connection.fileno()])
            except OSError:  # it has just ended
                self._end(child)
                self._waiting.append(waiting)
                continue
            child.connection, child.used = connection, time.monotonic()

    def _fork(self, home: Path, greeting: Greeting, connection: Connection) -> Child | None:
        """A new process of an owner, for its connection; None while no device is free."""
        idle = [child for child in self._children.values() if child.connection is None]
        if not self._free and idle:
            self._end(min(idle, key=lambda child: child.used))
        if not self._free:
            return None
        device = self._free.pop()
        if self._home is None and device == "cpu" and greeting.recipe is not None:
            SHARED.load(greeting.recipe, greeting.trainer)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host = os.getpid()
        pid = os.fork()
        if pid == 0:
            end_with_parent(host)
            connection.close()
            self._run_child(home, device, theirs, ours)
        theirs.close()
        child = Child(pid, home, device, ours, time.monotonic())
        self._children[home] = child
        self._selector.register(ours, selectors.EVENT_READ, child)
        return child

    def _run_child(self, home: Path, device: str, control: socket.socket, ours: socket.socket) -> None:
        """Be an owner's process, which has nothing of the host and of other owners."""
        status = 1
        try:
            ours.close()
            for open_one in self._open_ones():
                open_one.close()
            self._selector.close()
            self._listener.close()
            if self._lifeline is not None:
                os.dup2(os.open(os.devnull, os.O_RDONLY), self._lifeline)
            OwnerProcess(home, device, control).serve()
            status = 0
        except BaseException as error:
            # The text may quote rows of the owner, and stays with it.
            log.error("the process of an owner ends: %s (error.txt of its home)", type(error).__name__)
            write_atomically(home / "error.txt", traceback.format_exc().encode(), PRIVATE)
        finally:
            os._exit(status)

    def _open_ones(self) -> Iterator[Connection | socket.socket]:
        """The connections of other owners and of the host, which a child does not keep."""
        for *_, connection in self._waiting:
            yield connection
        yield from self._releasing
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Connection):
                yield key.data
        for child in self._children.values():
            yield child.control
            if child.connection is not None:
                yield child.connection

    def _end(self, child: Child, reason: str | None = None) -> None:
        """End a child, and tell the server why, if that waits for an answer."""
        self._selector.unregister(child.control)
        child.control.close()
        if reason is not None or child.connection is None:
            os.kill(child.pid, signal.SIGKILL)
        if child.connection is not None:
            self._say(child.step, False)
        status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        if child.connection is not None:
            if reason is None:
                how = f"by signal {-status}" if status < 0 else f"with status {status}"
                reason = f"its process ended {how}"
            with child.connection, contextlib.suppress(OSError):  # the server has ended too
                child.connection.send_bytes(encode_answer(Failure("", reason)))
        del self._children[child.home]
        self._free.append(child.device)


def peer_user(connected: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]  # pid, uid, gid
    return user


def end_with_parent(parent: int) -> None:
    """Let the kernel end this process when its parent ends, of which a busy one would not learn."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of prctl(2)
    if os.getppid() != parent:
        os._exit(1)


def main(arguments: Sequence[str]) -> None:
    """Serve an inherited socket of a folder, on devices, until the standard input ends; remove the folder."""
    configure_libraries()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's matter
    descriptor, folder, *devices = arguments
    try:
        for name in LIBRARIES:
            import_module(name)
        OwnerHost(socket.socket(fileno=int(descriptor)), devices, lifeline=0).serve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
