"""The length-controlled win rate finds what a judge would say at equal length, and says so where the data cannot tell."""

import math

import numpy as np
import pytest

from components.evaluation import length_control
from components.evaluation.length_control import control_length, length_controlled
from components.evaluation.winrate import Verdict
from components.seeding import generator

FIRST, SECOND, TIE, UNPARSABLE = Verdict


def logistic(z):
    return 1 / (1 + np.exp(-z))


def judged(theta, phi, n=2000, mean=200, soft=False, seed=0):
    """Labels of a judge whose taste is known, on responses that are `mean` characters longer on average."""
    numbers = generator(seed, "lengths")
    d = np.round(numbers.normal(mean, 150, n))
    p = logistic(theta + phi * np.tanh(d / d.std(ddof=1)))
    labels = p if soft else (numbers.random(n) < p).astype(float)
    return labels, (500 + d).astype(int), np.full(n, 500)


def test_a_judge_that_likes_length_gives_a_biased_win_rate_and_the_controlled_one_is_near_the_truth():
    truth = logistic(-0.4)
    found = length_controlled(*judged(-0.4, 2.0), 100)
    assert found.uncontrolled > truth + 0.2
    assert abs(found.rate - truth) < 0.05 and found.low < truth < found.high
    assert found.effect == pytest.approx(2.0, abs=0.4)


@pytest.mark.parametrize(("theta", "phi"), [(-0.4, 2.0), (0.5, 0.0)])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(theta, phi):
    found = [length_controlled(*judged(theta, phi, n=150, seed=seed), 100, seed) for seed in range(100)]
    assert 88 <= sum(one.low < logistic(theta) < one.high for one in found) <= 99
    assert np.mean([one.rate for one in found]) == pytest.approx(logistic(theta), abs=0.02)


def test_soft_labels_that_follow_the_model_are_fitted_exactly(monkeypatch):
    monkeypatch.setattr(length_control, "PENALTY", 0.0)
    labels, ours, theirs = judged(-0.4, 2.0, n=300, soft=True)
    found = length_controlled(labels, ours, theirs, 100)
    assert found.rate == pytest.approx(logistic(-0.4), abs=1e-9) and found.effect == pytest.approx(2.0, abs=1e-8)


def test_the_fit_is_the_minimum_that_a_general_optimiser_finds():
    from scipy.optimize import minimize

    labels, ours, theirs = judged(-1.0, 0.7, n=80)
    labels = np.clip(labels * 0.8 + 0.1, 0, 1)
    d = ours - theirs
    x = np.tanh(d / d.std(ddof=1))

    def loss(coefficients):
        z = coefficients[0] + coefficients[1] * x
        return np.sum(np.logaddexp(0, z) - labels * z) + 0.01 / 2 * coefficients[1] ** 2

    theta, phi = minimize(loss, [0, 0], tol=1e-10).x
    found = length_controlled(labels, ours, theirs, 100)
    assert found.rate == pytest.approx(logistic(theta), abs=1e-6) and found.effect == pytest.approx(phi, abs=1e-5)


def test_exchanging_the_responses_gives_the_rest_of_the_rate_and_the_same_effect():
    labels, ours, theirs = judged(-0.4, 1.0, n=100)
    one, other = length_controlled(labels, ours, theirs, 100), length_controlled(1 - labels, theirs, ours, 100)
    assert one.rate + other.rate == pytest.approx(1) and one.effect == pytest.approx(other.effect)


def test_the_interval_narrows_with_prompts_and_is_a_function_of_the_seed():
    few, many = (length_controlled(*judged(-0.4, 1.0, n=n), 300) for n in (50, 2000))
    assert few.high - few.low > 4 * (many.high - many.low) and many.low < many.rate < many.high
    data = judged(-0.4, 1.0, n=50)
    assert length_controlled(*data, 200, 1) == length_controlled(*data, 200, 1)
    assert length_controlled(*data, 200, 1).low != length_controlled(*data, 200, 2).low


def test_the_interval_is_that_of_estimates_on_resampled_prompts():
    labels, ours, theirs = judged(-0.4, 1.0, n=120)
    numbers, rates = np.random.default_rng(5), []
    for _ in range(200):
        i = numbers.integers(0, 120, 120)
        rates.append(length_controlled(labels[i], ours[i], theirs[i], 1).rate)
    found = length_controlled(labels, ours, theirs, 2000)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(rates, [0.025, 0.975])), abs=0.03)


