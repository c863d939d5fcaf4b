"""Contests between two policies' answers, pooled over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from components.data.records import answered_prompt
from components.evaluation.length_control import LengthControlledRate, length_controlled_rate_from_lengths
from components.evaluation.winrate import Verdict, WinRate, win_rate


@dataclass(frozen=True)
class ContestVerdicts:
    """A judge's verdicts on the answers of two policies, with one seed.

    Attributes:
        prompts: ids of the answers, see components.data.records.answer_id.
        verdicts: values of Verdict, one per answer.
        ours, theirs: lengths of the answers (characters).
        consistency: share of the pairs on which the judge's verdicts in both orders agree; None if
            it was not stored.
    """

    prompts: list[str]
    verdicts: list[str]
    ours: list[int]
    theirs: list[int]
    consistency: float | None = None


@dataclass(frozen=True)
class PooledContest:
    """A contest over the answers of all seeds.

    Attributes:
        rate: over all answers, with a bootstrap interval over them (over a seed's prompts, where they
            have several answers each), which holds for these policies and for no other seed.
        equal_length: the rate at equal length, a tie half a win, with its interval.
        by_seed: the rate of each seed.
        answers: number of answers.
        prompts: number of different prompts.
        ours, theirs: mean lengths (characters).
    """

    rate: WinRate
    equal_length: LengthControlledRate
    by_seed: dict[int, WinRate]
    answers: int
    prompts: int
    ours: float
    theirs: float


def pool_contest(
    by_seed: Mapping[int, ContestVerdicts], resamples: int = 2000, seed: int = 0
) -> PooledContest:
    """Pool a contest over the answers of all seeds.

    Args:
        by_seed: verdicts of each seed.
        resamples, seed: of the bootstrap intervals over the answers.
    """
    verdicts: list[Verdict] = []
    ours: list[int] = []
    theirs: list[int] = []
    prompts: set[str] = set()
    units: list[tuple[int, str]] = []
    rates: dict[int, WinRate] = {}
    for number, contest in by_seed.items():
        verdicts += [Verdict(verdict) for verdict in contest.verdicts]
        ours += contest.ours
        theirs += contest.theirs
        answered = [answered_prompt(answer) for answer in contest.prompts]
        prompts |= set(answered)
        units += [(number, prompt) for prompt in answered]
        own = [Verdict(verdict) for verdict in contest.verdicts]
        rates[number] = win_rate(own, resamples, seed, answered)
    return PooledContest(
        rate=win_rate(verdicts, resamples, seed, units),
        equal_length=length_controlled_rate_from_lengths(verdicts, ours, theirs, resamples, seed, units),
        by_seed=rates,
        answers=len(verdicts),
        prompts=len(prompts),
        ours=float(np.mean(ours)) if ours else math.nan,
        theirs=float(np.mean(theirs)) if theirs else math.nan,
    )


def format_counts(rate: WinRate) -> str:
    """Wins, ties and losses."""
    return f"{rate.wins}/{rate.ties}/{rate.losses}"


def format_equal_length(rate: LengthControlledRate) -> str:
    """Rate at equal length, and its interval; '-' if it is not determined."""
    return "-" if math.isnan(rate.rate) else f"{rate.rate:.1%} [{rate.low:.1%}, {rate.high:.1%}]"
