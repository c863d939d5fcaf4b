"""Choices of a benchmark: of arms that differ in a setting, the one with the best mean."""

import pytest

from components.config.benchmark import Choice
from components.reporting.choices import choices_table, choose_arms
from components.reporting.units import CLIENTS, Units

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
    ],
)
def test_the_arm_with_the_largest_mean_is_chosen_and_of_equal_ones_the_first(slow, fast, arm):
    (chosen,) = choose_arms(CHOICES, figures(slow, fast), {}, [0, 1])
    assert chosen.arm == arm
    assert chosen.means == {"slow": pytest.approx(sum(slow) / 2), "fast": pytest.approx(sum(fast) / 2)}


def test_nothing_is_chosen_before_every_arm_is_measured_with_every_seed():
    (chosen,) = choose_arms(CHOICES, figures([0.5, 0.6], [0.9]), {}, [0, 1])
    assert chosen.arm == ""
    assert chosen.means == {"slow": pytest.approx(0.55)}


def test_the_table_names_the_chosen_arm_and_all_means():
    chosen = choose_arms(CHOICES, figures([0.5, 0.6], [0.4, 0.8]), {}, [0, 1])
    (row,) = choices_table(chosen).rows
    assert row[:2] == ["FedPer", "fast"]
    assert row[3] == "slow: 0.550; fast: 0.600"


def test_a_choice_that_is_not_measured_is_shown_as_such():
    (row,) = choices_table(choose_arms(CHOICES, {}, {}, [0])).rows
    assert row[1] == "not measured"


def test_beside_a_mean_over_clients_are_the_worst_client_and_the_spread():
    clients = [{"ada": 0.4, "bea": 0.6}, {"ada": 0.2, "bea": 1.0}]
    units = {
        "slow": {seed: {"after/accuracy/mean": Units(CLIENTS, {"": own})} for seed, own in enumerate(clients)}
    }
    chosen = choose_arms(CHOICES, figures([0.5, 0.6], [0.4, 0.8]), units, [0, 1])
    (row,) = choices_table(chosen).rows
    assert row[3] == "slow: 0.550 (0.300; 0.250); fast: 0.600"
