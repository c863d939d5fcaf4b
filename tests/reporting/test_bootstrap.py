"""The hierarchical bootstrap: exact intervals of small cases, its coverage, and its pairing."""

from itertools import product

import numpy as np
import pytest

from components.reporting.bootstrap import mean_interval, resample_means, share_interval

RESAMPLES = 20_000


def own(*seeds):
    """Seeds with units of their own, with one value each."""
    return [{"": {f"{n}/{i}": [v] for i, v in enumerate(values)}} for n, values in enumerate(seeds)]


def common(*seeds):
    """Seeds with the same units, with one value each."""
    return [{"": {str(i): [v] for i, v in enumerate(values)}} for values in seeds]


def numbers(seed=0):
    return np.random.default_rng(seed)


def enumerate_means(seeds):
    """Every equally likely mean of seeds with two units each, drawn in two stages."""
    means = []
    for drawn in product(seeds, repeat=2):
        for units in product(*(product(values, repeat=2) for values in drawn)):
            means.append(np.mean([np.mean(values) for values in units]))
    return np.array(means)


@pytest.mark.parametrize("seeds", [((0.0, 1.0), (2.0, 5.0)), ((-3.0, 4.0), (0.5, 7.0))])
def test_the_interval_of_two_seeds_with_two_prompts_is_that_of_all_their_resamples(seeds):
    every = enumerate_means(seeds)
    assert len(every) == 64
    expected = np.quantile(every, [0.025, 0.975], method="inverted_cdf")
    interval = mean_interval(own(*seeds), RESAMPLES, numbers())
    assert interval == pytest.approx(tuple(expected))


def test_resamples_have_the_frequencies_of_all_resamples():
    """Of two seeds with the prompts 0, 1 and 2, 5, a mean of 0 is 1/64: twice the first, and four zeros."""
    seeds = ((0.0, 1.0), (2.0, 5.0))
    means = resample_means(own(*seeds), RESAMPLES, numbers())[:, 0]
    every = enumerate_means(seeds)
    for value in np.unique(every):
        assert np.isclose(means, value).mean() == pytest.approx((every == value).mean(), abs=0.01)


def test_seeds_with_one_value_each_are_drawn_alone():
    """Of three seeds, a resample has the smallest one only with a probability of 1/27."""
    assert mean_interval(own([0.1], [0.4], [0.9]), RESAMPLES, numbers()) == pytest.approx((0.1, 0.9))


def test_strata_of_a_seed_are_drawn_independently_and_added():
    """Of an unpaired difference of equal prompts the deviation is that of both, of a paired one it is 0."""
    values = np.arange(50.0)
    (both,) = resample_means([own(values)[0] | {"other": own(-values)[0][""]}], RESAMPLES, numbers()).T
    (paired,) = resample_means(own(values - values), RESAMPLES, numbers()).T
    assert both.std() == pytest.approx(np.sqrt(2 * values.var() / 50), rel=0.03)
    assert not paired.any()


def test_the_columns_of_a_prompt_are_drawn_together():
    rows = {"a": [0.0, 1.0], "b": [2.0, 3.0], "c": [10.0, 11.0]}
    means = resample_means([{"": rows}], 500, numbers())
    assert means[:, 1] - means[:, 0] == pytest.approx(np.ones(500))


def test_the_resamples_are_a_function_of_the_generator():
    seeds = own([0.1, 0.5, 0.2], [0.3, 0.9, 0.4])
    assert mean_interval(seeds, 500, numbers(1)) == mean_interval(seeds, 500, numbers(1))
    assert mean_interval(seeds, 500, numbers(1)) != mean_interval(seeds, 500, numbers(2))


@pytest.mark.parametrize("named", [own, common])
def test_the_resamples_do_not_depend_on_how_many_are_drawn_at_once(monkeypatch, named):
    seeds = named(range(30), range(5, 35))
    together = mean_interval(seeds, 500, numbers())
    monkeypatch.setattr("components.reporting.bootstrap.CELLS", 100)
    assert mean_interval(seeds, 500, numbers()) == together


def test_an_interval_of_many_seeds_and_prompts_covers_the_mean_nearly_as_often_as_it_says():
    """Means of 15 seeds with 20 prompts each; both levels vary. A percentile interval is a little narrow."""
    simulated = numbers(5)
    covered = []
    for n in range(200):
        means = 0.3 + simulated.normal(0, 0.5, size=15)
        seeds = own(*(simulated.normal(mean, 1.0, size=20) for mean in means))
        low, high = mean_interval(seeds, 400, numbers(n))
        covered.append(low <= 0.3 <= high)
    assert 0.90 <= np.mean(covered) <= 0.99


