"""Win rates and their bootstrap intervals."""

import math

import numpy as np
import pytest

from components.evaluation.winrate import Verdict, draw_units, win_rate

FIRST, SECOND, TIE, UNPARSABLE = Verdict


def test_the_win_rate_is_wins_over_wins_ties_and_losses():
    rate = win_rate([FIRST] * 5 + [TIE] * 2 + [SECOND] * 3 + [UNPARSABLE] * 4)
    assert (rate.wins, rate.ties, rate.losses, rate.unparsable) == (5, 2, 3, 4)
    assert rate.win_rate == 0.5


def test_the_interval_is_that_of_the_percentile_bootstrap_and_wider_with_fewer_verdicts():
    rate = win_rate([FIRST] * 60 + [SECOND] * 40, resamples=20_000)
    half_width = 1.96 * math.sqrt(0.6 * 0.4 / 100)
    assert (rate.low, rate.high) == pytest.approx((0.6 - half_width, 0.6 + half_width), abs=0.015)
    many = win_rate([FIRST] * 60 + [SECOND] * 40, resamples=20_000)
    few = win_rate([FIRST] * 6 + [SECOND] * 4)
    assert few.low < many.low < 0.6 < many.high < few.high


def test_the_interval_is_a_function_of_the_seed():
    verdicts = [FIRST] * 13 + [SECOND] * 24
    assert win_rate(verdicts, 500, 1) == win_rate(verdicts, 500, 1)
    rates = [win_rate(verdicts, 100, seed) for seed in range(10)]
    assert len({(rate.low, rate.high) for rate in rates}) > 1


def test_unparsable_verdicts_do_not_narrow_the_interval_and_leave_the_others_of_their_prompt():
    without = win_rate([FIRST, SECOND] * 10)
    with_unparsable = win_rate([FIRST, SECOND] * 10 + [UNPARSABLE] * 500)
    assert (without.win_rate, without.low, without.high) == (
        with_unparsable.win_rate,
        with_unparsable.low,
        with_unparsable.high,
    )
    rate = win_rate([FIRST, UNPARSABLE, SECOND, SECOND], 100, prompts=["a", "a", "b", "b"])
    assert (rate.wins, rate.losses, rate.unparsable) == (1, 2, 1)
    assert (rate.low, rate.high) == (0.0, 1.0)


def test_wins_only_give_an_interval_of_no_width_and_no_parsed_verdict_a_rate_of_nan():
    rate = win_rate([FIRST] * 7)
    assert (rate.win_rate, rate.low, rate.high) == (1, 1, 1)
    rate = win_rate([UNPARSABLE] * 3)
    assert rate.unparsable == 3
    assert math.isnan(rate.win_rate)
    assert math.isnan(rate.low)
    assert math.isnan(win_rate([]).win_rate)


def test_a_swapped_verdict_names_the_other_response():
    assert [verdict.swapped() for verdict in Verdict] == [SECOND, FIRST, TIE, UNPARSABLE]


def test_answers_to_one_prompt_are_drawn_together_and_single_ones_independently():
    once = [FIRST] * 30 + [SECOND] * 20
    repeated = [verdict for verdict in once for _ in range(4)]
    prompts = [n // 4 for n in range(200)]
    rate = win_rate(repeated, 20_000, prompts=prompts)
    single = win_rate(once, 20_000)
    assert rate.win_rate == single.win_rate
    assert (rate.low, rate.high) == pytest.approx((single.low, single.high), abs=0.021)
    assert win_rate(repeated, 20_000).low > rate.low + 0.05
    verdicts = [FIRST, SECOND, TIE, FIRST]
    assert win_rate(verdicts, 300, 1, prompts="abcd") == win_rate(verdicts, 300, 1)


def test_units_are_drawn_with_replacement():
    units = np.array([0, 0, 1, 2])
    counts = draw_units(units, 50, np.random.default_rng(0))
    assert (counts == np.random.default_rng(0).multinomial(3, [1 / 3] * 3, size=50)[:, units]).all()
