"""Fronts of preferences: hypervolume, rank correlation, and their charts."""

import pytest

from components.evaluation.diagnostics.diagnostic import FrontPoint
from components.reporting.benchmark_page import front_charts
from components.reporting.benchmark_results import front_metrics, worst_rewards

POINTS = {
    "a": {"x": 3.0, "y": 1.0},
    "b": {"x": 2.0, "y": 2.0},
    "c": {"x": 1.0, "y": 3.0},
}
PREFERENCES = {
    "a": {"x": 9.0, "y": 1.0},
    "b": {"x": 2.0, "y": 2.0},
    "c": {"x": 1.0, "y": 4.0},
}
ORIGIN = {"x": 0.0, "y": 0.0}


def front_of(points, preferences=PREFERENCES, base=ORIGIN):
    return {arm: FrontPoint(scores, dict(base), preferences[arm]) for arm, scores in points.items()}


def figures(points, preferences=PREFERENCES):
    objectives = next(iter(points.values()))
    return front_metrics(front_of(points, preferences), dict.fromkeys(objectives, 0.0))


def test_a_fronts_figures_are_its_volume_and_its_smallest_rank_correlation_if_there_is_one():
    assert figures(POINTS) == {"front/hypervolume": pytest.approx(6.0), "front/rank": pytest.approx(1.0)}
    assert figures(POINTS | {"c": {"x": 2.5, "y": 3.0}})["front/rank"] == pytest.approx(0.5)
    assert figures(POINTS, {arm: {"x": 1.0, "y": 1.0} for arm in POINTS}).keys() == {"front/hypervolume"}


def test_an_objective_with_equal_shares_has_no_part_in_the_rank_correlation():
    points = {arm: scores | {"z": 1.0 + scores["x"]} for arm, scores in POINTS.items()}
    shares = {
        "a": 0.9,
        "b": 0.5,
        "c": 0.1,
    }
    preferences = {
        arm: {
            "x": share,
            "y": 1 - share,
            "z": 1.0,
        }
        for arm, share in shares.items()
    }
    assert figures(points, preferences)["front/rank"] == pytest.approx(1.0)


def test_an_objective_whose_reward_is_the_same_in_all_arms_has_a_correlation_of_zero():
    constant = {arm: scores | {"y": 1.0} for arm, scores in POINTS.items()}
    assert figures(constant)["front/rank"] == 0


def test_shares_that_differ_by_a_rounding_error_are_equal():
    points = {arm: scores | {"z": 1.0 + scores["x"]} for arm, scores in POINTS.items()}
    preferences = {
        "a": {
            "x": 0.6,
            "y": 0.3,
            "z": 0.1,
        },
        "b": {
            "x": 0.45,
            "y": 0.45,
            "z": 0.1,
        },
        "c": {
            "x": 0.3,
            "y": 0.6,
            "z": 0.1,
        },
    }
    assert len({sum(shares.values()) for shares in preferences.values()}) > 1
    assert figures(points, preferences)["front/rank"] == pytest.approx(1.0)


def test_the_worst_rewards_are_over_all_policies_of_all_fronts_and_the_base_policy():
    fronts = {
        "one": front_of({"a": POINTS["a"]}, base={"x": 5.0, "y": 0.5}),
        "two": front_of({"b": POINTS["b"]}, base={"x": 5.0, "y": 7.0}),
    }
    assert worst_rewards(fronts) == {"x": 2.0, "y": 0.5}


@pytest.fixture(scope="module")
def charts():
    """A front with two seeds, and one with the second seed only; one point is dominated."""
    front = front_of(POINTS | {"c": {"x": 1.0, "y": 1.0}})
    return front_charts({"FIRM": {0: front, 1: front}, "FedCMOO-A": {1: front}})


def test_fronts_have_a_chart_per_seed_with_names_apart_and_no_line_to_dominated_points(charts):
    assert [chart.layout.title.text for chart in charts] == ["Fronts, seed 0", "Fronts, seed 1"]
    assert [[trace.name for trace in chart.data if trace.name] for chart in charts] == [
        ["FIRM", "base policy"],
        ["FIRM", "FedCMOO-A", "base policy"],
    ]
    assert [len(trace.x) for trace in charts[1].data if trace.mode == "lines"] == [2, 2]
    places = [trace.textposition for trace in charts[1].data if trace.mode == "markers+text"]
    assert places == ["top right", "bottom left"]
