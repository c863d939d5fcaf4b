"""Plots of reward hacking show the shares of selectors and judge over the steps of DPO."""

import pytest

from components.evaluation.hacking_curve import plot_hacking_curve, plot_hacking_grid
from components.results import CurvePoint
from tests.support.plots import drawn_figure


def test_the_curve_of_a_run_starts_at_one_half_where_the_policy_is_the_base_policy(tmp_path):
    curve = [
        CurvePoint(step=4, prompts=3, proxy=0.8, judge=0.6),
        CurvePoint(step=8, prompts=3, proxy=0.9, judge=0.4),
    ]
    figure = drawn_figure(lambda: plot_hacking_curve(curve, tmp_path / "curve.png"))
    proxy, judge = figure.axes[0].get_lines()[:2]
    assert list(proxy.get_xdata()) == [0, 4, 8]
    assert list(proxy.get_ydata()) == [0.5, 0.8, 0.9]
    assert list(judge.get_ydata()) == [0.5, 0.6, 0.4]


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """The plot of a benchmark; one arm lacks the first seed."""
    curve = [CurvePoint(step=4, prompts=3, proxy=0.6, judge=0.4)]
    path = tmp_path_factory.mktemp("plots") / "grid.png"
    figure = drawn_figure(
        lambda: plot_hacking_grid({"FedBis": {0: curve, 1: curve}, "FedBiscuit": {1: curve}}, path)
    )
    return figure.axes


def test_the_curves_of_a_benchmark_have_a_panel_for_each_arm_and_seed(grid):
    assert [axes.get_title() for axes in grid] == [
        "FedBis, seed 0",
        "FedBis, seed 1",
        "FedBiscuit, seed 0",
        "FedBiscuit, seed 1",
    ]


def test_a_panel_of_a_benchmark_shows_the_curve_of_its_seed(grid):
    shown = [[float(value) for value in line.get_ydata()] for line in grid[0].get_lines()[:2]]
    assert shown == [[0.5, 0.6], [0.5, 0.4]]


def test_a_panel_without_a_run_shows_the_base_policy_alone(grid):
    assert [list(line.get_xdata()) for line in grid[2].get_lines()[:2]] == [[0], [0]]
