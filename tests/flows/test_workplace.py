"""Flows that tests call use the Prefect server of the session."""

import os

import pytest

from flows.api import pipeline_flow
from infra.servers import prefect_api


def test_a_flow_in_a_test_uses_the_server_of_the_session(new_workplace):
    place = new_workplace("servers")

    @pipeline_flow(name="where")
    def where():
        return os.environ["PREFECT_API_URL"]

    used, _ = place.call(where)  # which fails where the flow starts a server
    assert used == place.prefect_url


def test_a_flow_that_would_start_a_server_of_its_own_fails(new_workplace, monkeypatch):
    place = new_workplace("no server")
    monkeypatch.setattr(type(place), "variables", {"FED_RLHF_HOME": str(place.folder), "PREFECT_API_URL": ""})

    def flow():
        with prefect_api():
            pass

    with pytest.raises(AssertionError, match="a Prefect server of its own"):
        place.call(flow)
