"""Intervals over seeds and units: small cases by hand, and their coverage in simulations."""

import math

import numpy as np
import pytest
from scipy import stats

from components.evaluation.intervals import (
    REST_TAKEN,
    Component,
    Estimate,
    estimate_mean,
    estimate_share,
    holm,
)
from components.evaluation.length_control import estimate_equal_length, fit_length_controlled_rate

T2 = 4.302653  # quantile 0.975 of Student's t with 2 degrees of freedom


def seeds_of(table, shared=True):
    """The strata of seeds with these values, of units that they share or that are their own."""
    return [
        {"": {f"{n}" if shared else f"{seed}/{n}": float(value) for n, value in enumerate(row)}}
        for seed, row in enumerate(table)
    ]


def variances(estimate):
    """The variance and degrees of freedom of each component."""
    return [(one.variance, one.freedom) for one in estimate.components]


# --- by hand


def test_one_value_per_seed_gives_students_interval():
    estimate = estimate_mean([{"": {"": value}} for value in (0.9, 0.8, 0.85)])
    assert estimate.value == pytest.approx(0.85)
    assert estimate.between == pytest.approx(0.05)
    assert math.isnan(estimate.within)
    half = T2 * 0.05 / math.sqrt(3)
    assert estimate.interval() == pytest.approx((0.85 - half, 0.85 + half))
    assert estimate.p_value(0.85 - half) == pytest.approx(0.05, abs=1e-6)


def test_units_of_their_own_add_their_variance_to_that_of_the_seeds():
    apart = estimate_mean(seeds_of([[1, 3], [2, 6], [0, 3]], shared=False))
    own = (2 / 2 + 8 / 2 + 4.5 / 2) / 3 / 3
    expected = [(np.var([2.0, 4.0, 1.5], ddof=1) / 3 - REST_TAKEN * own, 2), (own, 3)]
    assert np.array(variances(apart)) == pytest.approx(np.array(expected))
    assert apart.within == pytest.approx(math.sqrt((2 + 8 + 4.5) / 3))


def test_shared_units_add_their_variance_by_hand():
    """Seed means 2, 3, 4 and unit means 1, 5 with nothing left: both components are complete."""
    estimate = estimate_mean(seeds_of([[0, 4], [1, 5], [2, 6]]))
    assert estimate.value == 3.0
    t1 = stats.t.ppf(0.975, 1)
    assert np.array(variances(estimate)) == pytest.approx(np.array([(1 / 3, 2), (4.0, 1)]))
    assert estimate.half_width() == pytest.approx(math.sqrt(T2**2 / 3 + t1**2 * 4))


def test_a_part_of_the_variance_of_the_rest_is_taken_from_both_others():
    table = np.array([[0.0, 4.0], [1.0, 6.0], [5.0, 6.0]])
    estimate = estimate_mean(seeds_of(table))
    means, units = table.mean(1), table.mean(0)
    left = table - means[:, None] - units + table.mean()
    rest = (left**2).sum() / 2 / 6
    expected = [
        (max(means.var(ddof=1) / 3 - REST_TAKEN * rest, 0), 2),
        (max(units.var(ddof=1) / 2 - REST_TAKEN * rest, 0), 1),
        (rest, 2),
    ]
    assert np.array(variances(estimate)) == pytest.approx(np.array(expected))


def test_more_seeds_leave_the_variance_of_shared_units_and_have_more_units_of_their_own():
    estimate = estimate_mean(seeds_of([[0.0, 4.0], [1.0, 6.0], [5.0, 6.0]]))
    (of_seeds, _), of_units, (rest, _) = variances(estimate)
    six = variances(estimate.with_seeds(6))
    assert np.array(six) == pytest.approx(np.array([(of_seeds / 2, 5), of_units, (rest / 2, 5)]))
    assert np.array(variances(estimate.with_seeds(3))) == pytest.approx(np.array(variances(estimate)))
    estimate = estimate_mean(seeds_of([[0.0, 4.0, 1.0], [1.0, 6.0, 3.0], [5.0, 6.0, 2.0]], shared=False))
    (of_seeds, _), (own, freedom) = variances(estimate)
    assert freedom == 6
    five = variances(estimate.with_seeds(5))
    assert np.array(five) == pytest.approx(np.array([(of_seeds * 3 / 5, 4), (own * 3 / 5, 10)]))


def test_strata_count_once_each_whatever_their_size():
    strata = {"few": {"a": 1.0}, "many": {str(n): float(n % 2) for n in range(10)}}
    half = [{name: {unit: value / 2 for unit, value in own.items()} for name, own in strata.items()}] * 3
    estimate = estimate_mean(half)
    assert estimate.value == pytest.approx(0.75)
    assert estimate.half_width() > 0


