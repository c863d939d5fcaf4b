"""The flow `benchmark/performance`, in this process: what it logs, its verdicts, and its final state."""

import json
import math
import os
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from mlflow import MlflowClient
from prefect.exceptions import ParameterTypeError

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
    """The machine seems to have no other work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getloadavg", lambda: (0.25, 0.0, 0.0))
        yield patch


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
        names = ["generation", "scripted"] if number == 0 else ["scripted"]
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


def test_each_run_logs_its_ratios_to_one_finished_mlflow_run(logged):
    assert [run.data.metrics["scripted/new_against_old"] for run in logged] == SPEEDS
    assert logged[0].data.metrics["generation/continuous_against_batches"] > 0
    assert {run.info.status for run in logged} == {"FINISHED"}


def test_a_run_records_the_conditions_and_the_commit(logged):
    params = logged[0].data.params
    assert params["recipe"] == "debug"
    assert params["processor"] == harness.processor_name()
    assert params["cores"] == str(harness.available_cores())
    assert params["threads"] == "1"
    assert params["load_average"] == "0.25"
    assert set(params) == {
        "recipe",
        "sizes",
        "processor",
        "cores",
        "device",
        "torch",
        "threads",
        "pairs",
        "load_average",
    }
    assert logged[0].data.tags["git.commit"] == nightly.git_commit()


def test_the_first_three_runs_are_not_judged(nights, logged):
    for number, (night, run) in enumerate(zip(nights[:3], logged[:3], strict=True)):
        assert night.state.is_completed()
        assert "none was judged, because fewer than 3" in night.state.message
        assert {row["verdict"] for row in night.table} == {f"not judged: {number} of 3 earlier runs"}
        assert run.data.tags["regressions"] == "not judged"


def test_a_regression_fails_the_flow_after_everything_is_logged(nights, logged):
    last = nights[3]
    sentence = "scripted/new_against_old: 1.000 instead of 2.000 (median of 3 earlier runs)"
    assert last.state.is_failed()
    assert last.state.message == f"1 of 1 ratios fell by more than 15%: {sentence}."
    assert f"WARNING regression: {sentence}" in last.output
    assert [row["verdict"] for row in last.table] == ["regression"]
    assert logged[3].data.tags["regressions"] == "scripted/new_against_old"
    assert logged[3].info.status == "FINISHED"


def test_the_printed_tables_are_in_the_log(nights):
    assert "Completions (debug:" in nights[0].output


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
    monkeypatch.setattr(nightly, "os", SimpleNamespace(getloadavg=lambda: (next(loads), 0.0, 0.0)))
    monkeypatch.setattr(nightly, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append))
    assert nightly.wait_until_idle.fn(30) == 0.3
    assert pauses == [nightly.POLL_SECONDS] * 2


def test_the_default_measurements_exist():
    assert nightly.choose_measurements(None) == list(nightly.DEFAULT)
    assert set(nightly.DEFAULT) <= set(nightly.MEASUREMENTS)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["speed"], "unknown measurements: speed; choose from selector-step, generation, orchestration"),
        ([], "there are no measurements"),
    ],
)
def test_measurements_that_do_not_exist_are_refused(names, message):
    with pytest.raises(UserError, match=message):
        nightly.choose_measurements(names)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"tolerance": 0.0}, "tolerance: Input should be greater than 0"),
        ({"tolerance": 1.5}, "tolerance: Input should be less than 1"),
        ({"earlier_runs": 2}, "earlier_runs: Input should be greater than or equal to 3"),
        ({"pairs": 0}, "pairs: Input should be greater than or equal to 1"),
        ({"wait_minutes": math.nan}, "wait_minutes: Input should be a finite number"),
    ],
)
def test_parameters_out_of_their_range_are_refused(parameters, message):
    with pytest.raises(ParameterTypeError, match=message):
        nightly.performance.validate_parameters({"recipe": "debug"} | parameters)


# --- what is a regression

HERE = {"recipe": "debug", "processor": "Processor A", "cores": "2", "device": "cpu"}


def earlier(*values, conditions=HERE, name="speed"):
    """Earlier runs with these values of a ratio, the newest first."""
    return [{**conditions, "torch": "1", name: value} for value in values]


def judged(now, runs, earlier_runs=7):
    """The change of a ratio."""
    (change,) = nightly.judge({"speed": now}, HERE, runs, 0.15, earlier_runs)
    return change


def test_a_ratio_below_the_tolerance_is_a_regression():
    change = judged(1.69, earlier(2.0, 1.0, 3.0))
    assert change.is_regression
    assert nightly.rows([change]) == [
        {
            "ratio": "speed",
            "now": "1.690",
            "median before": "2.000",
            "change": "-15.5%",
            "verdict": "regression",
        }
    ]


@pytest.mark.parametrize("now", [1.71, 2.0, 9.0])
def test_a_ratio_within_the_tolerance_or_above_is_no_regression(now):
    assert judged(now, earlier(2.0, 1.0, 3.0)).verdict == "no regression"


@pytest.mark.parametrize("values", [(), (2.0, 2.0), (2.0, 2.0, math.nan)])
def test_with_fewer_than_three_earlier_runs_nothing_is_judged(values):
    change = judged(0.1, earlier(*values))
    assert not change.is_regression
    assert change.verdict == f"not judged: {len(values[:2])} of 3 earlier runs"
    assert "none was judged" in nightly.summarize([change], 0.15)


def test_a_ratio_that_is_no_number_is_not_measured():
    change = judged(math.nan, earlier(2.0, 2.0, 2.0))
    assert change.verdict == "not measured"
    assert nightly.rows([change])[0]["change"] == "-"


def test_only_the_last_runs_with_the_ratio_and_the_conditions_count():
    runs = earlier(1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0)
    assert judged(1.0, runs, 3).median == 1.0
    assert judged(1.0, runs, 7).median == 5.0
    runs = [*earlier(9.0, 9.0, 9.0, name="another"), *[{"speed": 9.0}] * 3, *earlier(1.0, 1.0, 1.0)]
    assert judged(1.0, runs, 3).median == 1.0


@pytest.mark.parametrize(
    "other",
    [{"processor": "Processor B"}, {"cores": "4"}, {"recipe": "summarization/demo"}, {"device": "a GPU"}],
    ids=lambda change: next(iter(change)),
)
def test_runs_under_other_conditions_are_ignored(other):
    elsewhere = earlier(9.0, 9.0, 9.0, conditions=HERE | other)
    assert judged(1.0, elsewhere).median is None
    assert judged(1.0, elsewhere + earlier(1.0, 1.0, 1.0)).median == 1.0


def test_the_summary_names_each_regression():
    runs = [{**HERE, "speed": 2.0, "memory": 2.0}] * 4
    changes = nightly.judge({"speed": 1.0, "memory": 2.0, "new": 1.0}, HERE, runs, 0.15, 7)
    assert nightly.summarize(changes, 0.15) == (
        "1 of 3 ratios fell by more than 15%: speed: 1.000 instead of 2.000 (median of 4 earlier runs)."
    )
    assert nightly.summarize(changes[1:], 0.15) == "No regression: 1 of 2 ratios were judged."


def test_the_processor_is_named_as_linux_names_it(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Example CPU 3000: v2\n")
    assert harness.processor_name(cpuinfo) == "Example CPU 3000: v2"
    assert harness.processor_name(tmp_path / "missing")
