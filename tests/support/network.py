"""A pytest plug-in: tests use this machine alone, and one that asks for another address fails.

The hub is offline for all tests and the processes that they start; a test that serves a hub of its own
takes the fixture `hub_online`.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

ASKED: list[str] = []
"""Addresses beyond this machine that were asked for since the last test."""
CONNECT, LOOK_UP = socket.socket.connect, socket.getaddrinfo


def is_here(host: str | bytes | None) -> bool:
    """Whether a host is loopback, or the name of this machine."""
    name = host.decode() if isinstance(host, bytes) else host or "localhost"
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return name in ("localhost", socket.gethostname())


def _refuse(host: str | bytes | None) -> None:
    if not is_here(host):
        ASKED.append(str(host))
        raise ConnectionRefusedError(f"tests use this machine alone, and this one asks for {host!r}")


def _connect(self: socket.socket, address: Any) -> None:
    # A datagram socket sends nothing when it connects: Ray asks in this way for the machine's own address.
    if self.family != socket.AF_UNIX and self.type == socket.SOCK_STREAM:
        _refuse(address[0])
    CONNECT(self, address)


def _look_up(host: str | bytes | None, *arguments: Any, **options: Any) -> Any:
    _refuse(host)
    return LOOK_UP(host, *arguments, **options)


def pytest_configure() -> None:
    """Watch all connections of this process."""
    socket.socket.connect = _connect  # type: ignore[assignment, method-assign]
    socket.getaddrinfo = _look_up


@pytest.fixture(autouse=True)
def this_machine_alone() -> Iterator[None]:
    """Fail where a library has caught the refusal."""
    yield
    asked = ASKED.copy()
    ASKED.clear()
    assert not asked, f"the test, or a fixture that it starts, asked for {', '.join(asked)}"


@pytest.fixture
def hub_online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process ask the hub of HF_ENDPOINT."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
