"""MGDA: hand-computed weights, the conditions of the optimum, and invalid problems."""

import logging
import sys

import numpy as np
import pytest

from components.learning.mgda import MAX_ENUMERATED_OBJECTIVES, MIN_BETA, solve, solve_with_cvxpy


def random_gram(seed, m, size=12):
    """The Gram matrix of random gradients of different lengths."""
    lengths = np.exp(np.random.default_rng(seed + 1).normal(size=(m, 1)))
    vectors = np.random.default_rng(seed).normal(size=(m, size)) * lengths
    return vectors @ vectors.T


@pytest.mark.parametrize(
    ("gram", "beta", "preference", "weights"),
    [
        ([[1, 0], [0, 4]], 0.0, None, [0.8, 0.2]),  # orthogonal: by the inverse squared lengths
        ([[1, 2], [2, 9]], 0.0, None, [1.0, 0.0]),  # the shorter one is itself the nearest point to 0
        ([[1, -1], [-1, 1]], 0.0, None, [0.5, 0.5]),  # opposite: they cancel
        ([[2, 2], [2, 2]], 0.0, None, [0.5, 0.5]),  # the same gradient twice
        ([[2, 2], [2, 2]], 0.0, [3, 1], [0.75, 0.25]),  # then the preference decides
        ([[1, 0], [0, 3]], 0.5, None, [2 / 3, 1 / 3]),  # Ghat = diag(1/4, 3/4), Q = diag(1/2, 1)
        ([[1, 0], [0, 3]], 0.5, [1, 2], [0.875 / 1.375, 0.5 / 1.375]),  # Q = diag(1/2, 3/4 + 1/8)
        (np.diag([1.0, 2.0, 4.0]), 0.0, None, [4 / 7, 2 / 7, 1 / 7]),
        ([[1, 1, 0], [1, 1, 0], [0, 0, 1]], 0.0, None, [0.25, 0.25, 0.5]),
        ([[2, 2], [2, 2]], 0.0, [1e8, 1e8], [0.5, 0.5]),  # only the ratios of preferences count then
        ([[5.0]], 0.3, None, [1.0]),
        (np.diag([1.0, 0.0, 1.0]), 0.0, None, [0, 1, 0]),
    ],
)
def test_weights_are_those_of_hand_computed_problems(gram, beta, preference, weights):
    assert np.allclose(solve(np.array(gram, dtype=float), beta, preference), weights, atol=1e-7)


@pytest.fixture(scope="module")
def cvxpy():
    """The library, whose import takes longer than its solutions."""
    return pytest.importorskip("cvxpy")


@pytest.mark.parametrize("m", [2, 3, 4, 6, 8])
def test_the_weights_without_a_solver_equal_those_of_cvxpy(cvxpy, m):
    generator = np.random.default_rng(m)
    for seed in range(6):
        preference = np.exp(generator.normal(size=m)) if seed % 2 else None
        gram = random_gram(100 * m + seed, m)
        for beta in (1e-3, 0.01, 0.5, 0.0):
            difference = solve(gram, beta, preference) - solve_with_cvxpy(gram, beta, preference)
            assert np.abs(difference).max() < 1e-6


@pytest.mark.parametrize("beta", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("m", [2, 3, 5, 9])
def test_weights_lie_on_the_simplex_and_meet_the_conditions_of_the_optimum_in_any_order_and_unit(m, beta):
    for seed in range(6):
        gram = random_gram(seed, m)
        preference = np.exp(np.random.default_rng(seed).normal(size=m))
        weights = solve(gram, beta, preference)
        assert weights.min() >= 0
        assert weights.sum() == pytest.approx(1)
        quadratic = gram / np.trace(gram) + np.diag(max(beta, MIN_BETA) / 2 / preference)
        slopes = quadratic @ weights
        assert slopes.min() >= weights @ slopes - 1e-7, "a larger share of an objective would lower the value"
        order = np.random.default_rng(seed).permutation(m)
        reordered = solve(gram[np.ix_(order, order)], beta, preference[order])
        assert np.allclose(reordered, weights[order], atol=1e-6)
        assert np.allclose(solve(gram * 1e-12, beta, preference), weights, atol=1e-6)
        assert np.allclose(solve(gram * 1e200, beta, preference), weights, atol=1e-6)


def test_with_a_large_beta_the_weights_are_those_of_the_preference_alone():
    weights = solve(random_gram(3, 3), 1e7, [1.0, 2.0, 5.0])
    assert np.allclose(weights, [0.125, 0.25, 0.625], atol=1e-5)


def test_regularized_weights_change_less_than_the_gradients():
    """FIRM lemma 1: with beta, the weights of two clients differ by at most a constant times the
    difference of their gradients. Without it they jump."""
    similar = [np.array([[1.0 + noise, 1e-3], [1.0, -1e-3]]) for noise in (1e-6, -1e-6)]
    free = [solve(vectors @ vectors.T, 0.0) for vectors in similar]
    regularized = [solve(vectors @ vectors.T, 0.1) for vectors in similar]
    assert np.abs(free[0] - free[1]).max() > 0.4
    assert np.abs(regularized[0] - regularized[1]).max() < 1e-4


@pytest.mark.parametrize(
    ("gram", "words"),
    [
        (np.zeros((3, 3)), "all 3 gradients are 0"),
        (np.full((3, 3), np.nan), "NaN or infinite"),
        (np.diag([1.0, np.inf, 1.0]), "NaN or infinite"),
    ],
)
def test_a_gram_matrix_without_information_gives_the_preference_and_a_warning(gram, words, caplog):
    with caplog.at_level(logging.WARNING):
        weights = solve(gram, 0.01, [1.0, 1.0, 2.0])
        by_cvxpy = solve_with_cvxpy(gram, 0.01)
    assert np.allclose(weights, [0.25, 0.25, 0.5])
    assert np.allclose(by_cvxpy, 1 / 3)
    assert words in caplog.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((np.ones((2, 3)), 0.1), "must be \\[M, M\\]"),
        ((np.zeros((0, 0)), 0.1), "must be \\[M, M\\]"),
        ((np.eye(2), -0.1), "beta is -0.1"),
        ((np.eye(2), float("nan")), "beta is nan"),
        ((np.eye(2), 0.1, [1.0]), "must be 2 numbers above 0"),
        ((np.eye(2), 0.1, [1.0, 0.0]), "must be 2 numbers above 0"),
        ((np.eye(2), 0.1, [1.0, float("nan")]), "must be 2 numbers above 0"),
    ],
)
def test_invalid_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        solve(*arguments)


@pytest.mark.parametrize("m", [1, 2, 3, MAX_ENUMERATED_OBJECTIVES])
def test_up_to_eight_objectives_need_no_solver(m, monkeypatch):
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    assert solve(random_gram(0, m), 0.01).sum() == pytest.approx(1)


def test_more_objectives_are_solved_by_cvxpy(cvxpy):
    gram = random_gram(0, MAX_ENUMERATED_OBJECTIVES + 1)
    assert np.array_equal(solve(gram, 0.01), solve_with_cvxpy(gram, 0.01))
