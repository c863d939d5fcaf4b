"""Runs side by side: keys that differ, figures, and curves."""

import pytest

from components.reporting.comparison import (
    ComparedRun,
    comparison_page,
    comparison_tables,
    differing_keys,
    shown_values,
)
from components.reporting.page import to_html

METRICS = {
    "before/accuracy/mean": 0.5,
    "after/accuracy/mean": 0.75,
    "cost/client_steps": 1200.0,
    "aligned_vs_base/wins": 3.0,
    "aligned_vs_base/ties": 0.0,
    "aligned_vs_base/losses": 1.0,
    "aligned_vs_base/ties_half": 0.75,
    "aligned_vs_base/ties_half_low": 0.5,
    "aligned_vs_base/ties_half_high": 1.0,
}


def compared(name, **values):
    return ComparedRun(**{"run": name, "state": "finished", "keys": {}, "metrics": METRICS} | values)


def test_keys_with_equal_values_are_left_out_and_a_key_that_a_run_lacks_differs():
    recipes = [
        {"seed": 0, "rounds": 3, "lr": 1.0},
        {"seed": 1, "rounds": 3},
        {"seed": 0, "rounds": 3, "lr": 1.0},
    ]
    assert differing_keys(recipes) == [{"seed": 0, "lr": 1.0}, {"seed": 1}, {"seed": 0, "lr": 1.0}]


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, "1"), (1, 1.0), (None, "null")])
def test_values_that_a_recipe_tells_apart_differ(one, other):
    assert differing_keys([{"key": one}, {"key": other}]) == [{"key": one}, {"key": other}]


def test_figures_have_the_labels_of_reports_and_a_dash_where_a_run_has_none():
    runs = [compared("a"), compared("b", metrics={"after/accuracy/mean": 0.25})]
    figures = comparison_tables(runs)[2]
    assert figures.header == ["figure", "1", "2"]
    assert figures.rows == [
        ["pair accuracy before the rounds", "0.500", "-"],
        ["pair accuracy", "0.750", "0.250"],
        ["client steps", "1200", "-"],
        ["aligned against base policy: wins/ties/losses", "3/0/1", "-"],
        ["aligned against base policy: win rate, ties as 1/2 [95%]", "75.0% [50.0%, 100.0%]", "-"],
    ]


def test_runs_are_listed_by_their_numbers_with_what_is_missing():
    runs = [compared("a"), compared("b", state="stopped: federate", metrics={})]
    listed, keys, _ = comparison_tables(runs)
    assert listed.rows == [["1", "a", "finished"], ["2", "b", "stopped: federate"]]
    assert listed.caption == (
        "The recipes have equal keys.\nRun 2 has no figures yet, it is stopped: federate."
    )
    assert keys.rows == []


def test_figures_of_a_run_that_is_not_finished_are_said_to_be_those_so_far():
    listed, *_ = comparison_tables([compared("a", keys={"seed": 0}), compared("b", state="running: align")])
    assert listed.caption == "Run 2 has the figures that were measured so far, it is running: align."


def test_keys_have_a_column_for_each_run():
    runs = [compared("a", keys={"method": "fedbis", "lr": 0.1}), compared("b", keys={"method": "fedavg"})]
    listed, keys, _ = comparison_tables(runs)
    assert listed.caption == ""
    assert keys.rows == [["method", '"fedbis"', '"fedavg"'], ["lr", "0.1", "-"]]


def test_long_values_are_cut_to_where_they_differ():
    one, other = shown_values([f"{'same ' * 30}one {'end ' * 30}", f"{'same ' * 30}two"])
    assert one.startswith("...e same same one ")
    assert len(one) == 48
    assert other.endswith("same two")
    assert shown_values(["x" * 60, "-"]) == [f"{'x' * 45}...", "-"]
    assert shown_values(["x" * 48, "y"]) == ["x" * 48, "y"]


def test_the_page_has_the_tables_and_the_curves_of_all_runs_in_one_chart():
    runs = [compared("a", keys={"seed": 0}), compared("b", keys={"seed": 1})]
    curves = [
        [{"round": 0.0, "accuracy": 0.5}, {"round": 1.0, "accuracy": 0.6}, {"round": 1.0, "loss_last": 0.7}],
        [{"round": 0.0, "accuracy": 0.4}],
    ]
    page = comparison_page(runs, curves)
    *tables, charts = page.sections
    assert [section.title for section in tables] == ["Runs", "Recipe", "Figures"]
    accuracy, loss = (part.figure for part in charts.parts)
    assert {trace.name: list(trace.y) for trace in accuracy.data} == {"1: a": [0.5, 0.6], "2: b": [0.4]}
    assert [list(trace.y) for trace in loss.data] == [[0.7]]
    assert "seed" in to_html(page)


def test_a_page_of_runs_without_rounds_has_no_charts():
    page = comparison_page([compared("a"), compared("b")], [[], []])
    assert page.sections[-1].parts == []
