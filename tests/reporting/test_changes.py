"""Figures of a benchmark beside those of its last runs, and the choices of its file."""

import math

import pytest

from components.config.benchmark import Choice
from components.reporting.changes import changes_table, choices_table, choose_arms, find_changes

ACCURACY = {"accuracy": 0.02}


def night(value, arm="FedBis"):
    return {arm: {"after/accuracy/mean": value}}


def test_a_figure_is_compared_with_the_median_of_the_last_runs():
    (change,) = find_changes(night(0.75), [night(0.70), night(0.90), night(0.72)], ACCURACY)
    assert change.median == 0.72
    assert change.change == pytest.approx(0.03)
    assert change.verdict == "no regression"
    assert str(change) == "FedBis, pair accuracy: 0.750 instead of 0.720 (median of 3 earlier runs)"


@pytest.mark.parametrize(
    ("now", "is_regression"),
    [(0.699, True), (0.701, False), (0.9, False)],
    ids=["far below", "near", "above"],
)
def test_a_fall_by_more_than_the_tolerance_is_a_regression(now, is_regression):
    (change,) = find_changes(night(now), [night(0.72)], ACCURACY)
    assert change.is_regression == is_regression


def test_a_first_run_and_a_figure_that_was_not_measured_are_no_regressions_and_said_to_be_so():
    (first,) = find_changes(night(0.7), [], ACCURACY)
    (other_arms,) = find_changes(night(0.7), [night(0.9, arm="FedDPO")], ACCURACY)
    (missing,) = find_changes({"FedBis": {}}, [night(0.9)], ACCURACY)
    (no_number,) = find_changes(night(math.nan), [night(0.9)], ACCURACY)
    (after_both,) = find_changes(night(0.7), [night(math.nan), night(0.7)], ACCURACY)
    changes = (first, other_arms, missing, no_number, after_both)
    verdicts = ["first run", "first run", "not measured", "not measured", "no regression"]
    assert [change.verdict for change in changes] == verdicts
    assert not any(change.is_regression for change in changes)


def test_the_table_has_a_row_for_each_arm_and_figure():
    means = night(0.5) | night(0.7, arm="FedDPO")
    table = changes_table(find_changes(means, [night(0.6)], ACCURACY | {"worst": 0.1}))
    assert [row[:3] for row in table.rows] == [
        ["FedBis", "pair accuracy", "regression"],
        ["FedBis", "worst client", "not measured"],
        ["FedDPO", "pair accuracy", "first run"],
        ["FedDPO", "worst client", "not measured"],
    ]
    assert table.rows[0][3:] == ["0.500", "0.600", "-0.100", "1"]


# --- choices

CHOICES = {"FedPer": Choice(among=["slow", "fast"], figure="accuracy")}


def figures(slow, fast):
    """Accuracies of two arms by seed."""
    return {
        arm: {seed: {"after/accuracy/mean": value} for seed, value in enumerate(values)}
        for arm, values in (("slow", slow), ("fast", fast))
    }


@pytest.mark.parametrize(
    ("slow", "fast", "arm"),
    [
        ([0.5, 0.6], [0.4, 0.8], "fast"),
        ([0.5, 0.7], [0.4, 0.7], "slow"),
        ([0.5, 0.5], [0.25, 0.75], "slow"),
        ([0.5, 0.6], [0.9], ""),
        ([], [], ""),
    ],
)
def test_the_arm_with_the_largest_mean_over_all_seeds_is_chosen_and_of_equal_ones_the_first(slow, fast, arm):
    chosen = choose_arms(CHOICES, figures(slow, fast), [0, 1])
    assert chosen == {"FedPer": arm}
    (row,) = choices_table(CHOICES, chosen).rows
    assert row[:2] == ["FedPer", arm or "not measured"]
