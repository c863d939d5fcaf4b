"""The length-controlled win rate: the fit, its interval, and data that do not determine it."""

import math

import numpy as np
import pytest

from components.evaluation import length_control
from components.evaluation.length_control import estimate_equal_length, fit_length_controlled_rate
from components.seeding import generator


def logistic(z):
    return 1 / (1 + np.exp(-z))


def simulated(theta, phi, n=2000, soft=False, seed=0):
    """Labels and lengths that follow the model; response 1 is 200 characters longer on average."""
    numbers = generator(seed, "lengths")
    d = np.round(numbers.normal(200, 150, n))
    p = logistic(theta + phi * np.tanh(d / d.std(ddof=1)))
    labels = p if soft else (numbers.random(n) < p).astype(float)
    return labels, (500 + d).astype(int), np.full(n, 500)


# --- the fit


def test_the_fit_recovers_the_rate_of_a_judge_that_prefers_long_responses():
    truth = logistic(-0.4)
    estimate = fit_length_controlled_rate(*simulated(-0.4, 2.0), 100)
    assert estimate.uncontrolled > truth + 0.2
    assert abs(estimate.rate - truth) < 0.05
    assert estimate.low < truth < estimate.high
    assert estimate.effect == pytest.approx(2.0, abs=0.4)


def test_soft_labels_of_the_model_itself_are_fitted_exactly(monkeypatch):
    monkeypatch.setattr(length_control, "PENALTY", 0.0)
    estimate = fit_length_controlled_rate(*simulated(-0.4, 2.0, n=300, soft=True), 100)
    assert estimate.rate == pytest.approx(logistic(-0.4), abs=1e-9)
    assert estimate.effect == pytest.approx(2.0, abs=1e-8)


def test_the_fit_is_the_minimum_of_the_penalized_loss_that_a_general_optimizer_reaches():
    from scipy.optimize import minimize

    labels, first, second = simulated(-1.0, 0.7, n=80)
    labels = np.clip(labels * 0.8 + 0.1, 0, 1)
    d = first - second
    x = np.tanh(d / d.std(ddof=1))

    def loss(coefficients):
        z = coefficients[0] + coefficients[1] * x
        return np.sum(np.logaddexp(0, z) - labels * z) + 0.01 / 2 * coefficients[1] ** 2

    theta, phi = minimize(loss, [0, 0], tol=1e-10).x
    estimate = fit_length_controlled_rate(labels, first, second, 100)
    assert estimate.rate == pytest.approx(logistic(theta), abs=1e-6)
    assert estimate.effect == pytest.approx(phi, abs=1e-5)


def test_swapped_responses_give_the_complement_of_the_rate_and_the_same_effect():
    labels, first, second = simulated(-0.4, 1.0, n=100)
    original = fit_length_controlled_rate(labels, first, second, 100)
    swapped = fit_length_controlled_rate(1 - labels, second, first, 100)
    assert original.rate + swapped.rate == pytest.approx(1)
    assert original.effect == pytest.approx(swapped.effect)


# --- the interval


@pytest.mark.parametrize(("theta", "phi"), [(-0.4, 2.0), (0.5, 0.0)])
def test_the_95_percent_interval_covers_the_truth_in_about_95_percent_of_the_simulations(theta, phi):
    truth = logistic(theta)
    estimates = [
        fit_length_controlled_rate(*simulated(theta, phi, n=150, seed=seed), 100, seed) for seed in range(100)
    ]
    assert 88 <= sum(estimate.low < truth < estimate.high for estimate in estimates) <= 99
    assert np.mean([estimate.rate for estimate in estimates]) == pytest.approx(truth, abs=0.02)


def test_the_interval_narrows_with_the_number_of_prompts():
    few = fit_length_controlled_rate(*simulated(-0.4, 1.0, n=50), 300)
    many = fit_length_controlled_rate(*simulated(-0.4, 1.0, n=2000), 300)
    assert few.high - few.low > 4 * (many.high - many.low)
    assert many.low < many.rate < many.high


def test_the_interval_is_a_function_of_the_seed():
    data = simulated(-0.4, 1.0, n=50)
    assert fit_length_controlled_rate(*data, 200, 1) == fit_length_controlled_rate(*data, 200, 1)
    assert fit_length_controlled_rate(*data, 200, 1).low != fit_length_controlled_rate(*data, 200, 2).low


def test_the_interval_is_that_of_estimates_on_resampled_prompts():
    labels, first, second = simulated(-0.4, 1.0, n=120)
    numbers = np.random.default_rng(5)
    rates = []
    for _ in range(200):
        rows = numbers.integers(0, 120, 120)
        rates.append(fit_length_controlled_rate(labels[rows], first[rows], second[rows], 1).rate)
    estimate = fit_length_controlled_rate(labels, first, second, 2000)
    expected = tuple(np.quantile(rates, [0.025, 0.975]))
    assert (estimate.low, estimate.high) == pytest.approx(expected, abs=0.03)


