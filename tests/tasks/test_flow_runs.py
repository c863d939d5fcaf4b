"""Which flow runs of a schedule work, where several are due."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.states import Scheduled

from components.environment import PRIVATE_PREFECT
from components.paths import prefect_address
from flows import benchmark
from tasks import flow_runs
from tasks.flow_runs import current_flow_run, superseded
from tasks.runs import Run


@flow
def night():
    """A flow that a deployment runs."""


def test_of_the_nights_that_a_worker_missed_the_last_one_runs(prefect_session):
    now = datetime.now(UTC)
    times = [now - timedelta(days=days) for days in (2, 1, 0.001, -1)]
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(night), "nights")
        runs = [
            client.create_flow_run_from_deployment(deployment, state=Scheduled(scheduled_time=time))
            for time in times
        ]

    def ends(run, **changes):
        changed = run.model_copy(update={"auto_scheduled": True} | changes)
        with FlowRunContext.model_construct(flow_run=changed):
            state = superseded()
        return state is not None and state.is_cancelled()

    assert [ends(run) for run in runs] == [True, True, False, False]
    assert not ends(runs[0], auto_scheduled=False)  # a user has started it
    assert not ends(runs[0], deployment_id=None)
    assert superseded() is None


def test_the_page_of_a_private_server_that_ends_with_the_run_is_at_the_server_of_up(monkeypatch):
    page = "http://127.0.0.1:50043/flow-runs/flow-run/1"
    monkeypatch.setattr(flow_runs.runtime, "flow_run", SimpleNamespace(id="1", ui_url=page))
    monkeypatch.delenv(PRIVATE_PREFECT, raising=False)
    assert current_flow_run().tags()["prefect.flow_run_url"] == page
    monkeypatch.setenv(PRIVATE_PREFECT, "1")
    assert current_flow_run().tags()["prefect.flow_run_url"] == f"{prefect_address()}/flow-runs/flow-run/1"
    monkeypatch.setattr(flow_runs.runtime, "flow_run", SimpleNamespace(id="1", ui_url=None))
    assert current_flow_run().url is None


def test_a_benchmark_that_has_begun_is_resumed_although_a_later_night_is_due(monkeypatch):
    asked = []
    monkeypatch.setattr(benchmark, "configure_libraries", lambda: None)
    monkeypatch.setattr(benchmark, "retried_run", lambda: Run("earlier", Path("/earlier")))
    monkeypatch.setattr(benchmark, "superseded", lambda: asked.append("superseded"))
    monkeypatch.setattr(benchmark, "find_benchmark", asked.append)
    monkeypatch.setattr(benchmark, "verify_arms", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        benchmark.benchmark.fn()
    assert asked == ["/earlier"]
