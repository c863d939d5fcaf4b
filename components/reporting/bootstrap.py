"""A paired bootstrap over seeds and the units of a seed.

Units are what a figure of one seed is a mean of: prompts, questions or clients. Seeds are resampled with
replacement. Units that several seeds have in common (the same prompts) are resampled once for all of
them, as the rows and columns of a table are (crossed): drawn anew for each seed, they would count as
further units, and the interval would cover the mean the less often, the more seeds there are. Units
that belong to one seed each are resampled within each drawn seed (nested).

The interval is the 95% percentile interval of the resampled means. With few seeds it is too narrow: of
three seeds with one value each, it reaches at most from the smallest to the largest one, which enclose
their mean with a probability of three quarters at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Stratum = Mapping[str, Sequence[float]]
"""Values by unit, as many for each."""

CELLS = 2**22
"""Values that are resampled at once."""
TAIL = 0.025
"""Share of the resamples on each side of an interval."""


def resample_means(
    seeds: Sequence[Mapping[str, Stratum]], resamples: int, numbers: np.random.Generator
) -> Array:
    """Means over resampled seeds of the sums of their strata's means over resampled units, [resamples, C].

    Args:
        seeds: of each seed, its strata of units, by name. The values of a unit are drawn together,
            so that differences within it stay paired; strata are drawn independently. A stratum of one
            unit is a number that is known of the seed as a whole.
    """
    drawn = numbers.integers(len(seeds), size=(resamples, len(seeds)))
    totals: Array | float = 0.0
    for name in dict.fromkeys(name for strata in seeds for name in strata):
        strata = {seed: own[name] for seed, own in enumerate(seeds) if name in own}
        counts = Counter(unit for stratum in strata.values() for unit in stratum)
        resample = _resample_shared if max(counts.values()) > 1 else _resample_nested
        totals = totals + resample(strata, drawn, numbers)
    return np.asarray(totals) / len(seeds)


def _resample_nested(
    strata: Mapping[int, Stratum], drawn: npt.NDArray[np.int64], numbers: np.random.Generator
) -> Array:
    """Sums over drawn seeds of means over units, which are drawn for each seed of a resample."""
    tables = {seed: np.array(list(stratum.values()), dtype=np.float64) for seed, stratum in strata.items()}
    totals = np.zeros((len(drawn), next(iter(tables.values())).shape[1]))
    for position in range(drawn.shape[1]):
        for seed, units in tables.items():
            rows = np.nonzero(drawn[:, position] == seed)[0]
            totals[rows] += _draw_means(units, len(rows), numbers)
    return totals


def _resample_shared(
    strata: Mapping[int, Stratum], drawn: npt.NDArray[np.int64], numbers: np.random.Generator
) -> Array:
    """Sums over drawn seeds of means over units, which are drawn once per resample from all units.

    A seed none of whose units was drawn, which may happen if seeds share a few only, draws its own.
    """
    places = {
        unit: n for n, unit in enumerate(dict.fromkeys(u for stratum in strata.values() for u in stratum))
    }
    batch = max(1, CELLS // len(places))
    parts = []
    for start in range(0, len(drawn), batch):
        seeds = drawn[start : start + batch]
        weights = numbers.multinomial(len(places), [1 / len(places)] * len(places), size=len(seeds))
        total: Array | float = 0.0
        for seed, stratum in strata.items():
            units = np.array(list(stratum.values()), dtype=np.float64)
            own = weights[:, [places[unit] for unit in stratum]]
            sizes = own.sum(axis=1, keepdims=True)
            means = own @ units / np.maximum(sizes, 1)
            empty = np.nonzero(sizes[:, 0] == 0)[0]
            means[empty] = _draw_means(units, len(empty), numbers)
            total = total + (seeds == seed).sum(axis=1, keepdims=True) * means
        parts.append(np.asarray(total))
    return np.concatenate(parts)


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
    seeds: Sequence[Mapping[str, Stratum]], resamples: int, numbers: np.random.Generator
) -> tuple[float, float]:
    """The 95% interval of a mean; units have one value."""
    return _quantiles(resample_means(seeds, resamples, numbers)[:, 0])


def share_interval(
    seeds: Sequence[Stratum], decided: int, resamples: int, numbers: np.random.Generator
) -> tuple[float, float]:
    """The 95% interval of wins / (wins + losses).

    A resample without either may be any share: it counts as 0 for the lower bound and as 1 for the
    upper one. Where only one side won, resamples know no other outcome; the interval then reaches at
    least to the exact binomial bound.

    Args:
        seeds: of each seed, its wins and losses by prompt, each multiplied by the number of prompts.
        decided: number of different prompts with a win or a loss.
    """
    wins, losses = resample_means([{"": stratum} for stratum in seeds], resamples, numbers).T
    with np.errstate(invalid="ignore"):
        shares = wins / (wins + losses)
    low = _quantiles(np.nan_to_num(shares, nan=0.0))[0]
    high = _quantiles(np.nan_to_num(shares, nan=1.0))[1]
    totals = np.array([unit for stratum in seeds for unit in stratum.values()]).sum(axis=0)
    bound = TAIL ** (1 / decided)
    if not totals[1]:
        low = min(low, bound)
    if not totals[0]:
        high = max(high, 1 - bound)
    return low, high


def _quantiles(values: Array) -> tuple[float, float]:
    low, high = np.quantile(values, [TAIL, 1 - TAIL])
    return float(low), float(high)
