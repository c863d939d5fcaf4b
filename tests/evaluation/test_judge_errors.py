"""Win rates that are corrected for the judge's errors."""

import math

import numpy as np
import pytest

from components.evaluation.contests import ties_half
from components.evaluation.intervals import Component, Estimate
from components.evaluation.judge_errors import correct_rate, is_better_than_chance, judge_counts
from tests.support.contests import LOSS, TIE, WIN, contest


def test_the_rate_and_its_interval_by_hand():
    """79 of 98 right: q is 80 / 100; a rate of 0.62 then comes from (0.62 - 0.2) / 0.6 = 0.7."""
    estimate = Estimate(0.62, (Component(0.0004, 1e9),), 0.0)
    rate, low, high = correct_rate(estimate, 79, 98)
    assert rate == pytest.approx(0.7)
    variance = 0.0004 / 0.36 + 0.24**2 / 0.6**4 * 0.8 * 0.2 / 100
    assert high - rate == pytest.approx(1.959964 * math.sqrt(variance), rel=1e-6)
    assert rate - low == pytest.approx(high - rate)


def test_a_judge_at_chance_corrects_nothing_and_one_without_an_error_is_taken_to_make_a_few():
    estimate = Estimate(0.9, (Component(0.001, 10.0),), 0.0)
    assert correct_rate(estimate, 49, 98) is None
    assert correct_rate(estimate, 10, 98) is None
    rate, low, high = correct_rate(estimate, 74, 98)  # 0.75: (0.9 - 0.25) / 0.5 is above 1
    assert (rate, high) == (1.0, 1.0)
    assert low < 1
    few, many = (correct_rate(Estimate(0.6, (Component(0.0, 2.0),), 0.0), n, n) for n in (8, 998))
    assert few[0] == pytest.approx((0.6 - 0.1) / 0.8)
    assert few[2] - few[1] > many[2] - many[1] > 0


def test_the_corrected_interval_covers_what_a_judge_without_errors_would_say():
    numbers = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        right = numbers.binomial(84, 0.85)
        better = numbers.random(300) < 0.65
        said = better == (numbers.random(300) < 0.85)
        estimate = Estimate(float(said.mean()), (Component(float(said.var()) / 300, 299),), 0.0)
        _, low, high = correct_rate(estimate, right, 84)
        covered += low <= 0.65 <= high
    assert covered / 400 > 0.92


def test_the_counts_of_judges_are_summed_over_seeds_that_have_them():
    judges = [
        {"judge_accuracy": 0.75, "judge_held_out_pairs": 8.0},
        {},
        {"judge_accuracy": 1.0, "judge_held_out_pairs": 4.0},
    ]
    assert judge_counts(judges) == (10.0, 12.0)
    assert judge_counts([]) == (0, 0)


def test_the_rate_with_a_tie_as_half_a_win_is_over_seeds_and_prompts():
    seeds = [contest([WIN, TIE, LOSS, WIN]), contest([WIN, WIN, LOSS, TIE]), contest([TIE, TIE, LOSS, WIN])]
    estimate = ties_half(seeds)
    assert estimate.value == pytest.approx((2.5 + 2.5 + 2.0) / 12)
    assert len(estimate.components) == 3
    repeated = ties_half([contest([WIN, LOSS, LOSS], ["a#0", "a#1", "b#0"])] * 2)
    assert repeated.value == pytest.approx(1 / 3)


def test_the_rate_of_a_single_seed_is_over_its_prompts_by_hand():
    """Labels 1, 1/2, 0, 1: deviations from 5/8 have the variance (9 + 1 + 25 + 9) / 64 / 3."""
    estimate = ties_half([contest([WIN, TIE, LOSS, WIN])])
    assert estimate.value == 5 / 8
    ((variance, freedom, _),) = estimate.components
    assert freedom == 3
    assert variance == pytest.approx(44 / 64 / 3 / 4 / (4 * 5 / 8 * 3 / 8))
    together = ties_half([contest([WIN, TIE, LOSS, WIN], ["a#0", "a#1", "b#0", "b#1"])])
    ((variance, freedom, _),) = (
        together.components
    )  # prompt a deviates by 2/8, prompt b by -2/8, of 4 answers
    assert freedom == 1
    assert variance == pytest.approx((2 * (1 / 8) ** 2) / 2 / (4 * 5 / 8 * 3 / 8))
    assert ties_half([contest([WIN])]) is None


def test_a_judge_is_better_than_chance_with_more_than_half_of_its_pairs():
    assert is_better_than_chance(3, 5)
    assert not is_better_than_chance(3, 6)
    assert not is_better_than_chance(0, 0)