def test_an_interval_over_prompts_alone_misses_the_mean_where_seeds_differ():
    simulated = numbers(5)
    covered = []
    for n in range(100):
        mean = 0.3 + simulated.normal(0, 0.5)
        low, high = mean_interval(own(simulated.normal(mean, 1.0, size=100)), 400, numbers(n))
        covered.append(low <= 0.3 <= high)
    assert np.mean(covered) < 0.5


# --- units that seeds have in common


def enumerate_common_means(seeds):
    """Every equally likely mean of seeds with the same two units, drawn once for all seeds."""
    return np.array(
        [
            np.mean([np.mean([seed[unit] for unit in units]) for seed in drawn])
            for drawn in product(seeds, repeat=2)
            for units in product(range(2), repeat=2)
        ]
    )


def test_prompts_that_seeds_have_in_common_are_drawn_once_for_all_seeds():
    seeds = ((0.0, 1.0), (2.0, 5.0))
    means = resample_means(common(*seeds), RESAMPLES, numbers())[:, 0]
    every = enumerate_common_means(seeds)
    assert set(means.round(9)) == set(every.round(9))
    for value in np.unique(every):
        assert np.isclose(means, value).mean() == pytest.approx((every == value).mean(), abs=0.012)


@pytest.mark.parametrize("count", [3, 10])
@pytest.mark.parametrize("named", [common, own])
def test_an_interval_covers_the_mean_of_prompts_whatever_the_number_of_seeds(named, count):
    """Prompts vary, in common or by seed, and so do answers; seeds do not."""
    simulated = numbers(3)
    covered = []
    for n in range(200):
        prompts = simulated.normal(0.3, 1.0, size=(1 if named is common else count, 40))
        values = prompts + simulated.normal(0, 0.3, size=(count, 40))
        low, high = mean_interval(named(*values), 300, numbers(n))
        covered.append(low <= 0.3 <= high)
    assert 0.89 <= np.mean(covered) <= 1.0


def test_common_prompts_under_names_by_seed_would_cover_their_mean_too_rarely():
    simulated = numbers(3)
    covered = []
    for n in range(100):
        values = simulated.normal(0.3, 1.0, size=40) + simulated.normal(0, 0.3, size=(10, 40))
        low, high = mean_interval(own(*values), 300, numbers(n))
        covered.append(low <= 0.3 <= high)
    assert np.mean(covered) < 0.7


def test_a_seed_none_of_whose_prompts_was_drawn_draws_its_own():
    """The second seed's only prompt is one of five, and every value is 1."""
    seeds = [{"": {name: [1.0] for name in "abcde"}}, {"": {"e": [1.0]}}]
    assert resample_means(seeds, 500, numbers()) == pytest.approx(np.ones((500, 1)))


# --- shares of wins


def outcomes(*verdicts):
    """A seed's wins (1), losses (-1) and ties (0) by prompt, of prompts that no other seed has."""
    count = len(verdicts)
    return {object(): [count * float(v == 1), count * float(v == -1)] for v in verdicts}


def test_the_interval_of_wins_of_two_seeds_with_two_prompts_is_that_of_all_their_resamples():
    """A resample of ties alone is any share: 0 for the lower bound and 1 for the upper one."""
    seeds = ((1, -1), (1, 0))
    bounds = []
    for drawn in product(seeds, repeat=2):
        for units in product(*(product(verdicts, repeat=2) for verdicts in drawn)):
            flat = np.array(units).ravel()
            decided = (flat != 0).sum()
            share = (flat == 1).sum() / decided if decided else np.nan
            bounds.append((np.nan_to_num(share, nan=0.0), np.nan_to_num(share, nan=1.0)))
    lower, upper = np.array(bounds).T
    expected = (
        np.quantile(lower, 0.025, method="inverted_cdf"),
        np.quantile(upper, 0.975, method="inverted_cdf"),
    )
    interval = share_interval([outcomes(*verdicts) for verdicts in seeds], 2, RESAMPLES, numbers())
    assert interval == pytest.approx(expected)


def test_wins_without_losses_reach_to_the_exact_binomial_bound():
    low, high = share_interval([outcomes(*[1] * 4)], 4, 500, numbers())
    assert (low, high) == (pytest.approx(0.025**0.25), 1.0)
    low, high = share_interval([outcomes(*[-1] * 6)], 6, 500, numbers())
    assert (low, high) == (0.0, pytest.approx(1 - 0.025 ** (1 / 6)))
