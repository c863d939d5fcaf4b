"""Accuracy per client: each client counts once, an ensemble votes, and a client may use the one adapter that is its own."""

import numpy as np

from components.evaluation.accuracy import assigned_accuracy, client_accuracy

PAIRS = [{"client_id": c, "domain": d} for c, d in [("ada", "common"), ("ada", "own"), ("ada", "own"), ("ada", "own"), ("bea", "common")]]


def margins(*right: set[int]) -> np.ndarray:
    """One row a model, above 0 on the pairs that it gets right."""
    return np.array([[1.0 if n in rows else -2.0 for n in range(len(PAIRS))] for rows in right])


def test_each_client_counts_once_in_the_mean_and_each_pair_in_its_domain():
    measured = client_accuracy(margins({0, 4}), PAIRS)
    assert measured["clients"] == {"ada": 0.25, "bea": 1.0} and measured["mean"] == 0.625
    assert (measured["worst"], measured["best"], measured["pairs"]) == (0.25, 1.0, 5)
    assert measured["domains"] == {"common": 1.0, "own": 0.0}


def test_an_ensemble_is_right_where_most_of_its_models_are_however_sure_the_others_are():
    measured = client_accuracy(margins({0, 1}, {1, 2}, {2, 1, 4}), PAIRS)
    assert measured["clients"] == {"ada": 0.5, "bea": 0.0}


def test_a_pair_that_is_scored_the_same_or_on_which_votes_tie_counts_half():
    assert client_accuracy(np.zeros((1, 5)), PAIRS)["mean"] == 0.5
    assert client_accuracy(margins({0, 1, 2, 3, 4}, set()), PAIRS)["clients"] == {"ada": 0.5, "bea": 0.5}


def test_with_assigned_adapters_each_client_is_judged_by_its_own_alone():
    table = margins({0, 1, 2, 3}, {4}, set())
    measured = assigned_accuracy(table, ["a", "b", "c"], {"ada": "a", "bea": "b"}, PAIRS)
    assert measured["clients"] == {"ada": 1.0, "bea": 1.0} and client_accuracy(table, PAIRS)["mean"] == 0.0
    assert assigned_accuracy(table, ["a", "b", "c"], {"ada": "b", "bea": "a"}, PAIRS)["mean"] == 0.0


def test_clients_without_an_assigned_adapter_are_left_out():
    measured = assigned_accuracy(margins({0, 1}, {4}), ["a", "b"], {"ada": "a"}, PAIRS)
    assert measured["clients"] == {"ada": 0.5} and measured["pairs"] == 4


def test_rewards_are_the_clients_means_and_only_there_where_they_are_given():
    rewards = np.array([[1.0, 2.0, 3.0, 6.0, -1.0], [3.0, 2.0, 3.0, 6.0, -3.0]])
    measured = client_accuracy(margins({0}, {1}), PAIRS, rewards)
    assert measured["rewards"] == {"ada": 3.25, "bea": -2.0} and measured["reward"] == 0.625
    assert measured["margins"] == {"ada": -1.25, "bea": -2.0} and measured["margin"] == -1.625
    own = assigned_accuracy(margins({0}, {1}), ["a", "b"], {"ada": "b", "bea": "a"}, PAIRS, rewards)
    assert own["rewards"] == {"ada": 3.5, "bea": -1.0}
    assert not {"reward", "rewards"} & client_accuracy(margins({0}), PAIRS).keys()
