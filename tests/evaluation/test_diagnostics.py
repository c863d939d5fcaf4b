"""Diagnostics are loaded by name; by default they log and summarize nothing."""

import pytest

from components.config import RecipeError
from components.config.federation import METHODS
from components.evaluation.diagnostics import DIAGNOSTICS, load_diagnostics
from components.evaluation.diagnostics.diagnostic import DiagnosedRun, Diagnostic, Summary
from tests.support.diagnostics import RecordingSink
from tests.support.results import federation_result, step_record


def test_diagnostics_are_loaded_in_the_order_of_their_names_and_unknown_ones_refused():
    names = ["objectives", "grouping"]
    assert [type(one) for one in load_diagnostics(names)] == [DIAGNOSTICS.load(name) for name in names]
    with pytest.raises(RecipeError, match="Did you mean 'grouping'"):
        load_diagnostics(["groupings"])


@pytest.mark.parametrize("method", METHODS.names())
def test_the_diagnostics_of_each_method_are_registered(method):
    assert set(METHODS.load(method).diagnostics) <= set(DIAGNOSTICS.names())


def test_a_diagnostic_without_parts_of_its_own_logs_and_summarizes_nothing():
    diagnostic = Diagnostic()
    sink = RecordingSink()
    run = DiagnosedRun("an arm", 0, {})
    diagnostic.log(step_record(), {}, sink)
    diagnostic.log_result(federation_result(), run, sink)
    assert (sink.metrics, sink.documents, sink.charts) == ({}, {}, {})
    assert diagnostic.summarize(federation_result(), run) == Summary()
    assert diagnostic.run_charts(federation_result(), run) == []
    assert diagnostic.benchmark_charts({"an arm": {0: Summary()}}) == []
