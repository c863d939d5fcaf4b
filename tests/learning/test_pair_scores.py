"""Tables of preference scores, and the figures of a client's pairs."""

import numpy as np

from components.learning.pair_scores import PreferenceScores

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
