"""Estimates over seeds and the units of a seed, with intervals by components of variance.

A figure of one seed is the mean of its units: prompts, questions or clients. Seeds may have units in
common (the same prompts, crossed) or units of their own (nested). The value of unit u with seed s is read as

    y_su = mu + a_s + b_u + e_su

with a seed's effect a, a unit's effect b, which all seeds share that have the unit, and the rest e. The
variance of the mean over S seeds and U units is estimated by analysis of variance,

    V_seeds = var(seed means) / S    V_units = var(unit means) / U    V_rest = MS_rest / (S U)

where V_seeds and V_units contain V_rest once each. The interval is mean +- h with

    h^2 = t(S-1)^2 max(V_seeds - c V_rest, 0) + t(U-1)^2 max(V_units - c V_rest, 0) + t((S-1)(U-1))^2 V_rest

and c = 1/2, because V_rest is itself an estimate: in simulations (tests/evaluation/test_intervals.py) the
interval of 95% covers the mean in 93% of the cases or more, whichever of the components is the largest.
With nested units V_rest is that of the seeds' own units, (mean of var(units) / U) / S, and V_units is left
out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

Stratum = Mapping[str, float]
"""Values by unit."""

LEVEL = 0.95
POWER = 0.8
"""Probability with which a difference is decided that is called detectable."""
DRAWS = 4000
"""Of the simulation that finds it."""
REST_TAKEN = 0.5
"""c: how much of the variance of the rest is taken from those of seeds and units."""


class Component(NamedTuple):
    """A part of an estimate's variance."""

    variance: float
    freedom: float  # degrees of freedom that it is estimated with
    falls: bool = True  # with more seeds, which the variance of units that all seeds share does not


@dataclass(frozen=True)
class Estimate:
    """An estimate, and the variance that its components have.

    Attributes:
        value: the estimate.
        components: of the variance; the first one is that of seeds.
        between: standard deviation of the figure over the seeds.
        within: root mean square over the seeds of the standard deviation over a seed's units; NaN where
            seeds have one value each.
        is_share: whether the value is a share p in [0, 1], whose variances are those of asin(sqrt(p)), on
            which scale a share's variance does not depend on the share.
        sure: number of units that all agree, where the share is 0 or 1 and has no variance; else 0.
    """

    value: float
    components: tuple[Component, ...]
    between: float
    within: float = math.nan
    is_share: bool = False
    sure: int = 0

    def half_width(self, level: float = LEVEL) -> float:
        """Half of the interval's width, of a share on the scale of asin(sqrt(p))."""
        from scipy.special import stdtrit

        tail = (1 + level) / 2
        return math.sqrt(sum(float(stdtrit(freedom, tail)) ** 2 * one for one, freedom, _ in self.components))

    def detectable(self) -> float:
        """The smallest difference to a limit that an interval leaves out with the probability POWER.

        By simulation: with the components as the true variances, estimates deviate by a normal number, and
        components by chi-squared ones with their degrees of freedom. Of a share it is the difference to one
        half. NaN without variance.
        """
        from scipy.special import stdtrit

        if self.sure or not any(one.variance for one in self.components):
            return math.nan
        numbers = np.random.default_rng(0)
        widths = np.zeros(DRAWS)
        for one, freedom, _ in self.components:
            drawn = one * numbers.chisquare(freedom, DRAWS) / freedom
            widths += float(stdtrit(freedom, (1 + LEVEL) / 2)) ** 2 * drawn
        deviation = math.sqrt(sum(one.variance for one in self.components))
        needed = np.sqrt(widths) - deviation * numbers.standard_normal(DRAWS)
        distance = float(np.quantile(needed, POWER))
        return math.sin(min(math.pi / 4 + distance, math.pi / 2)) ** 2 - 0.5 if self.is_share else distance

    def with_seeds(self, count: int) -> Estimate:
        """The estimate as it would be with another number of seeds (>= 2) that vary as much.

        Variances of seeds and of the rest fall with their number. Degrees of freedom grow with it less one,
        and with it where seeds have units of their own. What seeds have in common stays.
        """
        if not self.components:
            return self
        held = self.components[0].freedom + 1
        of_seeds, *others = self.components
        by_seeds = (count - 1) / (held - 1)
        by_units = by_seeds if any(not one.falls for one in others) else count / held

        def scaled(one: Component, growth: float) -> Component:
            if not one.falls:
                return one
            return one._replace(variance=one.variance * held / count, freedom=one.freedom * growth)

        components = (scaled(of_seeds, by_seeds), *(scaled(one, by_units) for one in others))
        return replace(self, components=components)

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """The interval; of a share without variance, the exact binomial one."""
        if self.sure:
            bound = ((1 - level) / 2) ** (1 / self.sure)
            return (bound, 1.0) if self.value else (0.0, 1 - bound)
        half = self.half_width(level)
        if not self.is_share:
            return self.value - half, self.value + half
        middle = math.asin(math.sqrt(self.value))
        ends = max(middle - half, 0.0), min(middle + half, math.pi / 2)
        return math.sin(ends[0]) ** 2, math.sin(ends[1]) ** 2

    def p_value(self, limit: float) -> float:
        """The smallest 1 - level whose interval reaches to a limit: two-sided, against the limit itself."""
        if self.sure:
            limit = min(max(limit, 0.0), 1.0)
            return min(1.0, 2 * (limit if self.value else 1 - limit) ** self.sure)
        if self.is_share:
            limit = min(max(limit, 0.0), 1.0)
        one, other = (math.asin(math.sqrt(n)) if self.is_share else n for n in (self.value, limit))
        distance = abs(one - other)
        low, high = 0.0, 1.0  # of the level
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.half_width(middle) < distance else (low, middle)
        return 1 - low


