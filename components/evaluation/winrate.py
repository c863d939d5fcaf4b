"""Verdicts of judges, win rates, and the agreement of the two orders of presentation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from components.seeding import generator


class Verdict(Enum):
    """A judge's verdict on two responses."""

    FIRST = "response 1"
    SECOND = "response 2"
    TIE = "tie"
    UNPARSABLE = "unparsable"

    def swapped(self) -> Verdict:
        """The same verdict, stated for the responses in the opposite order."""
        return {Verdict.FIRST: Verdict.SECOND, Verdict.SECOND: Verdict.FIRST}.get(self, self)


@dataclass(frozen=True)
class WinRate:
    """How often response 1 was preferred.

    Attributes:
        wins, ties, losses, unparsable: number of verdicts.
        rate: wins / (wins + ties + losses). Ties count in the denominator, as in FedBiscuit (table
            1); unparsable verdicts count in neither part. NaN if no verdict could be parsed.
        low, high: 95% percentile-bootstrap interval of the rate over the verdicts, or over the prompts
            where there are several answers to each.
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


def win_rate(
    verdicts: Sequence[Verdict],
    resamples: int = 2000,
    seed: int = 0,
    prompts: Sequence[Hashable] | None = None,
) -> WinRate:
    """Compute the win rate of response 1 with its 95% percentile-bootstrap interval.

    Args:
        verdicts: one for each answer.
        resamples: number of bootstrap resamples.
        seed: determines the resamples.
        prompts: prompt of each answer; those of a prompt are drawn together. None: each has its own.
    """
    verdicts = [Verdict(verdict) for verdict in verdicts]
    counts = {kind: sum(verdict is kind for verdict in verdicts) for kind in Verdict}
    parsed = [n for n, verdict in enumerate(verdicts) if verdict is not Verdict.UNPARSABLE]
    wins = np.array([verdicts[n] is Verdict.FIRST for n in parsed], dtype=float)
    if not len(wins):
        return WinRate(0, 0, 0, counts[Verdict.UNPARSABLE], float("nan"), float("nan"), float("nan"))
    units = unit_indices([prompts[n] if prompts is not None else n for n in parsed])
    if len(set(units)) == len(units):
        low, high = bootstrap_interval(wins, resamples, seed)
    else:
        low, high = cluster_interval(wins, units, resamples, seed)
    return WinRate(
        counts[Verdict.FIRST],
        counts[Verdict.TIE],
        counts[Verdict.SECOND],
        counts[Verdict.UNPARSABLE],
        float(wins.mean()),
        low,
        high,
    )


def bootstrap_interval(
    outcomes: Sequence[bool] | npt.NDArray[np.float64], resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Compute the 95% percentile-bootstrap interval of a share.

    Args:
        outcomes: whether the property holds, row by row; at least one row.
        resamples: number of bootstrap resamples.
        seed: determines the resamples.

    Returns:
        the 2.5% and the 97.5% quantile of the resampled shares.
    """
    rows = len(outcomes)
    shares = generator(seed, "bootstrap").binomial(rows, np.mean(outcomes), size=resamples) / rows
    low, high = np.quantile(shares, [0.025, 0.975])
    return float(low), float(high)


def cluster_interval(
    outcomes: npt.NDArray[np.float64], units: Sequence[int], resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Compute the 95% percentile-bootstrap interval of a share over units of several rows.

    Args:
        outcomes: [N], 1 where the property holds.
        units: index of each row's unit, from 0. Units are drawn with all of their rows.
        resamples: number of bootstrap resamples.
        seed: determines the resamples.
    """
    rows = np.bincount(units).astype(float)
    held = np.bincount(units, weights=outcomes)
    count = len(rows)
    drawn = generator(seed, "bootstrap", "clusters").multinomial(
        count, np.full(count, 1 / count), size=resamples
    )
    low, high = np.quantile(drawn @ held / (drawn @ rows), [0.025, 0.975])
    return float(low), float(high)


def unit_indices(units: Sequence[Hashable]) -> list[int]:
    """Index of each row's unit, in the order in which units occur first."""
    indices: dict[Hashable, int] = {}
    return [indices.setdefault(unit, len(indices)) for unit in units]


def combine_orders(original: Verdict, swapped: Verdict) -> Verdict:
    """Combine a judge's verdicts on both orders: the common verdict, or a tie if they disagree.

    Args:
        original: verdict with response 1 shown first.
        swapped: verdict with response 2 shown first, as the judge stated it; `Verdict.SECOND` is
            then a verdict for response 1.

    Returns:
        a verdict on the responses in their original order; unparsable if either verdict is.
    """
    restored = swapped.swapped()
    if Verdict.UNPARSABLE in (original, restored):
        return Verdict.UNPARSABLE
    return original if original is restored else Verdict.TIE


def orders_agree(original: Sequence[Verdict], swapped: Sequence[Verdict]) -> list[bool]:
    """Whether a judge's verdicts on both orders agree, for each pair that was parsed in both.

    The mean is the judge's position consistency.

    Args:
        original, swapped: as in combine_orders, one verdict for each pair.
    """
    return [
        first is second.swapped()
        for first, second in zip(original, swapped, strict=True)
        if Verdict.UNPARSABLE not in (first, second)
    ]
