"""The diagnostic of the clients' grouping: heat maps, and agreement with the true groups."""

import math

import numpy as np
import pytest

from components.evaluation.diagnostics.base import DiagnosedRun
from components.evaluation.diagnostics.grouping import GroupingDiagnostic, plot_losses, plot_rand_index
from components.results import OutcomeRecord
from tests.support.diagnostics import RecordingSink
from tests.support.plots import drawn_figure
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


@pytest.mark.slow
def test_a_grouping_is_logged_with_its_agreement_at_its_round(sink):
    GroupingDiagnostic().log(grouping(2, HALF_RIGHT), TRUE, sink)
    assert sink.metrics == {2: {"grouping/adjusted_rand_index": pytest.approx(-0.5)}}
    assert sink.plots == ["grouping/00003.png"]


def test_without_true_groups_a_grouping_is_logged_as_a_plot_only(tmp_path):
    sink = RecordingSink(tmp_path)
    GroupingDiagnostic().log(grouping(2, RIGHT), UNKNOWN, sink)
    assert sink.metrics == {}
    assert sink.plots == ["grouping/00003.png"]


@pytest.mark.parametrize("record", [WARMUP, TRAINED, LATER], ids=["warm-up", "same round", "later round"])
def test_a_step_that_does_not_group_is_not_logged(sink, record):
    GroupingDiagnostic().log(record, TRUE, sink)
    assert sink.metrics == {}
    assert sink.plots == []


@pytest.fixture
def grouped():
    outcome = OutcomeRecord(kind="selector-ensemble", adapters={}, assignment=RIGHT)
    return federation_result(records=RECORDS, outcome=outcome)


def test_the_summary_has_the_agreement_of_each_grouping_by_the_rounds_done(grouped):
    summary = GroupingDiagnostic().summarize(grouped, DiagnosedRun("FedBiscuit", 0, TRUE))
    assert summary.data == [(2, pytest.approx(-0.5)), (4, 1.0)]


def test_the_figure_of_a_grouping_is_the_agreement_of_the_last_one(grouped):
    summary = GroupingDiagnostic().summarize(grouped, DiagnosedRun("FedBiscuit", 0, TRUE))
    assert summary.figures == {"adjusted_rand_index": 1.0}


def test_without_true_groups_the_summary_is_empty(grouped):
    summary = GroupingDiagnostic().summarize(grouped, DiagnosedRun("FedBiscuit", 0, UNKNOWN))
    assert summary.figures == {}
    assert not summary.data


def test_an_outcome_without_groups_has_no_agreement():
    summary = GroupingDiagnostic().summarize(federation_result(), DiagnosedRun("FedBis", 0, TRUE))
    assert summary.figures == {}


def test_the_benchmark_has_a_plot_of_the_arms_with_groupings(grouped, tmp_path):
    diagnostic = GroupingDiagnostic()
    known = diagnostic.summarize(grouped, DiagnosedRun("FedBiscuit", 0, TRUE))
    unknown = diagnostic.summarize(grouped, DiagnosedRun("other", 0, UNKNOWN))
    (image,) = diagnostic.plot_benchmark({"FedBiscuit": {0: known}, "other": {0: unknown}}, tmp_path)
    assert image.path.is_file()
    assert diagnostic.plot_benchmark({"other": {0: unknown}}, tmp_path) == []


def test_the_plot_of_the_agreement_has_a_line_for_each_arm_and_seed(tmp_path):
    curve = [(2, -0.5), (4, 1.0)]
    figure = drawn_figure(lambda: plot_rand_index({"FedBiscuit": {0: curve, 1: curve}}, tmp_path / "r.png"))
    first, second = figure.axes[0].get_lines()[:2]
    assert (first.get_label(), second.get_label()) == ("FedBiscuit, seed 0", "FedBiscuit, seed 1")
    assert list(first.get_ydata()) == [-0.5, 1.0]


@pytest.fixture(scope="module")
def heat_map(tmp_path_factory):
    """The axes of a heat map of twelve selectors, with a client that has no vote."""
    slots = [f"selector-{number}" for number in range(12)]
    losses = {"ada": [0.1 * number for number in range(12)], "bea": [math.nan] * 12}
    assignment = {
        "ada": "selector-10",
        "bea": "selector-2",
        "cyd": "selector-2",
    }
    path = tmp_path_factory.mktemp("plots") / "heat.png"
    figure = drawn_figure(lambda: plot_losses(slots, losses, assignment, {"ada": "x", "bea": None}, path))
    return figure.axes[0]


def test_the_heat_map_has_a_row_for_each_client_and_a_column_for_each_selector_in_the_order_of_the_losses(
    heat_map,
):
    assert heat_map.images[0].get_array().shape == (3, 12)
    assert [text.get_text() for text in heat_map.get_xticklabels()] == [f"selector-{n}" for n in range(12)]
    np.testing.assert_allclose(heat_map.images[0].get_array()[2], [0.1 * n for n in range(12)])


def test_the_heat_map_marks_the_selector_of_each_client(heat_map):
    marks = {tuple(point) for point in heat_map.collections[0].get_offsets().tolist()}
    assert marks == {(2.0, 0.0), (2.0, 1.0), (10.0, 2.0)}


def test_the_heat_map_sorts_clients_by_their_true_group_and_names_it(heat_map):
    assert [text.get_text() for text in heat_map.get_yticklabels()] == ["bea", "cyd", "ada (x)"]