def test_resamples_fitted_in_parts_are_those_fitted_at_once(monkeypatch):
    data = judged(-0.4, 1.0, n=60)
    whole = length_controlled(*data, 150)
    monkeypatch.setattr(length_control, "CELLS", 60 * 7)
    parts = length_controlled(*data, 150)
    assert (parts.low, parts.high) == pytest.approx((whole.low, whole.high), abs=1e-9)


@pytest.mark.parametrize("label", [0.0, 0.5, 1.0])
def test_where_all_labels_are_the_same_the_rate_is_that_label(label):
    found = length_controlled([label] * 9, range(9), [3] * 9, 100)
    assert (found.rate, found.low, found.high, found.effect) == (label, label, label, 0)


def test_where_all_pairs_are_equally_long_the_rate_is_the_mean_label():
    found = length_controlled([1, 0, 0.5, 1], [7, 8, 9, 10], [7, 8, 9, 10], 500)
    assert found.rate == found.uncontrolled == 0.625 and found.effect == 0 and found.low < 0.625 < found.high


def test_where_all_pairs_differ_by_the_same_length_nothing_is_claimed():
    found = length_controlled([1, 0, 1], [10, 20, 30], [5, 15, 25], 100)
    assert math.isnan(found.rate) and math.isnan(found.low) and math.isnan(found.effect) and found.uncontrolled == pytest.approx(2 / 3)


def test_one_prompt_tells_something_only_where_its_responses_are_equally_long():
    assert length_controlled([1.0], [5], [5], 100).rate == 1.0
    assert math.isnan(length_controlled([1.0], [6], [5], 100).rate)
    assert math.isnan(length_controlled([], [], [], 100).rate)


def test_where_the_longer_response_always_wins_the_effect_stays_finite_and_nobody_is_better():
    found = length_controlled([1, 1, 1, 0, 0, 0], [9, 8, 7, 1, 2, 3], [5] * 6, 200)
    assert found.rate == pytest.approx(0.5) and 1 < found.effect < 100
    assert 0 <= found.low <= found.rate <= found.high <= 1


def test_one_win_in_a_thousand_does_not_unsettle_the_fit():
    _, ours, theirs = judged(0, 0, n=1000)
    found = length_controlled(np.arange(1000) == 500, ours, theirs, 200)
    assert 0 < found.rate < 0.02 and found.low == 0


def test_probabilities_a_hair_from_nought_and_one_do_not_unsettle_the_fit():
    """A judge that weighs its tokens says 1e-11 as easily as 0.3."""
    labels = np.array([1e-11, 3e-13, 2e-8, 1 - 1e-10, 1 - 1e-12, 7e-11])
    found = length_controlled(labels, [9, 1, 4, 30, 8, 2], [5] * 6, 300)
    assert 0 <= found.low <= found.rate <= found.high <= 1
    assert length_controlled(labels[[0, 1, 2, 5]], [9, 1, 4, 2], [5] * 4, 300).rate < 1e-7


def test_columns_of_unequal_length_and_labels_outside_their_range_are_refused():
    with pytest.raises(ValueError, match="2 labels, 1 lengths of ours and 2 of theirs"):
        length_controlled([1, 0], [1], [1, 2])
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        length_controlled([1, 2], [1, 3], [1, 2])
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        length_controlled([1, float("nan")], [1, 3], [1, 2])


def test_verdicts_become_labels_and_what_is_unparsable_is_left_out():
    verdicts, ours, theirs = [FIRST, SECOND, TIE, UNPARSABLE, FIRST], ["aaaa", "b", "cc", "d" * 99, "e"], ["x", "xx", "xxx", "x", "xxx"]
    found = control_length(verdicts, ours, theirs, 100, 3)
    assert found == length_controlled([1, 0, 0.5, 1], [4, 1, 2, 1], [1, 2, 3, 3], 100, 3)
    assert math.isnan(control_length([UNPARSABLE], ["a"], ["b"], 100).rate)


def test_lengths_are_counted_in_characters_as_the_texts_stand():
    found = control_length([FIRST, SECOND, FIRST], [" ä ", "b", "ccc"], ["aa", "b", "c\n"], 100)
    assert found == length_controlled([1, 0, 1], [3, 1, 3], [2, 1, 2], 100)
