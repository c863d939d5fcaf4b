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
    seeds: Sequence[Hashable] | None = None,
) -> WinRate:
    """Compute the win rate of response 1 with its 95% percentile-bootstrap interval.

    Args:
        verdicts: one for each answer.
        resamples, seed: of the bootstrap.
        prompts: prompt of each answer; those of a prompt are drawn together. None: each has its own.
        seeds: seed of the run that gave each answer; seeds are drawn too, see draw_rows. None: one for all.
    """
    parsed = [n for n, verdict in enumerate(verdicts) if verdict is not Verdict.UNPARSABLE]
    wins = np.array([verdicts[n] is Verdict.FIRST for n in parsed], dtype=float)
    rate = low = high = float("nan")
    if parsed:
        rate = float(wins.mean())
        units = unit_indices([prompts[n] if prompts is not None else n for n in parsed])
        of_seeds = unit_indices([seeds[n] if seeds is not None else 0 for n in parsed])
        if max(of_seeds):
            low, high = seeds_interval(wins, units, of_seeds, resamples, seed)
        elif len(set(units)) == len(units):
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
    """Compute the 95% percentile-bootstrap interval of a share.

    Args:
        outcomes: whether the property holds, row by row; at least one row.
        resamples, seed: of the bootstrap.
    """
    rows = len(outcomes)
    shares = generator(seed, "bootstrap").binomial(rows, np.mean(outcomes), size=resamples) / rows
    low, high = np.quantile(shares, [0.025, 0.975])
    return float(low), float(high)


def cluster_interval(
    outcomes: npt.NDArray[np.float64], units: Sequence[int], resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """The same over units of several rows, which are drawn together.

    Args:
        outcomes: [N], 1 where the property holds.
        units: index of each row's unit, from 0.
        resamples, seed: of the bootstrap.
    """
    rows = np.bincount(units).astype(float)
    held = np.bincount(units, weights=outcomes)
    count = len(rows)
    drawn = generator(seed, "bootstrap", "clusters").multinomial(
        count, np.full(count, 1 / count), size=resamples
    )
    low, high = np.quantile(drawn @ held / (drawn @ rows), [0.025, 0.975])
    return float(low), float(high)


def seeds_interval(
    outcomes: npt.NDArray[np.float64],
    units: Sequence[int],
    seeds: Sequence[int],
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """The same over seeds and units, see draw_rows.

    Args:
        outcomes: [N], 1 where the property holds.
        units, seeds: index of each row's unit and of its seed, from 0.
        resamples, seed: of the bootstrap.
    """
    counts = draw_rows(np.array(units), np.array(seeds), resamples, generator(seed, "bootstrap", "seeds"))
    counts = counts[counts.any(axis=1)]
    low, high = np.quantile(counts @ outcomes / counts.sum(axis=1), [0.025, 0.975])
    return float(low), float(high)


def draw_rows(
    units: npt.NDArray[np.int64], seeds: npt.NDArray[np.int64], size: int, numbers: np.random.Generator
) -> npt.NDArray[np.int64]:
    """How often each of N rows is part of each resample, [size, N].

    Seeds are drawn with replacement. Units that several seeds have are drawn once for all of them, as the
    rows and columns of a table are; units of one seed each are drawn within each drawn seed. With few units
    in common a resample may have no row.

    Args:
        units, seeds: index of each row's unit and of its seed, from 0 [N].
    """
    n_units, n_seeds = int(units.max()) + 1, int(seeds.max()) + 1
    if n_seeds == 1:
        return numbers.multinomial(n_units, np.full(n_units, 1 / n_units), size=size)[:, units]
    drawn = numbers.multinomial(n_seeds, np.full(n_seeds, 1 / n_seeds), size=size)
    own = [np.unique(units[seeds == seed]) for seed in range(n_seeds)]
    if sum(map(len, own)) > n_units:
        chosen = numbers.multinomial(n_units, np.full(n_units, 1 / n_units), size=size)
        return drawn[:, seeds] * chosen[:, units]
    counts = np.empty((size, n_units), dtype=np.int64)
    for seed, members in enumerate(own):
        share = np.full(len(members), 1 / len(members))
        counts[:, members] = numbers.multinomial(drawn[:, seed] * len(members), share)
    return counts[:, units]


def unit_indices(units: Sequence[Hashable]) -> list[int]:
    """Index of each row's unit, in the order in which units occur first."""
    indices: dict[Hashable, int] = {}
    return [indices.setdefault(unit, len(indices)) for unit in units]


def orders_agree(original: Sequence[Verdict], swapped: Sequence[Verdict]) -> list[bool]:
    """Whether a judge's verdicts on both orders agree, for each pair that was parsed in both.

    The mean is the judge's position consistency.

    Args:
        original: verdict on each pair with response 1 shown first.
        swapped: with response 2 shown first, as the judge stated it; `Verdict.SECOND` is then a
            verdict for response 1.
    """
    return [
        first is second.swapped()
        for first, second in zip(original, swapped, strict=True)
        if Verdict.UNPARSABLE not in (first, second)
    ]
