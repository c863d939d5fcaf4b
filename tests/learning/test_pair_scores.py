"""Tables of preference scores: selection of models, the client's own model, and concatenation."""

import numpy as np
import pytest

from components.learning.pair_scores import PreferenceScores, concat, implicit_margins

POLICIES = PreferenceScores(
    margins=np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
    rewards=np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]),
    margins_by_metric={"summed": np.array([[10.0, 20.0, 30.0], [40.0, 50.0, 60.0]])},
)
SELECTORS = PreferenceScores(np.array([[1.0, 2.0], [3.0, 4.0]]))


def test_selected_models_are_in_the_requested_order_and_may_repeat():
    scores = POLICIES.select([1, 0, 1])
    assert scores.margins.tolist() == [[4, 5, 6], [1, 2, 3], [4, 5, 6]]
    assert scores.rewards.tolist() == [[0.4, 0.5, 0.6], [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]
    assert scores.margins_by_metric["summed"].tolist() == [[40, 50, 60], [10, 20, 30], [40, 50, 60]]


def test_scores_without_rewards_have_none_after_a_selection():
    assert SELECTORS.select([0]).rewards is None


def test_each_pair_has_the_scores_of_the_model_that_its_client_uses():
    columns, scores = POLICIES.with_assignment([1, -1, 0]).by_assigned()
    assert columns == [0, 2]
    assert scores.margins.tolist() == [[4, 3]]
    assert scores.rewards.tolist() == [[0.4, 0.3]]
    assert scores.margins_by_metric["summed"].tolist() == [[40, 30]]


def test_an_assignment_does_not_change_the_scores():
    scores = POLICIES.with_assignment([1, -1, 0])
    assert scores.margins is POLICIES.margins
    assert scores.assigned.tolist() == [1, -1, 0]
    assert POLICIES.assigned is None


def test_without_an_assignment_there_is_no_model_of_a_client():
    with pytest.raises(ValueError, match="no client is assigned a model"):
        POLICIES.by_assigned()


def split(scores, columns):
    """The scores of some of the pairs."""
    return columns, PreferenceScores(
        scores.margins[:, columns],
        None if scores.rewards is None else scores.rewards[:, columns],
        {name: margins[:, columns] for name, margins in scores.margins_by_metric.items()},
    )


def test_concatenated_scores_are_in_the_order_of_the_pairs():
    scores = concat([split(POLICIES, [2, 0]), split(POLICIES, [1])])
    assert np.array_equal(scores.margins, POLICIES.margins)
    assert np.array_equal(scores.rewards, POLICIES.rewards)
    assert np.array_equal(scores.margins_by_metric["summed"], POLICIES.margins_by_metric["summed"])


def test_concatenated_scores_of_selectors_have_no_rewards():
    scores = concat([split(SELECTORS, [1]), split(SELECTORS, [0])])
    assert np.array_equal(scores.margins, SELECTORS.margins)
    assert scores.rewards is None
    assert scores.margins_by_metric == {}


def test_implicit_margins_are_differences_of_log_ratios():
    assert implicit_margins(np.array([[-1.0, -3.0]]), np.array([[-2.0, -2.5]])).tolist() == [1.5]