def estimate_mean(seeds: Sequence[Mapping[str, Stratum]]) -> Estimate:
    """The mean over seeds of the sums of their strata's means.

    There are at least two seeds, each with its strata of units by name. A stratum of one unit is a number
    that is known of the seed as a whole.
    """
    count = len(seeds)
    figures = np.array([sum(np.mean(list(own.values())) for own in strata.values()) for strata in seeds])
    between = float(figures.std(ddof=1))
    of_seeds = between**2 / count
    of_units: list[Component] = []
    rest, rest_freedom = 0.0, 0.0
    for name in dict.fromkeys(name for strata in seeds for name in strata):
        strata = [own.get(name, {}) for own in seeds]
        held = Counter(unit for stratum in strata for unit in stratum)
        if max(held.values()) > 1 and len(held) > 1:
            units, own_rest = _shared_components(strata, count)
            variance = max(units - REST_TAKEN * own_rest, 0.0)
            of_units.append(Component(variance, len(held) - 1, falls=False))
            if own_rest:
                rest += own_rest
                rest_freedom += (sum(map(bool, strata)) - 1) * (len(held) - 1)
    if not of_units:
        own, freedom = _own_variance(seeds)
        components = [Component(max(of_seeds - REST_TAKEN * own / count, 0.0), count - 1.0)]
        components += [Component(own / count, freedom)] if own else []
    else:
        components = [Component(max(of_seeds - REST_TAKEN * rest, 0.0), count - 1.0), *of_units]
        components += [Component(rest, rest_freedom)] if rest_freedom else []
    values = [list(own.values()) for strata in seeds for own in strata.values() if len(own) > 1]
    spreads = [np.var(own, ddof=1) for own in values]
    within = float(np.sqrt(np.mean(spreads))) if spreads else math.nan
    return Estimate(float(figures.mean()), tuple(components), between, within)


