"""Contests between two policies' answers, pooled over the answers of all seeds."""

import math

import pytest

from components.data.records import answer_id
from components.evaluation.length_control import length_controlled_rate
from components.evaluation.winrate import Verdict
from components.reporting.contests import ContestVerdicts, format_counts, format_equal_length, pool_contest
from tests.support.contests import LOSS, TIE, WIN, contest


@pytest.fixture(scope="module")
def pooled():
    """Two wins and a tie with seed 0, a loss with seed 1 on one of the same prompts."""
    return pool_contest({0: contest([WIN, WIN, TIE]), 1: contest([LOSS])}, 500)


def test_the_rate_is_over_the_answers_of_all_seeds_and_not_the_mean_of_their_rates(pooled):
    assert pooled.rate.rate == 0.5
    assert format_counts(pooled.rate) == "2/1/1"
    assert pooled.answers == 4


def test_each_seed_has_its_own_rate(pooled):
    assert pooled.by_seed[0].rate == pytest.approx(2 / 3)
    assert format_counts(pooled.by_seed[0]) == "2/1/0"
    assert pooled.by_seed[1].rate == 0.0
    assert format_counts(pooled.by_seed[1]) == "0/0/1"


def test_a_prompt_that_two_seeds_share_is_counted_once(pooled):
    assert pooled.prompts == 3


VERDICTS = [WIN, WIN, LOSS, TIE, WIN, LOSS]
OURS = [9, 8, 3, 4, 7, 5]
THEIRS = [4, 5, 6, 4, 9, 5]


@pytest.fixture(scope="module")
def pooled_lengths():
    """Three answers of different lengths with each of two seeds."""
    seeds = {
        seed: ContestVerdicts(
            list("xyz"),
            VERDICTS[start : start + 3],
            OURS[start : start + 3],
            THEIRS[start : start + 3],
        )
        for seed, start in ((0, 0), (1, 3))
    }
    return pool_contest(seeds, 300, 7)


def test_the_rate_at_equal_length_is_that_of_all_seeds_answers_together(pooled_lengths):
    verdicts = [Verdict(verdict) for verdict in VERDICTS]
    ours = ["a" * length for length in OURS]
    theirs = ["b" * length for length in THEIRS]
    assert pooled_lengths.equal_length == length_controlled_rate(verdicts, ours, theirs, 300, 7)
    assert pooled_lengths.equal_length.uncontrolled == pytest.approx(3.5 / 6)
    assert pooled_lengths.equal_length.rate != pooled_lengths.equal_length.uncontrolled


def test_the_lengths_of_a_contest_are_means_over_all_answers(pooled_lengths):
    assert pooled_lengths.ours == 6.0
    assert pooled_lengths.theirs == pytest.approx(33 / 6)


@pytest.mark.parametrize("verdict", [WIN, LOSS])
def test_a_contest_with_one_outcome_has_an_interval_without_width(verdict):
    rate = pool_contest({0: contest([verdict] * 4)}, 500).rate
    assert rate.low == rate.rate
    assert rate.high == rate.rate


def test_a_contest_without_answers_has_no_lengths_and_no_rate():
    pooled = pool_contest({0: contest([])}, 500)
    assert pooled.answers == 0
    assert math.isnan(pooled.ours)
    assert math.isnan(pooled.theirs)
    assert math.isnan(pooled.rate.rate)
    assert format_equal_length(pooled.equal_length) == "-"


def test_several_answers_to_a_prompt_are_one_unit_of_the_interval():
    answers = [answer_id(prompt, number) for prompt in "abcdefgh" for number in range(4)]
    verdicts = [WIN] * 16 + [LOSS] * 16
    pooled = pool_contest({0: ContestVerdicts(answers, verdicts, [5] * 32, [5] * 32)}, 2000)
    independent = pool_contest({0: ContestVerdicts(list(map(str, range(32))), verdicts, [5] * 32, [5] * 32)})
    assert (pooled.answers, pooled.prompts) == (32, 8)
    assert pooled.rate.rate == 0.5
    assert pooled.rate.high - pooled.rate.low > 1.5 * (independent.rate.high - independent.rate.low)
    assert pooled.by_seed[0] == pooled.rate