def test_resamples_that_are_fitted_in_several_batches_give_the_interval_of_a_single_batch(monkeypatch):
    data = simulated(-0.4, 1.0, n=60)
    single = fit_length_controlled_rate(*data, 150)
    monkeypatch.setattr(length_control, "CELLS", 60 * 7)
    several = fit_length_controlled_rate(*data, 150)
    assert (several.low, several.high) == pytest.approx((single.low, single.high), abs=1e-9)


# --- degenerate data


@pytest.mark.parametrize("label", [0.0, 0.5, 1.0])
def test_equal_labels_give_that_label_as_the_rate(label):
    estimate = fit_length_controlled_rate([label] * 9, range(9), [3] * 9, 100)
    assert (estimate.rate, estimate.low, estimate.high, estimate.effect) == (label, label, label, 0)


def test_pairs_of_equally_long_responses_give_the_mean_label_as_the_rate():
    estimate = fit_length_controlled_rate([1, 0, 0.5, 1], [7, 8, 9, 10], [7, 8, 9, 10], 500)
    assert estimate.rate == 0.625
    assert estimate.uncontrolled == 0.625
    assert estimate.effect == 0
    assert estimate.low < 0.625 < estimate.high


def test_a_length_difference_that_all_pairs_share_or_no_prompts_leave_the_rate_undetermined():
    estimate = fit_length_controlled_rate([1, 0, 1], [10, 20, 30], [5, 15, 25], 100)
    assert math.isnan(estimate.rate)
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.effect)
    assert estimate.uncontrolled == pytest.approx(2 / 3)
    assert fit_length_controlled_rate([1.0], [5], [5], 100).rate == 1.0
    assert math.isnan(fit_length_controlled_rate([1.0], [6], [5], 100).rate)
    assert math.isnan(fit_length_controlled_rate([], [], [], 100).rate)


def test_the_fit_converges_with_rare_or_separated_wins_and_probabilities_close_to_0_and_1():
    estimate = fit_length_controlled_rate([1, 1, 1, 0, 0, 0], [9, 8, 7, 1, 2, 3], [5] * 6, 200)
    assert estimate.rate == pytest.approx(0.5)
    assert 1 < estimate.effect < 100
    assert 0 <= estimate.low <= estimate.rate <= estimate.high <= 1
    _, first, second = simulated(0, 0, n=1000)
    estimate = fit_length_controlled_rate(np.arange(1000) == 500, first, second, 200)
    assert 0 < estimate.rate < 0.02
    assert estimate.low == 0
    # A judge that reports the probabilities of its tokens gives 1e-11 as well as 0.3.
    labels = np.array([1e-11, 3e-13, 2e-8, 1 - 1e-10, 1 - 1e-12, 7e-11])
    estimate = fit_length_controlled_rate(labels, [9, 1, 4, 30, 8, 2], [5] * 6, 300)
    assert 0 <= estimate.low <= estimate.rate <= estimate.high <= 1
    assert fit_length_controlled_rate(labels[[0, 1, 2, 5]], [9, 1, 4, 2], [5] * 4, 300).rate < 1e-7


def test_columns_of_different_lengths_are_refused_with_their_counts():
    with pytest.raises(ValueError, match="2 labels, 1 first lengths and 2 second lengths"):
        fit_length_controlled_rate([1, 0], [1], [1, 2])


@pytest.mark.parametrize("label", [2, float("nan")])
def test_labels_outside_0_to_1_are_refused(label):
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        fit_length_controlled_rate([1, label], [1, 3], [1, 2])


# --- several labels of a prompt


