"""Plots of a benchmark that any method has."""

import pytest

from components.reporting.benchmark_plots import accuracy_kinds, plot_overview, plot_rewards
from tests.support.contests import LOSS, WIN, contest, pools
from tests.support.plots import drawn_figure

BY_TASTE = [
    {
        "common": 0.9,
        "own": 0.5,
        "own_assigned": 0.5,
        "accuracy": 0.7,
    }
]
BY_OWN_ADAPTER = [{"own": 0.5, "own_assigned": 0.6}]
BY_METRIC = [{"accuracy": 0.7, "per_token": 0.6}, {"summed": 0.5}]
WITHOUT = [{"hypervolume": 1.0}]
RUNS = [
    (BY_TASTE, ["common", "own"]),
    (BY_OWN_ADAPTER, ["own", "own_assigned"]),
    (BY_METRIC, ["accuracy", "summed", "per_token"]),
    (WITHOUT, []),
]


@pytest.mark.parametrize(("runs", "kinds"), RUNS)
def test_accuracies_are_shown_by_taste_if_they_have_tastes_and_none_twice(runs, kinds):
    assert accuracy_kinds(runs) == kinds


@pytest.mark.parametrize(("runs", "kinds"), RUNS)
def test_the_overview_has_a_bar_for_each_accuracy_and_a_dot_for_each_seed(tmp_path, runs, kinds):
    figures = {"a method": dict(enumerate(runs)), "front": {0: {"rank": 1.0}}}
    figure = drawn_figure(lambda: plot_overview(figures, {}, {}, tmp_path / "overview.png"))
    accuracies = figure.axes[0]
    assert len(accuracies.patches) == len(kinds)
    dots = sum(len(points.get_offsets()) for points in accuracies.collections)
    assert dots == sum(len(set(kinds) & run.keys()) for run in runs)


@pytest.mark.slow
def test_the_overview_shows_win_rates_with_their_losses_and_seeds(tmp_path):
    contests = {"A against B": {0: contest([WIN, WIN]), 1: contest([WIN, LOSS])}}
    figure = drawn_figure(lambda: plot_overview({}, contests, pools(contests), tmp_path / "overview.png"))
    losses, seeds = figure.axes[1].collections[-2:]
    assert losses.get_offsets().tolist() == [[0.25, 0.0]]
    assert [point[0] for point in seeds.get_offsets().tolist()] == [1.0, 0.5]


def rewards(scale):
    """A curve of three rounds."""
    return [
        {"round": 0, "reward": 0.0},
        {"round": 2, "reward": 5.0 * scale},
        {"round": 4, "reward": 3.0 * scale},
    ]


def test_rewards_are_drawn_as_means_over_seeds_by_round_for_each_arm(tmp_path):
    curves = {"DRIFT": {0: rewards(0.2), 1: rewards(0.4)}, "FedAvg": {0: rewards(0.1)}}
    figure = drawn_figure(lambda: plot_rewards(curves, tmp_path / "rewards.png"))
    (panel,) = figure.axes
    lines = {line.get_label(): [float(value) for value in line.get_ydata()] for line in panel.get_lines()}
    assert lines == {"DRIFT": pytest.approx([0, 1.5, 0.9]), "FedAvg": pytest.approx([0, 0.5, 0.3])}
