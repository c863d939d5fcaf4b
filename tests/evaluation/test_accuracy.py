"""Accuracy on held-out pairs: per client, of ensembles, and of assigned adapters."""

import numpy as np
import pytest

from components.data.records import Pair
from components.evaluation.accuracy import accuracy_report
from components.learning.pair_scores import PreferenceScores, pair_figures

PAIRS = [
    Pair("", "", "", "ada", "common"),
    Pair("", "", "", "ada", "own"),
    Pair("", "", "", "ada", "own"),
    Pair("", "", "", "ada", "own"),
    Pair("", "", "", "bea", "common"),
]


def margins(*right: set[int]) -> np.ndarray:
    """A row for each model: above 0 on the pairs that it gets right."""
    return np.array([[1.0 if n in rows else -2.0 for n in range(len(PAIRS))] for rows in right])


def measure(scores: PreferenceScores, assigned: dict[str, int] | None = None):
    """The report of the figures that each client computes on its own pairs."""
    figures = {}
    for client in ("bea", "ada"):
        rows = [n for n, pair in enumerate(PAIRS) if pair.client_id == client]
        own = PreferenceScores(
            scores.margins[:, rows],
            None if scores.rewards is None else scores.rewards[:, rows],
            {name: values[:, rows] for name, values in scores.margins_by_metric.items()},
            None if scores.swapped is None else scores.swapped[:, rows],
        )
        figures[client] = pair_figures(own, [PAIRS[n] for n in rows], (assigned or {}).get(client))
    return accuracy_report(figures)


def report(*right: set[int], assigned: dict[str, int] | None = None, **scores):
    """The report of models that get pairs right, and of the models that clients are assigned."""
    return measure(PreferenceScores(margins(*right), **scores), assigned)


def test_each_client_counts_once_in_the_mean_and_each_pair_in_its_domain():
    measured = report({0, 4})
    assert measured.clients == {"ada": 0.25, "bea": 1.0}
    assert measured.mean == 0.625
    assert measured.worst == 0.25
    assert measured.best == 1.0
    assert measured.pairs == 5
    assert measured.domains == {"common": 1.0, "own": 0.0}


def test_an_ensemble_is_right_where_most_of_its_models_are_whatever_the_size_of_the_margins():
    assert report({0, 1}, {1, 2}, {2, 1, 4}).clients == {"ada": 0.5, "bea": 0.0}


def test_models_that_always_choose_one_position_are_right_on_half_of_the_pairs():
    always_first = np.full((3, 5), 2.0)
    measured = measure(PreferenceScores(always_first, swapped=-always_first))
    assert measured.mean == measured.worst == measured.best == 0.5
    assert measured.domains == {"common": 0.5, "own": 0.5}
    assert measured.margin == 0.0


def test_each_order_of_a_pair_counts_half_also_of_the_models_assigned_to_clients():
    scores = PreferenceScores(margins({0, 4}), swapped=margins({0, 1}))
    measured = measure(scores)
    assert measured.clients == {"ada": (1 + 0.5) / 4, "bea": 0.5}
    scores = PreferenceScores(margins({0, 1, 2, 3}, {4}), swapped=margins({0, 1}, set()))
    assert measure(scores, {"ada": 0, "bea": 1}).assigned.clients == {"ada": 0.75, "bea": 0.5}


def test_a_pair_with_a_margin_of_zero_or_with_votes_that_tie_counts_half():
    assert measure(PreferenceScores(np.zeros((1, 5)))).mean == 0.5
    assert report({0, 1, 2, 3, 4}, set()).clients == {"ada": 0.5, "bea": 0.5}


def test_without_assigned_adapters_there_is_no_report_of_them():
    assert report({0}).assigned is None


@pytest.mark.parametrize(("ada", "bea", "accuracy"), [(0, 1, 1.0), (1, 0, 0.0)])
def test_a_client_with_an_assigned_adapter_is_measured_by_it_alone(ada, bea, accuracy):
    measured = report({0, 1, 2, 3}, {4}, set(), assigned={"ada": ada, "bea": bea})
    assert measured.assigned.clients == {"ada": accuracy, "bea": accuracy}
    assert measured.mean == 0.0


def test_clients_without_an_assigned_adapter_are_left_out_of_the_report_of_assigned_ones():
    measured = report({0, 1}, {4}, assigned={"ada": 0})
    assert measured.assigned.clients == {"ada": 0.5}
    assert measured.assigned.pairs == 4
    assert measured.pairs == 5


REWARDS = np.array([[1.0, 2.0, 3.0, 6.0, -1.0], [3.0, 2.0, 3.0, 6.0, -3.0]])


def test_rewards_and_margins_are_means_over_models_and_pairs_by_client_and_then_over_clients():
    measured = report({0}, {1}, rewards=REWARDS)
    assert measured.rewards == {"ada": 3.25, "bea": -2.0}
    assert measured.reward == 0.625
    measured = report({0}, {1})
    assert measured.margins == {"ada": -1.25, "bea": -2.0}
    assert measured.margin == -1.625
    measured = report({0}, {1}, assigned={"ada": 1, "bea": 0}, rewards=REWARDS)
    assert measured.assigned.rewards == {"ada": 3.5, "bea": -1.0}
    measured = report({0})
    assert measured.reward is None
    assert measured.rewards is None


def test_other_margins_have_their_own_accuracy():
    measured = report({0}, margins_by_metric={"summed": margins({0, 1, 2, 3, 4})})
    assert measured.by_metric["summed"].mean == 1.0
    assert measured.by_metric["summed"].clients == {"ada": 1.0, "bea": 1.0}
