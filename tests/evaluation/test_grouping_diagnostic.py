"""The diagnostic of the clients' grouping: losses, and agreement with the true clusters."""

import math

import pytest

from components.evaluation.diagnostics.diagnostic import DiagnosedRun
from components.evaluation.diagnostics.grouping_diagnostic import GroupingDiagnostic, loss_map
from components.results import Outcome
from tests.support.diagnostics import RecordingSink
from tests.support.results import client_record, federation_result, step_record

TRUE = {
    "a": "x",
    "b": "x",
    "c": "y",
    "d": "y",
}
UNKNOWN = dict.fromkeys(TRUE)
HALF_RIGHT = {
    "a": "s0",
    "b": "s1",
    "c": "s0",
    "d": "s1",
}
RIGHT = {
    "a": "s0",
    "b": "s0",
    "c": "s1",
    "d": "s1",
}


def memory(assignment, grouped_at):
    """The method's memory after a grouping in a round, or in a later round."""
    return {
        "assignment": assignment,
        "grouped_at": grouped_at,
        "losses": {name: [0.5, math.nan] for name in assignment},
    }


def grouping(round_index, assignment):
    """A step that groups the clients, within a round."""
    return step_record(
        round_index,
        {name: client_record(losses=[0.5, 0.6]) for name in "abc"},
        phase="grouping",
        rounds_done=round_index,
        logged_at=round_index,
        adapters={"s0": "0", "s1": "1"},
        memory=memory(assignment, round_index),
    )


WARMUP = step_record(
    0,
    memory={
        "assignment": {},
        "grouped_at": None,
        "losses": {},
    },
)
TRAINED = step_record(2, memory=memory(HALF_RIGHT, 2))
LATER = step_record(3, memory=memory(HALF_RIGHT, 2))
RECORDS = [WARMUP, grouping(2, HALF_RIGHT), TRAINED, LATER, grouping(4, RIGHT)]


@pytest.fixture
def sink():
    return RecordingSink()


def test_a_grouping_is_logged_with_its_agreement_where_true_groups_are_known(sink):
    GroupingDiagnostic().log(grouping(2, RIGHT), UNKNOWN, sink)
    assert sink.metrics == {}
    GroupingDiagnostic().log(grouping(2, HALF_RIGHT), TRUE, sink)
    assert sink.metrics == {2: {"grouping/adjusted_rand_index": pytest.approx(-0.5)}}


@pytest.mark.parametrize("record", [WARMUP, TRAINED, LATER], ids=["warm-up", "same round", "later round"])
def test_a_step_that_does_not_group_is_not_logged(sink, record):
    GroupingDiagnostic().log(record, TRUE, sink)
    assert sink.metrics == {}


@pytest.fixture
def grouped():
    outcome = Outcome(trained_model="selector", votes=True, assignment=RIGHT)
    return federation_result(records=RECORDS, outcome=outcome)


def test_the_summary_has_the_agreement_of_each_grouping_and_of_the_last_if_there_are_groups(grouped):
    summary = GroupingDiagnostic().summarize(grouped, DiagnosedRun("FedBiscuit", 0, TRUE))
    assert summary.data == [(2, pytest.approx(-0.5)), (4, 1.0)]
    assert summary.figures == {"adjusted_rand_index": 1.0}
    summary = GroupingDiagnostic().summarize(grouped, DiagnosedRun("FedBiscuit", 0, UNKNOWN))
    assert summary.figures == {}
    assert not summary.data
    summary = GroupingDiagnostic().summarize(federation_result(), DiagnosedRun("FedBis", 0, TRUE))
    assert summary.figures == {}


def test_the_benchmark_has_a_line_of_agreement_for_each_arm_and_seed_with_groupings(grouped):
    diagnostic = GroupingDiagnostic()
    known = diagnostic.summarize(grouped, DiagnosedRun("FedBiscuit", 0, TRUE))
    unknown = diagnostic.summarize(grouped, DiagnosedRun("other", 0, UNKNOWN))
    (chart,) = diagnostic.benchmark_charts({"FedBiscuit": {0: known, 1: known}, "other": {0: unknown}})
    assert [trace.name for trace in chart.data] == ["FedBiscuit, seed 0", "FedBiscuit, seed 1"]
    assert list(chart.data[0].y) == [pytest.approx(-0.5), 1.0]
    assert diagnostic.benchmark_charts({"other": {0: unknown}}) == []


def test_the_report_of_a_run_has_the_losses_of_the_last_grouping_and_the_agreement(grouped):
    losses, agreement = GroupingDiagnostic().run_charts(grouped, DiagnosedRun("FedBiscuit", 0, TRUE))
    assert "after round 4" in losses.layout.title.text
    assert list(agreement.data[0].x) == [2, 4]
    (losses,) = GroupingDiagnostic().run_charts(grouped, DiagnosedRun("FedBiscuit", 0, UNKNOWN))
    assert GroupingDiagnostic().run_charts(federation_result(), DiagnosedRun("FedBis", 0, TRUE)) == []


@pytest.fixture(scope="module")
def loss_chart():
    """The losses on twelve selectors, with two clients that reported none."""
    slots = {f"selector-{number}": "0" for number in range(12)}
    assignment = {"ada": "selector-10", "bea": "selector-2", "cyd": "selector-2"}
    record = step_record(
        2,
        {"ada": client_record(losses=[0.1 * number for number in range(12)])},
        rounds_done=2,
        adapters=slots,
        memory=memory(assignment, 2),
    )
    return loss_map(record, {"ada": "x", "bea": None})


def test_losses_have_a_row_for_each_client_by_its_group_and_a_frame_at_its_selector(loss_chart):
    cells = loss_chart.data[0]
    assert list(cells.x) == [f"selector-{n}" for n in range(12)]
    assert list(cells.z[2]) == pytest.approx([0.1 * n for n in range(12)])
    assert all(math.isnan(cell) for cell in cells.z[0])
    frames = loss_chart.data[1]
    assert list(zip(frames.y, frames.x, strict=True)) == [
        ("bea", "selector-2"),
        ("cyd", "selector-2"),
        ("ada (x)", "selector-10"),
    ]
