"""Verdicts and win rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from components.seeding import generator


class Verdict(Enum):
    """A judge's word on two responses."""

    FIRST = "response 1"
    SECOND = "response 2"
    TIE = "tie"
    UNPARSABLE = "unparsable"

    def exchanged(self) -> Verdict:
        """The same word, had the two responses been shown the other way round."""
        return {Verdict.FIRST: Verdict.SECOND, Verdict.SECOND: Verdict.FIRST}.get(self, self)


@dataclass(frozen=True)
class WinRate:
    """How often response 1 was better.

    Attributes:
        wins, ties, losses, unparsable: counts.
        rate: wins / (wins + ties + losses), ties in the denominator as in FedBiscuit table 1; unparsable verdicts are
            counted beside it and are in neither part. NaN where nothing could be parsed.
        low, high: 95% percentile-bootstrap interval of the rate over the verdicts.
    """

    wins: int
    ties: int
    losses: int
    unparsable: int
    rate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.rate:.1%} [{self.low:.1%}, {self.high:.1%}]"


def win_rate(verdicts: Sequence[Verdict], resamples: int = 2000, seed: int = 0) -> WinRate:
    """Win rate of response 1 with a 95% percentile-bootstrap interval.

    Args:
        verdicts: one for each prompt.
        resamples: of the bootstrap.
        seed: the resamples are a function of it.
    """
    verdicts = [Verdict(verdict) for verdict in verdicts]
    count = {v: sum(given is v for given in verdicts) for v in Verdict}
    outcomes = np.array([v is Verdict.FIRST for v in verdicts if v is not Verdict.UNPARSABLE], dtype=float)
    if not len(outcomes):
        return WinRate(0, 0, 0, count[Verdict.UNPARSABLE], float("nan"), float("nan"), float("nan"))
    low, high = bootstrap_interval(outcomes, resamples, seed)
    return WinRate(count[Verdict.FIRST], count[Verdict.TIE], count[Verdict.SECOND], count[Verdict.UNPARSABLE], float(outcomes.mean()), low, high)


def bootstrap_interval(outcomes: Sequence[bool] | np.ndarray, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """The 95% percentile-bootstrap interval of a share.

    Args:
        outcomes: whether it holds, row by row; at least one row.
        resamples: of the bootstrap.
        seed: the resamples are a function of it.
    """
    means = generator(seed, "bootstrap").binomial(len(outcomes), np.mean(outcomes), size=resamples) / len(outcomes)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def combine_orders(given: Verdict, exchanged: Verdict) -> Verdict:
    """One verdict from a judge's words on both orders: what both say, a tie where they disagree.

    Args:
        given: response 1 shown first.
        exchanged: the word on the exchanged responses, as it was said (so `Verdict.SECOND` is for response 1).

    Returns:
        a verdict on the responses as given; unparsable where either word is.
    """
    second = exchanged.exchanged()
    if Verdict.UNPARSABLE in (given, second):
        return Verdict.UNPARSABLE
    return given if given is second else Verdict.TIE


def orders_agree(given: Sequence[Verdict], exchanged: Sequence[Verdict]) -> list[bool]:
    """Whether a judge's words on both orders agree, one a pair that could be parsed in both; their mean is the position consistency.

    Args:
        given, exchanged: as for combine_orders, pair by pair.
    """
    return [one is other.exchanged() for one, other in zip(given, exchanged, strict=True) if Verdict.UNPARSABLE not in (one, other)]