def test_labels_of_one_prompt_are_drawn_together():
    labels, first, second = simulated(-0.4, 1.0, n=50)
    once = fit_length_controlled_rate(labels, first, second, 300)
    lists = [[value for value in values for _ in range(3)] for values in (labels, first, second)]
    together = fit_length_controlled_rate(*lists, 300, prompts=[n // 3 for n in range(150)])
    apart = fit_length_controlled_rate(*lists, 300)
    assert together.rate == pytest.approx(once.rate, abs=0.02)
    assert together.high - together.low == pytest.approx(once.high - once.low, rel=0.1)
    assert apart.high - apart.low < 0.75 * (together.high - together.low)
    data = simulated(-0.4, 1.0, n=50)
    assert fit_length_controlled_rate(*data, 100, 1, range(50)) == fit_length_controlled_rate(*data, 100, 1)


# --- style


def test_the_rate_at_equal_style_by_hand(monkeypatch):
    """With one heading more 3 of 4 win, with one less 2 of 4: logits of log 3 and 0, log 3 / 2 between."""
    monkeypatch.setattr(length_control, "PENALTY", 1e-12)
    labels = [1, 1, 1, 0, 1, 1, 0, 0]
    style = {"headings": [1] * 4 + [-1] * 4}
    estimate = fit_length_controlled_rate(labels, [5] * 8, [5] * 8, 100, style=style)
    assert estimate.rate == pytest.approx(math.sqrt(3) / (1 + math.sqrt(3)))
    deviation = math.sqrt(8 / 7)
    assert estimate.style_effects == pytest.approx({"headings": math.log(3) / 2 / math.tanh(1 / deviation)})
    assert estimate.effect == 0


def styled(soft=False, n=600, seed=0):
    """Lengths, and headings of which there are more in longer responses; the judge prefers headings."""
    numbers = generator(seed, "style")
    headings = numbers.integers(-3, 4, n)
    lists = numbers.integers(-1, 2, n)
    d = headings * 100 + np.round(numbers.normal(0, 100, n)).astype(int)
    x, h, b = (np.tanh(one / one.std(ddof=1)) for one in (d, headings, lists))
    p = logistic(-0.4 + 0.3 * x + 2.0 * h - 0.5 * b)
    labels = p if soft else (numbers.random(n) < p).astype(float)
    return (labels, 900 + d, np.full(n, 900)), {"headings": headings, "lists": lists}


def test_soft_labels_of_the_model_with_style_are_fitted_exactly(monkeypatch):
    monkeypatch.setattr(length_control, "PENALTY", 0.0)
    data, style = styled(soft=True)
    estimate = fit_length_controlled_rate(*data, 100, style=style)
    assert estimate.rate == pytest.approx(logistic(-0.4), abs=1e-8)
    assert estimate.effect == pytest.approx(0.3, abs=1e-7)
    assert estimate.style_effects == pytest.approx({"headings": 2.0, "lists": -0.5}, abs=1e-7)


def test_what_a_judge_prefers_in_style_is_not_taken_for_length():
    data, style = styled()
    estimate = fit_length_controlled_rate(*data, 200, style=style)
    assert estimate.effect == pytest.approx(0.3, abs=0.4)
    assert fit_length_controlled_rate(*data, 200).effect > 1
    assert estimate.low < logistic(-0.4) < estimate.high


def test_a_difference_of_style_that_is_0_in_all_pairs_is_left_out():
    data = simulated(-0.4, 1.0, n=100)
    estimate = fit_length_controlled_rate(*data, 100, style={"headings": [0] * 100})
    alone = fit_length_controlled_rate(*data, 100)
    assert estimate.style_effects == {"headings": 0.0}
    expected = (alone.rate, alone.low, alone.high, alone.effect)
    assert (estimate.rate, estimate.low, estimate.high, estimate.effect) == pytest.approx(expected, abs=1e-7)


def test_a_difference_of_style_that_all_pairs_share_leaves_the_rate_undetermined():
    estimate = fit_length_controlled_rate(*simulated(0, 1.0, n=20), 100, style={"headings": [1] * 20})
    assert math.isnan(estimate.rate)
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.style_effects["headings"])
    assert math.isnan(
        fit_length_controlled_rate([], [], [], style={"headings": []}).style_effects["headings"]
    )


def test_the_effects_stay_finite_where_style_alone_separates_wins_from_losses():
    headings = [1, 2, 1, -1, -1, -2]
    style = {"headings": headings, "bold": [2 * n for n in headings]}
    estimate = fit_length_controlled_rate([1, 1, 1, 0, 0, 0], [9, 3, 4, 8, 2, 5], [5] * 6, 200, style=style)
    assert 1 < estimate.style_effects["headings"] < 100
    assert estimate.style_effects["bold"] == pytest.approx(estimate.style_effects["headings"])
    assert 0 <= estimate.low <= estimate.rate <= estimate.high <= 1


def test_the_variance_over_seeds_and_prompts_is_that_of_the_bootstrap_at_equal_style():
    data, style = styled()
    seeds = [n % 20 for n in range(600)]
    estimate = estimate_equal_length(*data, list(range(600)), seeds, style)
    fitted = fit_length_controlled_rate(*data, 1000, style=style)
    assert estimate.value == fitted.rate
    deviation = math.sqrt(
        sum(one.variance for one in estimate.components) * 4 * fitted.rate * (1 - fitted.rate)
    )
    assert deviation == pytest.approx((fitted.high - fitted.low) / 3.92, rel=0.25)
