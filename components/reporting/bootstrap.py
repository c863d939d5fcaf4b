"""A paired hierarchical bootstrap: seeds with replacement, then the units within each drawn seed.

Units are what a figure of one seed is a mean of: prompts, questions or clients. The interval is the 95%
percentile interval of the resampled means. With few seeds it is too narrow: of three, it can reach no
further than from the smallest to the largest one, which cover their mean with a probability of three
quarters at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

CELLS = 2**22
"""Values that are resampled at once."""
TAIL = 0.025
"""Share of the resamples on each side of an interval."""


def resample_means(seeds: Sequence[Sequence[Array]], resamples: int, numbers: np.random.Generator) -> Array:
    """Means over drawn seeds of the sums of their groups' means over drawn units, [resamples, C].

    Args:
        seeds: of each seed, its groups of units, [N, C] each. The units of a group are drawn together,
            so that the columns, and differences within a unit, stay paired; groups are drawn
            independently. A group of one unit is a number that is known of the seed as a whole.
        resamples: number of resamples.
        numbers: draws them.
    """
    drawn = numbers.integers(len(seeds), size=(resamples, len(seeds)))
    totals = np.zeros((resamples, seeds[0][0].shape[1]))
    for position, groups in enumerate(seeds):
        rows = np.nonzero(drawn == position)[0]
        for units in groups:
            np.add.at(totals, rows, _draw_means(units, len(rows), numbers))
    return totals / len(seeds)


def _draw_means(units: Array, draws: int, numbers: np.random.Generator) -> Array:
    """Means over units [N, C] that are drawn with replacement, N at a time, [draws, C]."""
    count = len(units)
    batch = max(1, CELLS // count)
    means = np.empty((draws, units.shape[1]))
    for start in range(0, draws, batch):
        stop = min(start + batch, draws)
        means[start:stop] = units[numbers.integers(count, size=(stop - start, count))].mean(axis=1)
    return means


def mean_interval(
    seeds: Sequence[Sequence[Array]], resamples: int, numbers: np.random.Generator
) -> tuple[float, float]:
    """The 95% interval of a mean; groups are [N, 1]."""
    return _quantiles(resample_means(seeds, resamples, numbers)[:, 0])


def share_interval(
    seeds: Sequence[Sequence[Array]], decided: int, resamples: int, numbers: np.random.Generator
) -> tuple[float, float]:
    """The 95% interval of wins / (wins + losses).

    A resample without either may be any share: it counts as 0 for the lower bound and as 1 for the
    upper one. Where only one side won, resamples know no other outcome; the interval then reaches at
    least to the exact binomial bound.

    Args:
        seeds: of each seed, a group of [wins, losses] by prompt, [N, 2], each multiplied by N.
        decided: number of different prompts with a win or a loss.
        resamples, numbers: as of resample_means.
    """
    wins, losses = resample_means(seeds, resamples, numbers).T
    with np.errstate(invalid="ignore"):
        shares = wins / (wins + losses)
    low = _quantiles(np.nan_to_num(shares, nan=0.0))[0]
    high = _quantiles(np.nan_to_num(shares, nan=1.0))[1]
    totals = sum(groups[0].sum(axis=0) for groups in seeds)
    bound = TAIL ** (1 / decided)
    if not totals[1]:
        low = min(low, bound)
    if not totals[0]:
        high = max(high, 1 - bound)
    return low, high


def _quantiles(values: Array) -> tuple[float, float]:
    low, high = np.quantile(values, [TAIL, 1 - TAIL])
    return float(low), float(high)
