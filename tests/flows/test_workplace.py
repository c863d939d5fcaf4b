"""Flows that tests call use the Prefect server of the session."""

import os

import psutil
import pytest

from infra.servers import prefect_api


def prefect_servers():
    """The commands of Prefect servers among the processes that this session has started."""
    user = psutil.Process().uids().real
    commands = [
        " ".join(process.info["cmdline"] or [])
        for process in psutil.process_iter(["cmdline", "uids"])
        if process.info["uids"].real == user
    ]
    return [command for command in commands if "prefect server start" in command]


def test_a_flow_in_a_test_uses_the_server_of_the_session_and_starts_none(new_workplace):
    place = new_workplace("servers")
    before = prefect_servers()
    used, _ = place.call(lambda: (os.environ["PREFECT_API_URL"], prefect_servers()))
    assert used == (place.prefect_url, before)
    assert len([command for command in before if f"--port {place.prefect_url.split(':')[2][:-4]}" in command])


def test_a_flow_that_would_start_a_server_of_its_own_fails(new_workplace, monkeypatch):
    place = new_workplace("no server")
    monkeypatch.setattr(type(place), "variables", {"FED_RLHF_HOME": str(place.folder), "PREFECT_API_URL": ""})

    def flow():
        with prefect_api():
            pass

    with pytest.raises(AssertionError, match="a Prefect server of its own"):
        place.call(flow)
