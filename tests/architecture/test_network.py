"""Tests use this machine alone."""

import asyncio
import socket

import pytest

from tests.support import network

ELSEWHERE = "192.0.2.1"


async def open_stream():
    await asyncio.open_connection(ELSEWHERE, 80)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: socket.create_connection(("hub.invalid", 80), timeout=1),
        lambda: socket.gethostbyname("hub.invalid"),
        lambda: socket.socket().connect((ELSEWHERE, 80)),
        lambda: socket.socket().connect_ex((ELSEWHERE, 80)),
        lambda: socket.socket(socket.AF_INET6).connect(("2001:db8::1", 80)),
        lambda: asyncio.run(open_stream()),
    ],
    ids=["a name", "a look-up", "an address", "connect_ex", "IPv6", "asyncio"],
)
def test_what_is_beyond_this_machine_is_refused_and_remembered_with_the_test(ask):
    with pytest.raises(ConnectionRefusedError, match="tests use this machine alone"):
        ask()
    assert "test_what_is_beyond_this_machine" in network.ASKED.pop()
    assert not network.ASKED


def test_a_server_of_this_machine_is_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for host in ("localhost", "127.0.0.1", "0.0.0.0"):
            socket.create_connection((host, port), timeout=5).close()
        assert socket.socket().connect_ex(("::ffff:127.0.0.1".removeprefix("::ffff:"), port)) == 0
    assert all(map(network.is_here, [None, "", socket.gethostname(), "::1", "::ffff:127.0.0.1"]))
    assert not network.ASKED
