"""Noise from secrets, correlated noise, and contributions on a grid."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2, kstest

from components.privacy.clipping import clip_to_grid, grid_bits, grid_width
from components.privacy.factors import (
    coefficients,
    correlated,
    participations,
    sensitivity,
)
from components.privacy.ledger import solve_sigma
from components.privacy.noise import Stream, _table, discrete_gaussian, gaussian

SECRET = bytes(range(32))


def stream(*purpose):
    return Stream(SECRET, "test", *purpose)


# --- noise


def test_a_stream_is_a_function_of_its_secret_and_its_purpose():
    first = stream("a").words(1000)
    assert np.array_equal(stream("a").words(1000), first)
    one = stream("a")
    assert np.array_equal(np.concatenate([one.words(400), one.words(600)]), first)
    for other in (stream("b"), Stream(bytes(32), "test", "a"), stream("a", "")):
        assert not np.isin(other.words(1000), first).any()


def test_discrete_noise_has_the_probabilities_of_the_discrete_gaussian():
    deviation, count = 1.3, 200_000
    drawn = discrete_gaussian(stream("chi"), count, deviation)
    values = np.arange(-6, 7)
    shares = np.exp(-(values**2) / (2 * deviation**2))
    expected = count * shares / np.exp(-(np.arange(-60, 61) ** 2) / (2 * deviation**2)).sum()
    seen = np.array([(drawn == value).sum() for value in values])
    statistic = ((seen - expected) ** 2 / expected).sum()
    assert statistic < chi2.ppf(1 - 1e-4, len(values) - 1)
    assert chi2.cdf(statistic, len(values) - 1) > 1e-4


def test_the_table_of_discrete_noise_is_exact_and_symmetric():
    upper, lower = _table(2.0)
    weights = [math.exp(-(k**2) / 8) for k in range(-24, 25)]
    cumulative = np.cumsum(weights) / sum(weights)
    np.testing.assert_allclose(upper / 2.0**64, cumulative, rtol=1e-12, atol=1e-19)
    whole = [(int(a) << 64) + int(b) for a, b in zip(upper, lower, strict=True)]
    middle = len(whole) // 2
    assert abs(whole[middle] + whole[middle - 1] - (1 << 128)) <= 2, "P(X <= 0) + P(X < 0) = 1"


def test_words_that_equal_an_entry_of_the_table_are_decided_by_further_words():
    upper, lower = _table(2.0)

    class Chosen:
        def __init__(self, *words):
            self._words = iter(words)

        def words(self, count):
            return np.array([next(self._words)] * count, dtype=np.uint64)

    place = 20
    below, above = int(lower[place]) - 1, int(lower[place])
    (first,) = discrete_gaussian(Chosen(upper[place], below), 1, 2.0)
    (second,) = discrete_gaussian(Chosen(upper[place], above), 1, 2.0)
    assert (first, second) == (place - 24, place - 23)
    (last,) = discrete_gaussian(Chosen(2**64 - 1, 2**64 - 1), 1, 2.0)
    assert last == 24


def test_wide_discrete_noise_and_gaussian_noise_are_normal():
    wide = discrete_gaussian(stream("wide"), 100_000, 32_768.0) / 32_768
    continuous = gaussian(stream("continuous"), 100_001, 3.0) / 3
    for drawn in (wide, continuous):
        assert kstest(drawn, "norm").pvalue > 1e-4
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.015
    with pytest.raises(ValueError, match="from 1 to"):
        discrete_gaussian(stream("narrow"), 1, 0.5)


# --- correlated noise


def test_coefficients_and_sensitivities_are_those_computed_by_hand():
    assert coefficients(4) == [1.0, 0.5, 0.375, 0.3125]
    assert [participations(8, 2), participations(9, 2), participations(3, 5)] == [4, 5, 1]
    found = [sensitivity(2, 4), sensitivity(2, 8), sensitivity(3, 9)]
    assert found == pytest.approx([1.5811, 2.2361, 2.0425], abs=1e-4)


@pytest.mark.parametrize(("bands", "rounds"), [(1, 3), (2, 4), (2, 5), (3, 7)])
def test_the_sensitivity_is_the_largest_over_all_patterns_and_signs(bands, rounds):
    """A client takes part in rounds that are at least `bands` apart, and moves each sum by -1, 0 or 1."""
    c = coefficients(bands)
    matrix = np.array(
        [[c[t - s] if 0 <= t - s < bands else 0.0 for s in range(rounds)] for t in range(rounds)]
    )
    largest = 0.0
    for pattern in itertools.product([-1, 0, 1], repeat=rounds):
        took_part = np.flatnonzero(pattern)
        if all(np.diff(took_part) >= bands):
            largest = max(largest, float(np.linalg.norm(matrix @ np.array(pattern, dtype=float))))
    assert sensitivity(bands, rounds) == pytest.approx(largest)


def test_correlated_noise_solves_its_equation():
    impulse = [np.array([value]) for value in (1.0, 0.0, 0.0, 0.0)]
    earlier = []
    for fresh in impulse:
        earlier.insert(0, correlated(fresh, earlier, 2))
    assert [float(z[0]) for z in earlier[::-1]] == [1.0, -0.5, 0.25, -0.125]


def noise_after(bands, rounds):
    """Standard deviation of z_1 + ... + z_t for t = 1 to `rounds`, with w_t of standard deviation 1."""
    earlier = []
    for t in range(rounds):
        earlier.insert(0, correlated(np.array([float(t == 0)]), earlier[: bands - 1], bands))
    inverse = np.concatenate(earlier[::-1])  # first column of C^-1
    return np.sqrt(np.cumsum(np.cumsum(inverse) ** 2))


# Clients, clients of a round, rounds, delta, epsilon, and the root mean square of the sums' noise.
@pytest.mark.parametrize(
    ("clients", "cohort", "rounds", "delta", "epsilon", "expected"),
    [(12, 6, 8, 0.05, 8, 1.23), (12, 6, 8, 0.05, 2, 2.99), (100, 10, 100, 1e-3, 8, 4.61)],
)
def test_the_noise_of_sums_over_the_rounds(clients, cohort, rounds, delta, epsilon, expected):
    bands = clients // cohort
    deviation = solve_sigma(epsilon, delta) * sensitivity(bands, rounds)
    after = deviation * noise_after(bands, rounds)
    assert math.sqrt(np.mean(after**2)) == pytest.approx(expected, abs=0.01)


# --- contributions


def test_no_contribution_is_longer_than_the_bound():
    generator = torch.Generator().manual_seed(0)
    bound = 0.05
    for trial in range(2000):
        values = int(torch.randint(1, 200, (), generator=generator))
        scale = 10 ** float(torch.empty(()).uniform_(-6, 6, generator=generator))
        parts = {
            "a": scale * torch.randn(values, generator=generator),
            "b": scale * torch.randn(3, generator=generator),
        }
        cells = clip_to_grid(parts, bound)
        width = grid_width(bound, values + 3)
        sent = math.sqrt(sum(float((cell.double() * width).square().sum()) for cell in cells.values()))
        assert sent <= bound, trial
        if float(torch.cat([*parts.values()]).double().norm()) > 2 * bound:
            assert sent > 0.95 * bound
        assert all(torch.equal(cell, cell.round()) for cell in cells.values())


def test_small_movements_are_rounded_and_not_clipped():
    movement = {"a": torch.tensor([0.01, -0.02])}
    cells = clip_to_grid(movement, 1.0)
    width = grid_width(1.0, 2)
    assert (cells["a"] * width - movement["a"]).abs().max() <= width / 2


def test_values_that_are_not_finite_are_removed_and_huge_ones_are_clipped():
    movement = {"a": torch.tensor([math.nan, math.inf, -math.inf, 3e38]), "b": torch.tensor([-3e38])}
    cells = clip_to_grid(movement, 1.0)
    assert cells["a"][:3].tolist() == [0, 0, 0]
    assert cells["a"][3] == -cells["b"][0] > 0
    assert not clip_to_grid({"a": torch.zeros(3)}, 1.0)["a"].any()


def test_the_grid_follows_the_number_of_values():
    assert [grid_bits(1), grid_bits(540_000), grid_bits(13_600_000)] == [5, 15, 17]
    for values in (1, 100, 540_000):
        assert grid_width(0.1, values) * math.sqrt(values) / 2 <= 0.02 * 0.1
