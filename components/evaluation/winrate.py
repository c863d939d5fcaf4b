"""Verdicts of judges, win rates, and the agreement of the two orders of presentation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from components.results import WinRate
from components.seeding import generator


class Verdict(StrEnum):
    """A judge's verdict on two responses."""

    FIRST = "response 1"
    SECOND = "response 2"
    TIE = "tie"
    UNPARSABLE = "unparsable"

    @classmethod
    def of_margin(cls, margin: float) -> Verdict:
        """The verdict for the response with the larger score, by how much the first one's is larger."""
        if margin > 0:
            return cls.FIRST
        return cls.SECOND if margin < 0 else cls.TIE

    def swapped(self) -> Verdict:
        """The same verdict, stated for the responses in the opposite order."""
        return {Verdict.FIRST: Verdict.SECOND, Verdict.SECOND: Verdict.FIRST}.get(self, self)


def win_rate(
    verdicts: Sequence[Verdict],
    resamples: int = 2000,
    seed: int = 0,
    prompts: Sequence[Hashable] | None = None,
) -> WinRate:
    """The win rate of response 1 with its 95% percentile-bootstrap interval.

    Verdicts on answers to the same prompt are drawn together; without prompts each answer has its own.
    """
    parsed = [n for n, verdict in enumerate(verdicts) if verdict is not Verdict.UNPARSABLE]
    wins = np.array([verdicts[n] is Verdict.FIRST for n in parsed], dtype=float)
    rate = low = high = float("nan")
    if parsed:
        rate = float(wins.mean())
        units = unit_indices([prompts[n] if prompts is not None else n for n in parsed])
        if len(set(units)) == len(units):
            low, high = bootstrap_interval(wins, resamples, seed)
        else:
            low, high = cluster_interval(wins, units, resamples, seed)
    return WinRate(
        win_rate=rate,
        low=low,
        high=high,
        wins=verdicts.count(Verdict.FIRST),
        ties=verdicts.count(Verdict.TIE),
        losses=verdicts.count(Verdict.SECOND),
        unparsable=verdicts.count(Verdict.UNPARSABLE),
    )


def bootstrap_interval(
    outcomes: Sequence[bool] | npt.NDArray[np.float64], resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """The 95% percentile-bootstrap interval of the share of at least one outcome that is true."""
    rows = len(outcomes)
    shares = generator(seed, "bootstrap").binomial(rows, np.mean(outcomes), size=resamples) / rows
    low, high = np.quantile(shares, [0.025, 0.975])
    return float(low), float(high)


def cluster_interval(
    outcomes: npt.NDArray[np.float64], units: Sequence[int], resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """The same of outcomes [N] of 0 and 1, whose units, by index from 0, are drawn together."""
    rows = np.bincount(units).astype(float)
    held = np.bincount(units, weights=outcomes)
    count = len(rows)
    drawn = generator(seed, "bootstrap", "clusters").multinomial(
        count, np.full(count, 1 / count), size=resamples
    )
    low, high = np.quantile(drawn @ held / (drawn @ rows), [0.025, 0.975])
    return float(low), float(high)


def draw_units(
    units: npt.NDArray[np.int64], size: int, numbers: np.random.Generator
) -> npt.NDArray[np.int64]:
    """How often each of N rows is part of each resample of units, by index from 0 [N]; [size, N]."""
    count = int(units.max()) + 1
    return numbers.multinomial(count, np.full(count, 1 / count), size=size)[:, units]


def unit_indices(units: Sequence[Hashable]) -> list[int]:
    """Index of each row's unit, in the order in which units occur first."""
    indices: dict[Hashable, int] = {}
    return [indices.setdefault(unit, len(indices)) for unit in units]


def orders_agree(original: Sequence[Verdict], swapped: Sequence[Verdict]) -> list[bool]:
    """Whether a judge's verdicts on both orders agree, for each pair that was parsed in both.

    The mean is the judge's position consistency. A swapped verdict is as the judge stated it, so that
    `Verdict.SECOND` is one for response 1.
    """
    return [
        first is second.swapped()
        for first, second in zip(original, swapped, strict=True)
        if Verdict.UNPARSABLE not in (first, second)
    ]
