"""Tests use this machine alone."""

import socket

import pytest

from tests.support import network


@pytest.mark.parametrize("host", ["hub.invalid", "192.0.2.1", "2001:db8::1"])
def test_an_address_beyond_this_machine_is_refused_and_remembered(host):
    with pytest.raises(ConnectionRefusedError, match=f"asks for '{host}'"):
        socket.create_connection((host, 80), timeout=1)
    assert network.ASKED.pop() == host


def test_a_server_on_loopback_is_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(("localhost", server.getsockname()[1]), timeout=5).close()
    assert not network.ASKED
