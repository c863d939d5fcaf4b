"""The flow `benchmark/performance`, in this process: what it logs, its verdict, and its final state."""

import json
import os
from dataclasses import dataclass

import pytest
from mlflow import MlflowClient

from components.config import UserError
from perf import harness, nightly

SPEEDS = [2.0, 2.1, 1.9, 1.0]
"""The ratio of the scripted measurement in each run."""


@dataclass(frozen=True)
class Night:
    """A run of the flow: its final state, its log, and the rows of its Prefect table."""

    state: object
    output: str
    table: list


@pytest.fixture(scope="module")
def place(new_workplace):
    return new_workplace("performance")


@pytest.fixture(scope="module")
def idle():
    """The number of threads is restored, and the machine seems to have no other work."""
    import torch

    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getloadavg", lambda: (0.25, 0.0, 0.0))
        yield patch
    torch.set_num_threads(threads)


def read_table(link):
    """The rows of the flow run's table."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey

    selected = ArtifactFilter(
        flow_run_id=ArtifactFilterFlowRunId(any_=[link]), key=ArtifactFilterKey(any_=["performance"])
    )
    with get_client(sync_client=True) as client:
        (artifact,) = client.read_artifacts(artifact_filter=selected)
    return json.loads(artifact.data)


@pytest.fixture(scope="module")
def nights(place, idle):
    """Four runs with a scripted ratio, of which the first also measures for real."""
    speeds = iter(SPEEDS)
    idle.setitem(nightly.MEASUREMENTS, "scripted", lambda *_: {"scripted/new_against_old": [next(speeds)]})
    runs = []
    for number in range(len(SPEEDS)):
        names = ["mgda", "scripted"] if number == 0 else ["scripted"]
        state, output = place.call(
            lambda names=names: nightly.performance("debug", names, pairs=1, return_state=True)
        )
        runs.append(Night(state, output, read_table(state.state_details.flow_run_id)))
    return runs


@pytest.fixture(scope="module")
def logged(nights, place):
    """The MLflow runs, the oldest first."""
    client = MlflowClient(place.tracking)
    experiment = client.get_experiment_by_name("performance")
    return client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])


@pytest.mark.slow
def test_each_run_logs_its_ratios_to_one_finished_mlflow_run(logged):
    assert [run.data.metrics["scripted/new_against_old"] for run in logged] == SPEEDS
    assert logged[0].data.metrics["mgda/faces_against_cvxpy_for_2"] > 0
    assert {run.info.status for run in logged} == {"FINISHED"}


@pytest.mark.slow
def test_a_run_records_the_conditions_and_the_commit(logged):
    params = logged[0].data.params
    assert params["recipe"] == "debug"
    assert params["processor"] == harness.processor_name()
    assert params["cores"] == str(harness.available_cores())
    assert params["threads"] == "1"
    assert params["load_average"] == "0.25"
    assert set(params) == {
        "recipe",
        "processor",
        "cores",
        "device",
        "torch",
        "threads",
        "pairs",
        "load_average",
    }
    assert logged[0].data.tags["git.commit"] == nightly.git_commit()


@pytest.mark.slow
def test_the_first_three_runs_are_not_judged(nights, logged):
    for night, run in zip(nights[:3], logged[:3], strict=True):
        assert night.state.is_completed()
        assert "none was judged, because fewer than 3" in night.state.message
        assert all(row["verdict"].startswith("not judged") for row in night.table)
        assert run.data.tags["regressions"] == "not judged"


@pytest.mark.slow
def test_a_regression_fails_the_flow_after_everything_is_logged(nights, logged):
    last = nights[3]
    sentence = "scripted/new_against_old is 1.000, the median of 3 earlier runs is 2.000"
    assert last.state.is_failed()
    assert last.state.message == f"1 of 1 ratios fell by more than 15%: {sentence}."
    assert f"WARNING regression: {sentence}" in last.output
    assert [row["verdict"] for row in last.table] == ["regression"]
    assert logged[3].data.tags["regressions"] == "scripted/new_against_old"
    assert logged[3].info.status == "FINISHED"


@pytest.mark.slow
def test_the_printed_tables_are_in_the_log(nights):
    assert "A solution of MGDA, median of" in nights[0].output


@pytest.mark.slow
def test_beside_other_work_the_flow_fails_and_logs_nothing(nights, logged, place, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (1.4, 0.0, 0.0))
    state, _ = place.call(
        lambda: nightly.performance("debug", ["scripted"], wait_minutes=0, return_state=True)
    )
    assert state.is_failed()
    assert "the load average is 1.40 after 0 minutes" in state.message
    client = MlflowClient(place.tracking)
    assert len(client.search_runs([logged[0].info.experiment_id])) == len(SPEEDS)


def test_the_flow_waits_until_other_work_ends(monkeypatch):
    loads = iter([1.4, 0.9, 0.3])
    pauses = []
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    monkeypatch.setattr(nightly.time, "sleep", pauses.append)
    assert nightly.wait_until_idle.fn(30) == 0.3
    assert pauses == [nightly.POLL_SECONDS] * 2


def test_the_default_measurements_exist():
    assert nightly.choose_measurements(None, 3) == list(nightly.DEFAULT)
    assert set(nightly.DEFAULT) <= set(nightly.MEASUREMENTS)


@pytest.mark.parametrize(
    ("names", "pairs", "message"),
    [
        (["speed"], 3, "unknown measurements: speed; choose from selector-step, dpo-step, waiting"),
        ([], 3, "there are no measurements"),
        (None, 0, "pairs is 0, expected at least 1"),
    ],
)
def test_wrong_parameters_are_refused(names, pairs, message):
    with pytest.raises(UserError, match=message):
        nightly.choose_measurements(names, pairs)


def test_the_processor_is_named_as_linux_names_it(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Example CPU 3000: v2\n")
    assert harness.processor_name(cpuinfo) == "Example CPU 3000: v2"
    assert harness.processor_name(tmp_path / "missing")