def test_seeds_that_share_some_units_take_nothing_from_the_components():
    seeds = [{"": {"a": 0.0, "b": 1.0}}, {"": {"b": 2.0, "c": 1.0}}, {"": {"d": 1.0, "e": 3.0}}]
    estimate = estimate_mean(seeds)
    (of_seeds, freedom), (of_units, of_freedom) = variances(estimate)
    assert (freedom, of_freedom) == (2, 4)
    assert of_seeds == pytest.approx(np.var([0.5, 1.5, 2.0], ddof=1) / 3)
    sums = [-0.5 / 6, (0.5 + 0.5) / 6, -0.5 / 6, -1 / 6, 1 / 6]
    assert of_units == pytest.approx(5 / 4 * sum(one**2 for one in sums))


def test_a_share_has_the_interval_of_its_arc_sine():
    seeds = [{str(n): (float(n < wins), float(n >= wins)) for n in range(10)} for wins in (5, 6, 7)]
    estimate = estimate_share(seeds)
    assert estimate.value == pytest.approx(0.6)
    assert estimate.between == pytest.approx(0.1)
    linear = estimate_mean(seeds_of([[(n < wins) for n in range(10)] for wins in (5, 6, 7)]))
    half = linear.half_width() / (2 * math.sqrt(0.6 * 0.4))
    low, high = estimate.interval()
    middle = math.asin(math.sqrt(0.6))
    assert [math.asin(math.sqrt(one)) for one in (low, high)] == pytest.approx([middle - half, middle + half])
    assert estimate.p_value(high) == pytest.approx(0.05, abs=1e-6)


@pytest.mark.parametrize(
    ("won", "interval"), [(1.0, (0.025 ** (1 / 4), 1.0)), (0.0, (0.0, 1 - 0.025 ** (1 / 4)))]
)
def test_units_that_all_agree_have_the_exact_binomial_interval_of_their_number(won, interval):
    estimate = estimate_share([{str(n): (won, 1 - won) for n in range(4)}] * 3)
    assert estimate.interval() == pytest.approx(interval)
    assert estimate.p_value(interval[0] or interval[1]) == pytest.approx(0.05)


def test_the_p_value_is_the_level_at_which_the_interval_reaches_the_limit():
    estimate = Estimate(1.0, (Component(0.04, 2.0), Component(0.01, 30.0)), 0.2)
    for level in (0.5, 0.9, 0.99):
        assert estimate.p_value(estimate.interval(level)[0]) == pytest.approx(1 - level, abs=1e-9)
    assert estimate.p_value(1.0) == pytest.approx(1.0)
    assert Estimate(1.0, (Component(0.0, 2.0),), 0.0).p_value(0.9) == pytest.approx(0.0, abs=1e-12)


def test_a_detectable_difference_is_decided_in_80_percent_of_cases():
    """Three seeds x 24 units, of which the seeds vary most; the variances are the true ones."""
    numbers = np.random.default_rng(3)
    rest = 1 / 72
    components = (
        Component(0.25 / 3 + rest / 2, 2),
        Component(0.09 / 24 + rest / 2, 23, falls=False),
        Component(rest, 46),
    )
    detectable = Estimate(0.0, components, 0.5).detectable()
    decided = 0
    for _ in range(400):
        table = (
            numbers.normal(0, 0.5, (3, 1)) + numbers.normal(0, 0.3, (1, 24)) + numbers.normal(0, 1, (3, 24))
        )
        low, _ = estimate_mean(seeds_of(table + detectable)).interval()
        decided += low > 0
    assert 0.74 < decided / 400 < 0.88
    one = Estimate(0.5, (Component(0.01, 1e6),), 0.1)
    assert one.detectable() == pytest.approx(0.1 * (1.959964 + 0.841621), rel=0.02)
    share = Estimate(0.5, (Component(0.0001, 1e6),), 0.1, is_share=True)
    assert share.detectable() == pytest.approx(math.sin(math.pi / 4 + 0.0280158) ** 2 - 0.5, rel=0.02)
    assert math.isnan(Estimate(0.5, (Component(0.0, 2.0),), 0.0).detectable())


def test_holms_correction_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([0.4, 0.4, 0.4]) == [1.0, 1.0, 1.0]
    assert holm([]) == []


# --- coverage

CASES = [
    (0, 0, 1),
    (0, 1, 0.3),
    (0, 1, 1),
    (0.2, 1, 1),
    (0.5, 1, 0.5),
    (1, 1, 1),
    (0.5, 0.1, 1),
    (1, 0.1, 1),
    (1, 0, 0.1),
]
"""Standard deviations of seeds, of units, and of the rest."""


