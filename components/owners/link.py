"""The server's side of a connection to an owner."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from components.federation.protocol import Failure, Update
from components.owners.codec import RELEASE, CodecError, Greeting, OwnerRequest, decode_answer, encode

LOOK_SECONDS = 1.0
"""How often it is looked whether the host still runs."""
END_SECONDS = 10.0
"""How long a host that has closed a connection without an answer may take to end."""


class OwnerAway(Exception):
    """No connection to an owner can be made."""


class OwnerEnded(Exception):
    """An owner answers no further job. The text says why, without a word of the owner's rows."""


def ask(
    address: str,
    home: Path,
    request: OwnerRequest,
    content: Callable[[str], bytes],
    runs: Callable[[float], bool],
) -> Iterator[tuple[Update | Failure, bytes | None]]:
    """Send a request to an owner, and give its answers, each with the adapter that came with it.

    Args:
        address: of the host's Unix socket.
        home: the owner's.
        request: the request.
        content: gives a file by its sha256.
        runs: whether the host still runs after these seconds; it returns as soon as the host has ended.

    Raises:
        OwnerAway: there is no connection.
        OwnerEnded: the owner's process, or the host, ended, or the owner cannot read the request. The
            answers that were given are valid.
        CodecError: what the owner sends is no answer.
    """
    try:
        connected = _connect(address)
    except OSError:
        raise OwnerAway from None
    try:
        with connected as connection:
            link = _Link(connection, runs)
            link.send_request(home, request, content)
            for _ in request.jobs:
                yield link.receive_answer()
    except (EOFError, OSError):
        # A host that ends has closed its connections a moment before its parent learns that it ended.
        ended = "its process" if runs(END_SECONDS) else "the host of its process"
        raise OwnerEnded(f"{ended} ended") from None


@dataclass(frozen=True)
class _Link:
    connection: Connection
    runs: Callable[[float], bool]

    def send_request(self, home: Path, request: OwnerRequest, content: Callable[[str], bytes]) -> None:
        trainer = request.jobs[0].trainer
        greeting = Greeting(home=str(home), recipe=request.recipe, trainer=trainer)
        self.connection.send_bytes(greeting.model_dump_json().encode())
        self.connection.send_bytes(encode(request))
        message = self._receive()
        if not message.startswith(b"["):
            self._decode(message)
            raise CodecError("an owner answers before it has the files of a request")
        for digest in json.loads(message):
            try:
                data = content(digest)
            except OSError as error:
                raise CodecError(f"a file of the run cannot be read: {error}") from None
            self.connection.send_bytes(data)

    def receive_answer(self) -> tuple[Update | Failure, bytes | None]:
        answer = self._decode(self._receive())
        if isinstance(answer, Failure) or answer.adapter is None:
            return answer, None
        adapter = self._receive()
        if hashlib.sha256(adapter).hexdigest() != answer.adapter:
            raise CodecError(f"the adapter of client {answer.client} is not that of its hash")
        return answer, adapter

    def _receive(self) -> bytes:
        while not self.connection.poll(LOOK_SECONDS):
            if not self.runs(0.0):
                raise EOFError
        return self.connection.recv_bytes()

    def _decode(self, message: bytes) -> Update | Failure:
        answer = decode_answer(message)
        if isinstance(answer, Failure) and not answer.client:
            raise OwnerEnded(answer.reason)
        return answer


def release(address: str, seconds: float = 60.0) -> None:
    """Let the processes of owners that wait for requests end, and return when they have, or after seconds."""
    with _connect(address) as connection:
        connection.send_bytes(RELEASE)
        connection.poll(seconds)  # until the host closes it


def _connect(address: str) -> Connection:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        return Connection(client.detach())
