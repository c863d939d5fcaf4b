"""A pytest plug-in: tests use this machine alone, and one whose process asks for another address fails.

The hub is offline for all tests and the processes that they start; a test that serves a hub of its own
takes the fixture `hub_online`.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

ASKED: list[str] = []
"""Addresses beyond this machine that were asked for since the last test, and the test that ran then."""
CONNECT, CONNECT_EX = socket.socket.connect, socket.socket.connect_ex
LOOK_UP, HOST_BY_NAME = socket.getaddrinfo, socket.gethostbyname


@cache
def own_addresses() -> frozenset[str]:
    """Names and addresses of this machine."""
    name = socket.gethostname()
    try:
        addresses = {str(entry[4][0]) for entry in LOOK_UP(name, None)}
    except OSError:
        addresses = set()
    return frozenset({"", "localhost", "0.0.0.0", "::", name, *addresses})


def is_here(host: str | bytes | None) -> bool:
    """Whether a host is this machine."""
    name = host.decode() if isinstance(host, bytes) else host or ""
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name in own_addresses()
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped.is_loopback or name in own_addresses()


def _refuse(host: str | bytes | None) -> None:
    if not is_here(host):
        ASKED.append(f"{host} ({os.environ.get('PYTEST_CURRENT_TEST')})")
        raise ConnectionRefusedError(f"tests use this machine alone, and this one asks for {host!r}")


def _check(connection: socket.socket, address: Any) -> None:
    # A datagram socket sends nothing when it connects: Ray asks in this way for the machine's own address.
    if connection.family != socket.AF_UNIX and connection.type == socket.SOCK_STREAM:
        _refuse(address[0])


def _connect(self: socket.socket, address: Any) -> None:
    _check(self, address)
    CONNECT(self, address)


def _connect_ex(self: socket.socket, address: Any) -> int:
    _check(self, address)
    return CONNECT_EX(self, address)


def _look_up(host: str | bytes | None, *arguments: Any, **options: Any) -> Any:
    _refuse(host)
    return LOOK_UP(host, *arguments, **options)


def _host_by_name(host: str) -> str:
    _refuse(host)
    return HOST_BY_NAME(host)


def pytest_configure() -> None:
    """Watch the connections of this process."""
    socket.socket.connect = _connect  # type: ignore[assignment, method-assign]
    socket.socket.connect_ex = _connect_ex  # type: ignore[method-assign]
    socket.getaddrinfo, socket.gethostbyname = _look_up, _host_by_name


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
    monkeypatch.setattr("components.hub._answers", {})
