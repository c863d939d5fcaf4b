"""Dominated points and hypervolumes: hand-computed examples and random sampling."""

import numpy as np
import pytest

from components.evaluation.pareto import dominated, hypervolume


def test_dominated_points_are_those_of_a_hand_computed_example_and_never_a_single_one():
    points = np.array([[1.0, 3.0], [2.0, 2.0], [1.5, 2.0], [3.0, 0.0], [2.0, 2.0], [3.0, -1.0]])
    assert dominated(points).tolist() == [False, False, True, False, False, True]
    assert dominated(np.array([[1.0, 3.0]])).tolist() == [False]


STAIRCASE = [[1.0, 3.0], [2.0, 2.0], [3.0, 1.0]]


@pytest.mark.parametrize(
    ("points", "reference", "volume"),
    [
        ([[2.0, 3.0]], [0.0, 0.0], 6.0),
        ([[2.0, 3.0]], [1.0, 1.0], 2.0),
        ([[2.0, 3.0]], [2.0, 0.0], 0.0),
        ([[2.0, -3.0]], [0.0, 0.0], 0.0),
        (STAIRCASE, [0.0, 0.0], 6.0),
        ([*STAIRCASE, [1.0, 1.0], [2.0, 2.0]], [0.0, 0.0], 6.0),
        ([[1.0, 1.0, 1.0], [2.0, 0.5, 0.5]], [0.0, 0.0, 0.0], 1.0 + 0.25),
        ([[4.0], [7.0]], [2.0], 5.0),
        ([[2.0, 2.0, 1.0], [1.0, 1.0, 3.0]], [0.0] * 3, 4.0 + 2.0),
    ],
)
def test_hypervolumes_are_those_of_hand_computed_examples_in_any_order_of_the_points(
    points, reference, volume
):
    assert hypervolume(np.array(points), np.array(reference)) == pytest.approx(volume)
    assert hypervolume(np.array(points)[::-1], np.array(reference)) == pytest.approx(volume)


@pytest.mark.parametrize("objectives", [2, 3, 4])
def test_the_hypervolume_is_the_share_of_random_samples_that_are_dominated(objectives):
    numbers = np.random.default_rng(objectives)
    points = numbers.uniform(size=(7, objectives))
    samples = numbers.uniform(size=(40_000, objectives))
    share = (points[None] >= samples[:, None]).all(2).any(1).mean()
    assert hypervolume(points, np.zeros(objectives)) == pytest.approx(share, abs=0.015)


@pytest.mark.parametrize("objectives", [2, 3, 4])
def test_dominated_points_add_no_hypervolume_and_a_further_point_removes_none(objectives):
    numbers = np.random.default_rng(objectives)
    points = numbers.uniform(size=(7, objectives))
    reference = np.zeros(objectives)
    volume = hypervolume(points, reference)
    assert hypervolume(points[~dominated(points)], reference) == pytest.approx(volume)
    assert hypervolume(np.vstack([points, numbers.uniform(size=objectives)]), reference) >= volume


@pytest.mark.parametrize(
    ("points", "reference"),
    [
        (np.zeros((2, 2)), np.zeros(3)),
        (np.zeros(3), np.zeros(3)),
        (np.full((1, 2), np.nan), np.zeros(2)),
        (np.zeros((1, 2)), np.array([0.0, np.inf])),
    ],
)
def test_shapes_that_do_not_match_and_values_that_are_not_finite_are_refused(points, reference):
    with pytest.raises(ValueError, match="must be"):
        hypervolume(points, reference)