def _own_variance(seeds: Sequence[Mapping[str, Stratum]]) -> tuple[float, float]:
    """The mean over seeds of the variance of a figure by a seed's own units, and its degrees of freedom.

    It is 0 of single values.
    """
    strata = [list(own.values()) for one in seeds for own in one.values() if len(own) > 1]
    total = sum(float(np.var(own, ddof=1)) / len(own) for own in strata)
    return total / len(seeds), float(sum(len(own) - 1 for own in strata))


def _shared_components(strata: Sequence[Stratum], count: int) -> tuple[float, float]:
    """Variances of the mean from units that seeds have in common, and from the rest.

    The latter is 0 where not all seeds have the same units: then nothing is taken from the others.
    """
    held = [stratum for stratum in strata if stratum]
    names = list(dict.fromkeys(unit for stratum in held for unit in stratum))
    sums = dict.fromkeys(names, 0.0)
    for stratum in held:
        mean = float(np.mean(list(stratum.values())))
        for unit, value in stratum.items():
            sums[unit] += (value - mean) / (count * len(stratum))
    size = len(names)
    of_units = size / (size - 1) * sum(one**2 for one in sums.values())
    if len(held) < 2 or any(set(stratum) != set(names) for stratum in held):
        return of_units, 0.0
    table = np.array([[stratum[unit] for unit in names] for stratum in held])
    left = table - table.mean(axis=1, keepdims=True)
    left -= left.mean(axis=0, keepdims=True)
    of_rest = float((left**2).sum()) / ((len(held) - 1) * (size - 1)) / (len(held) * size)
    return of_units, of_rest * (len(held) / count) ** 2


def estimate_share(seeds: Sequence[Mapping[str, tuple[float, float]]]) -> Estimate | None:
    """The share of all counts that are of the first kind, e.g. wins among wins and losses.

    Each seed has counts of both kinds by unit. Its variance is that of the mean of (w_su - p n_su) / n, which
    the share depends on in first order (the delta method), where w_su of the n_su counts of unit u with seed
    s are of the first kind, and n is their mean. Seeds without a count say nothing and are left out; None
    where fewer than two have one.
    """
    seeds = [units for units in seeds if any(sum(own) for own in units.values())]
    if len(seeds) < 2:
        return None
    wins = sum(own[0] for units in seeds for own in units.values())
    total = sum(sum(own) for units in seeds for own in units.values())
    share = wins / total
    shares = [
        sum(own[0] for own in units.values()) / sum(sum(own) for own in units.values()) for units in seeds
    ]
    between = float(np.std(shares, ddof=1))
    if share in (0.0, 1.0):
        sure = len({unit for units in seeds for unit, own in units.items() if sum(own)})
        return Estimate(share, (), between, is_share=True, sure=sure)
    moves = [
        {
            "": {
                unit: (won - share * (won + lost)) * len(seeds) * len(units) / total
                for unit, (won, lost) in units.items()
            }
        }
        for units in seeds
    ]
    return share_of(share, estimate_mean(moves), between)


def share_of(share: float, linear: Estimate, between: float) -> Estimate:
    """The estimate of a share in (0, 1) from that of the mean that it depends on in first order."""
    scale = 1 / (4 * share * (1 - share))  # the squared slope of asin(sqrt(p))
    components = tuple(one._replace(variance=one.variance * scale) for one in linear.components)
    return Estimate(share, components, between, linear.within, is_share=True)


def by_unit(
    units: Sequence[Hashable], values: Sequence[tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """The sums of pairs of counts by unit."""
    sums: dict[str, tuple[float, float]] = {}
    for unit, (first, second) in zip(units, values, strict=True):
        before = sums.get(str(unit), (0.0, 0.0))
        sums[str(unit)] = (before[0] + first, before[1] + second)
    return sums


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values that are corrected for their number (Holm 1979), in the given order."""
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, position in enumerate(sorted(range(len(p_values)), key=lambda n: p_values[n])):
        largest = max(largest, min(1.0, p_values[position] * (len(p_values) - rank)))
        adjusted[position] = largest
    return adjusted