@pytest.mark.parametrize(
    ("seeds", "units"),
    [
        (3, 24),
        *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in [(3, 8), (3, 75), (5, 8), (5, 75)]),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_the_interval_covers_the_mean_wherever_the_variance_is(case, seeds, units):
    numbers = np.random.default_rng(0)
    trials = 600
    covered = 0
    for _ in range(trials):
        table = (
            numbers.normal(0, case[0], (seeds, 1))
            + numbers.normal(0, case[1], (1, units))
            + numbers.normal(0, case[2], (seeds, units))
        )
        low, high = estimate_mean(seeds_of(table)).interval()
        covered += low <= 0 <= high
    assert covered / trials >= 0.93 - 2 * math.sqrt(0.93 * 0.07 / trials)


SEEDS = [3, pytest.param(5, marks=pytest.mark.long)]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("case", [(0, 1), (0.2, 1), (1, 1), (1, 0.1)])
def test_the_interval_of_nested_units_covers_the_mean_too(case, seeds):
    numbers = np.random.default_rng(4)
    trials = 600
    covered = 0
    for _ in range(trials):
        table = numbers.normal(0, case[0], (seeds, 1)) + numbers.normal(0, case[1], (seeds, 8))
        low, high = estimate_mean(seeds_of(table, shared=False)).interval()
        covered += low <= 0 <= high
    assert covered / trials >= 0.93 - 2 * math.sqrt(0.93 * 0.07 / trials)


def test_seeds_without_a_count_are_left_out_and_one_seed_has_no_estimate():
    counted = {"a": (3.0, 1.0), "b": (1.0, 2.0)}
    nothing = {"a": (0.0, 0.0)}
    both = estimate_share([counted, nothing, counted, {}])
    assert both == estimate_share([counted, counted])
    assert estimate_share([counted, nothing]) is None
    assert estimate_share([]) is None


def test_equal_shares_of_three_seeds_have_an_interval_by_their_own_units():
    seeds = [{f"{seed}/{n}": (float(n < 6), float(n >= 6)) for n in range(10)} for seed in range(3)]
    low, high = estimate_share(seeds).interval()
    assert low < 0.5 < 0.7 < high
    assert estimate_share(seeds).p_value(1.5) < 0.05, "a limit outside of 0 to 1 counts as its end"


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("spread", [0.0, 0.2, 0.8])
def test_the_interval_of_a_share_covers_it_wherever_the_variance_is(spread, seeds):
    """Seeds with 75 prompts, whose chances of a win differ by a normal deviation of the logit."""
    numbers = np.random.default_rng(1)
    trials = 300
    covered = 0
    for _ in range(trials):
        chances = 1 / (1 + np.exp(-numbers.normal(0, spread, (seeds, 1))))
        won = numbers.random((seeds, 75)) < chances
        low, high = estimate_share(
            [{str(n): (float(win), float(not win)) for n, win in enumerate(row)} for row in won]
        ).interval()
        covered += low <= 0.5 <= high
    assert covered / trials >= 0.93 - 2 * math.sqrt(0.93 * 0.07 / trials)


def judged(numbers, seeds, case, shared):
    """Labels and lengths, [seeds, 75], by a judge that likes length; ours are the longer ones on average.

    Seeds and prompts deviate normally by the logit of a win, whose mean at equal length is given.
    """
    ours, theirs = (numbers.normal(mean, 30, (seeds, 75)).round().astype(int) for mean in (160, 100))
    of_seeds, of_prompts, logit = case
    prompts = numbers.normal(0, of_prompts, (1 if shared else seeds, 75))
    longer = np.tanh((ours - theirs) / (ours - theirs).std(ddof=1))
    logits = logit + numbers.normal(0, of_seeds, (seeds, 1)) + prompts + longer
    won = (numbers.random((seeds, 75)) < 1 / (1 + np.exp(-logits))).astype(float)
    return won.ravel().tolist(), ours.ravel().tolist(), theirs.ravel().tolist()


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("case", "least"), [((0, 1, 0), 0.93), ((0.3, 0.5, 0), 0.93), ((0.8, 0, 0), 0.93), ((0.8, 0, -2.4), 0.9)]
)
def test_the_interval_at_equal_length_covers_the_rate_wherever_the_variance_is(case, least, shared, seeds):
    numbers = np.random.default_rng(5)
    truth = fit_length_controlled_rate(*judged(numbers, 3000, case, shared=False), resamples=1)
    assert truth.uncontrolled - truth.rate > 0.05
    trials = 300
    covered = 0
    of_seeds = [seed for seed in range(seeds) for _ in range(75)]
    prompts = [(n if shared else (seed, n)) for seed in range(seeds) for n in range(75)]
    for _ in range(trials):
        low, high = estimate_equal_length(*judged(numbers, seeds, case, shared), prompts, of_seeds).interval()
        covered += low <= truth.rate <= high
    assert covered / trials >= least - 2 * math.sqrt(least * (1 - least) / trials)


def test_students_interval_over_seeds_alone_would_miss_the_mean_of_shared_units():
    """What the components of units are for: of 24 prompts that three seeds share."""
    numbers = np.random.default_rng(2)
    covered = {"components": 0, "seeds alone": 0}
    for _ in range(300):
        table = numbers.normal(0, 1, (1, 24)) + numbers.normal(0, 0.3, (3, 24))
        means = [{"": {"": float(row.mean())}} for row in table]
        for name, seeds in (("components", seeds_of(table)), ("seeds alone", means)):
            low, high = estimate_mean(seeds).interval()
            covered[name] += low <= 0 <= high
    assert covered["components"] >= 275
    assert covered["seeds alone"] <= 240
