import math

import pytest

from components.evaluation.winrate import Verdict, combine_orders, win_rate

FIRST, SECOND, TIE, UNPARSABLE = Verdict


def test_a_win_rate_counts_wins_over_wins_ties_and_losses():
    rate = win_rate([FIRST] * 5 + [TIE] * 2 + [SECOND] * 3 + [UNPARSABLE] * 4)
    assert (rate.wins, rate.ties, rate.losses, rate.unparsable) == (5, 2, 3, 4)
    assert rate.rate == 0.5


def test_the_interval_is_that_of_the_percentile_bootstrap():
    rate = win_rate([FIRST] * 60 + [SECOND] * 40, resamples=20_000)
    spread = 1.96 * math.sqrt(0.6 * 0.4 / 100)
    assert (rate.low, rate.high) == pytest.approx((0.6 - spread, 0.6 + spread), abs=0.015)
    wider = win_rate([FIRST] * 6 + [SECOND] * 4)
    assert wider.low < rate.low < 0.6 < rate.high < wider.high


def test_the_interval_is_a_function_of_the_seed():
    verdicts = [FIRST] * 13 + [SECOND] * 24
    assert win_rate(verdicts, 500, 1) == win_rate(verdicts, 500, 1)
    assert len({(win_rate(verdicts, 100, seed).low, win_rate(verdicts, 100, seed).high) for seed in range(10)}) > 1


def test_unparsable_verdicts_do_not_narrow_the_interval():
    plain, more = win_rate([FIRST, SECOND] * 10), win_rate([FIRST, SECOND] * 10 + [UNPARSABLE] * 500)
    assert (plain.rate, plain.low, plain.high) == (more.rate, more.low, more.high)


def test_all_wins_and_nothing_parsed_are_no_special_case_for_the_reader():
    always = win_rate([FIRST] * 7)
    assert (always.rate, always.low, always.high) == (1, 1, 1) and str(always) == "100.0% [100.0%, 100.0%]"
    nothing = win_rate([UNPARSABLE] * 3)
    assert nothing.unparsable == 3 and math.isnan(nothing.rate) and math.isnan(nothing.low)
    assert math.isnan(win_rate([]).rate)


def test_exchanging_the_responses_exchanges_the_words_for_them():
    assert [v.exchanged() for v in Verdict] == [SECOND, FIRST, TIE, UNPARSABLE]


@pytest.mark.parametrize(("given", "exchanged", "verdict"), [
    (FIRST, SECOND, FIRST), (SECOND, FIRST, SECOND), (FIRST, FIRST, TIE), (SECOND, SECOND, TIE), (TIE, TIE, TIE), (FIRST, TIE, TIE),
    (TIE, FIRST, TIE), (FIRST, UNPARSABLE, UNPARSABLE), (UNPARSABLE, SECOND, UNPARSABLE), (UNPARSABLE, UNPARSABLE, UNPARSABLE)])
def test_two_orders_make_one_verdict(given, exchanged, verdict):
    """The second word is on exchanged responses, so its 'response 2' speaks for our response 1."""
    assert combine_orders(given, exchanged) is verdict
