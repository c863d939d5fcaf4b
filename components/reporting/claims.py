"""The claims of a benchmark's file, checked against its figures.

The interval of a claim is over seeds and prompts (or clients, or questions), by components of variance
(components/evaluation/intervals.py). A claim holds if the whole 95% interval meets it, and fails if none of
the interval does, also after the correction for the number of claims of the file (Holm 1979); it is
undecided otherwise, and with fewer than three seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from components.config.benchmark import OF_CONTESTS, WINS, WINS_EQUAL_LENGTH, Claim
from components.evaluation.contests import LABELS, equal_length
from components.evaluation.intervals import LEVEL, Estimate, estimate_mean, estimate_share, holm
from components.evaluation.winrate import Verdict
from components.reporting.benchmark_results import BenchmarkResults
from components.reporting.formats import format_figure, format_number, format_spreads
from components.reporting.metrics import alias_of, named
from components.reporting.page import Table
from components.reporting.units import PROMPTS, Units

HOLDS = "holds"
FAILS = "fails"
UNDECIDED = "undecided"
MAY_BE_CHANCE = "length-controlled it may be chance"

SPREADS = "sd between; within seeds"
"""Heading of a figure's standard deviations."""
ROUNDING = 1e-9
"""Tolerance of a comparison of a number with a limit, and of a figure with its units' mean."""
ENOUGH_SEEDS = 3
"""Seeds that a verdict needs, unless the figure is exact."""
ONE_SEED = "one seed"
EQUAL = "equal with all seeds, so that nothing is known of what varies"


@dataclass(frozen=True)
class Finding:
    """A claim and its numbers."""

    claim: str  # as text
    figure: str  # label of what it is on
    limit: float  # minimum or lower bound of the figure
    verdict: str = UNDECIDED  # HOLDS, FAILS or UNDECIDED
    value: float | None = None  # the figure over all seeds; None if it was not measured
    low: float | None = None  # the 95% interval; None without one
    high: float | None = None
    reason: str = ""  # why there is no interval, or what else a reader of the verdict must know
    drawn: str = "-"  # what the interval is over
    by_seed: str = "-"  # the numbers, as text
    overall: str = "-"
    estimate: Estimate | None = None  # what the interval is of; None without one, and of exact figures
    beside: str = ""  # of a rate at equal length, the wins and losses as they are
    has_few_seeds: bool = False  # fewer than a verdict needs
    alone: str = UNDECIDED  # the verdict by its own interval, before the correction for the number of claims

    @property
    def spreads(self) -> str:
        """Standard deviation over the seeds, and over the units of a seed."""
        return format_spreads(self.estimate)

    @property
    def detectable(self) -> str:
        """The smallest difference from the limit that these seeds and units would decide in 80% of cases."""
        return "-" if self.estimate is None else format_number(self.estimate.detectable())

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.verdict}{interval}" + (f" ({self.reason})" if self.reason else "")


def check_claims(claims: Sequence[Claim], results: BenchmarkResults) -> list[Finding]:
    """Check each claim against each arm that it names."""
    findings = []
    for claim in claims:
        opponents: list[str | None] = [*claim.against] or [None]
        findings += [_check(claim, other, results) for other in opponents]
    return _corrected(findings)


def _corrected(findings: Sequence[Finding]) -> list[Finding]:
    """The findings with verdicts that are corrected for the number of those that could be decided."""
    p_values: dict[int, float] = {}
    for n, one in enumerate(findings):
        if one.estimate is not None and not one.has_few_seeds:
            # A limit that is further away by the tolerance, which counts where nothing varies.
            away = -ROUNDING if one.estimate.value >= one.limit - ROUNDING else ROUNDING
            p_values[n] = one.estimate.p_value(one.limit + away)
    adjusted = dict(zip(p_values, holm([*p_values.values()]), strict=True))
    corrected = []
    for n, finding in enumerate(findings):
        if finding.verdict != UNDECIDED and adjusted.get(n, 0.0) > 1 - LEVEL:
            words = f"{finding.verdict} alone; p is {adjusted[n]:.2g} corrected for {len(p_values)} claims"
            reason = ", ".join(filter(None, (words, finding.reason)))
            finding = replace(finding, verdict=UNDECIDED, reason=reason)
        corrected.append(finding)
    return corrected


def claims_table(findings: Sequence[Finding]) -> Table:
    """The findings as a table of the report."""
    rows = [
        {
            "claim": finding.claim,
            "verdict [95%]": str(finding),
            "interval over": finding.drawn,
            SPREADS: finding.spreads,
            "detectable": finding.detectable,
            "by seed": finding.by_seed,
            "over all seeds": finding.overall,
        }
        for finding in findings
    ]
    return Table.of(
        "Claims",
        rows,
        "Claims of the benchmark's file. A claim holds if the whole 95% interval meets it, fails if none of"
        " it does, and is undecided otherwise. Intervals are over seeds and prompts (or clients, or"
        " questions), by components of variance: what differs between seeds, between prompts that all seeds"
        " have, and the rest. A verdict needs three seeds, unless the figure is a count, and must remain"
        " after Holm's correction for the number of claims. Beside it are the standard deviations over seeds"
        " and over the units of a seed, and the smallest difference from the limit that as many seeds and"
        " units would decide in 80% of cases (one claim, not corrected).",
    )


def _check(claim: Claim, other: str | None, results: BenchmarkResults) -> Finding:
    of_contests = claim.figure in OF_CONTESTS
    alias = alias_of(claim.figure)
    figure = CONTEST_LABELS[claim.figure] if of_contests else alias.label
    name = f"{claim.arm} against {other}"
    if not of_contests:
        factor = "" if claim.times == 1 else f"{claim.times:g} x "
        name = claim.arm + (f" less {factor}{other}" if other else "")
    limit = f"{'above' if claim.at_least is None else 'at least'} {claim.limit:g}"
    finding = Finding(f"{name}: {figure} {limit}", figure, claim.limit)
    if of_contests:
        finding, seeds = _measure_contest(finding, claim.figure, name, results)
    else:
        finding, seeds = _measure_figure(finding, claim, other, results)
    enough = seeds >= ENOUGH_SEEDS or (alias.is_exact and not of_contests)
    verdict = _verdict(claim, finding) if enough else UNDECIDED
    remarks = [finding.reason] if finding.reason else []
    if 0 < seeds < len(results.seeds):
        remarks.append(f"{seeds} of {len(results.seeds)} seeds")
    elif finding.low is not None and not enough:
        remarks.append(f"{seeds} seeds")
    if claim.figure == WINS and verdict == HOLDS and not results.pools[name].length_controlled_low > 0.5:
        remarks.append(MAY_BE_CHANCE)
    reason = ", ".join(remarks)
    return replace(finding, verdict=verdict, alone=verdict, reason=reason, has_few_seeds=not enough)


def _verdict(claim: Claim, finding: Finding) -> str:
    if finding.low is None or finding.high is None:
        return UNDECIDED
    if claim.at_least is not None:
        holds, fails = finding.low >= claim.limit - ROUNDING, finding.high < claim.limit - ROUNDING
    else:
        holds, fails = finding.low > claim.limit + ROUNDING, finding.high <= claim.limit + ROUNDING
    return HOLDS if holds else FAILS if fails else UNDECIDED


def _with_numbers(finding: Finding, by_seed: Mapping[int, str], overall: str) -> Finding:
    words = "; ".join(f"{seed}: {text}" for seed, text in by_seed.items())
    return replace(finding, by_seed=words, overall=overall)


# --- contests

DECIDED = (Verdict.FIRST, Verdict.SECOND)
"""Verdicts that are no ties: a win and a loss."""
NO_LENGTHS = "lengths and verdicts cannot be told apart"
ONE_SEEDS_RESAMPLES = 100
"""Of the bootstrap of one seed's figures, whose interval is not used."""

CONTEST_LABELS = {
    WINS: "share of wins among wins and losses",
    WINS_EQUAL_LENGTH: "length-controlled rate, a tie half a win",
}


def _measure_contest(
    finding: Finding, figure: str, name: str, results: BenchmarkResults
) -> tuple[Finding, int]:
    """The finding with a contest's numbers, and how many seeds have verdicts that count."""
    contests = results.contests.get(name, {})
    if not contests:
        return replace(finding, reason="not measured"), 0
    pool = results.pools[name]
    decided, equal = _decided_words(pool.wins, pool.losses), format_figure(pool, "length_controlled")
    counted = DECIDED if figure == WINS else tuple(LABELS)
    every = [one for one in contests.values() if any(verdict in counted for verdict in one.verdicts)]
    if figure == WINS:
        by_seed = {n: _decided_words(*map(one.verdicts.count, DECIDED)) for n, one in contests.items()}
        finding = _with_numbers(finding, by_seed, f"{decided}; length-controlled, a tie half, {equal}")
        if not pool.wins + pool.losses:
            return replace(finding, reason="0 wins to 0 losses"), len(contests)
        value = pool.wins / (pool.wins + pool.losses)
    else:
        rates = {n: one.figures(ONE_SEEDS_RESAMPLES).length_controlled for n, one in contests.items()}
        finding = _with_numbers(
            finding, {n: f"{rate:.3f}" for n, rate in rates.items()}, f"{equal}; {decided}"
        )
        value = pool.length_controlled
        if not math.isfinite(value):
            return replace(finding, reason=NO_LENGTHS), len(contests)
    finding = replace(finding, value=value)
    if len(every) == 1:
        return replace(finding, reason=ONE_SEED), 1
    estimate = equal_length(every)
    if figure == WINS:
        estimate = estimate_share([one.counts(one.verdicts, (Verdict.SECOND,)) for one in every])
    if estimate is None:
        return replace(finding, reason=NO_LENGTHS), len(contests)
    low, high = estimate.interval()
    beside = "" if figure == WINS else f" (wins to losses {decided})"
    drawn = _drawn_words([len(set(contest.units)) for contest in every], PROMPTS)
    return replace(finding, low=low, high=high, estimate=estimate, beside=beside, drawn=drawn), len(every)


def _decided_words(wins: int, losses: int) -> str:
    share = f" ({wins / (wins + losses):.3f})" if wins + losses else ""
    return f"{wins} to {losses}{share}"


# --- figures


class _Term(NamedTuple):
    """An arm's figure with one seed, and the factor that it enters a claim with."""

    factor: float
    value: float
    units: Units  # of a figure with one value per seed, that value without a kind

    @property
    def is_mean(self) -> bool:
        return math.isclose(self.units.mean, self.value, rel_tol=ROUNDING, abs_tol=ROUNDING)

    def strata(self) -> dict[str, dict[str, float]]:
        """Its values by stratum and unit; their strata's means add up to the factor times the figure."""
        share = self.factor / len(self.units.strata)
        return {
            name: {unit: share * value for unit, value in own.items()}
            for name, own in self.units.strata.items()
        }


def _measure_figure(
    finding: Finding, claim: Claim, other: str | None, results: BenchmarkResults
) -> tuple[Finding, int]:
    """The finding with a figure's numbers, and of how many seeds it is known."""
    factors = {claim.arm: 1.0} | ({other: -claim.times} if other else {})
    by_arm: dict[str, dict[int, _Term]] = {arm: {} for arm in factors}
    for arm, factor in factors.items():
        for seed, run in results.metrics.get(arm, {}).items():
            if (value := named(run, claim.figure)) is not None:
                units = named(results.units.get(arm, {}).get(seed, {}), claim.figure)
                by_arm[arm][seed] = _Term(factor, value, units or Units("", {"": {"": value}}))
    if missing := [arm for arm, own in by_arm.items() if not own]:
        return replace(finding, reason=f"not measured: {', '.join(missing)}"), 0
    shared = sorted(set.intersection(*map(set, by_arm.values())))
    if not shared:
        return replace(finding, reason="no seed has both arms"), 0
    terms = {seed: [own[seed] for own in by_arm.values()] for seed in shared}
    totals = {seed: sum(term.factor * term.value for term in own) for seed, own in terms.items()}
    mean = float(np.mean(list(totals.values())))
    by_seed = {seed: _difference_words(own) for seed, own in terms.items()}
    finding = replace(_with_numbers(finding, by_seed, f"mean {mean:.3f}"), value=mean)
    if reason := _why_no_interval(claim.figure, terms, totals):
        return replace(finding, reason=reason), len(shared)
    paired = all(map(_are_paired, terms.values()))
    kind = next((term.units.unit for term in chain.from_iterable(terms.values()) if term.units.unit), "")
    drawn = _drawn_words([max(len(term.units.values) for term in own) for own in terms.values()], kind)
    if kind and len(factors) > 1:
        drawn += ", paired" if paired else ", not paired"
    if alias_of(claim.figure).is_exact:  # a count that is the same in every run of the recipe, or nearly so
        low, high = min(totals.values()), max(totals.values())
        return replace(finding, low=low, high=high, drawn=drawn), len(shared)
    estimate = estimate_mean([_strata(own, paired) for own in terms.values()])
    if not any(one.variance for one in estimate.components):
        return replace(finding, reason=EQUAL), len(shared)
    low, high = estimate.interval()
    return replace(finding, low=low, high=high, estimate=estimate, drawn=drawn), len(shared)


def _why_no_interval(figure: str, terms: Mapping[int, Sequence[_Term]], totals: Mapping[int, float]) -> str:
    """Why numbers have no interval; empty if they have one.

    One seed has none, nor have two with one value each, unless the figure is exact.
    """
    if unknown := [str(seed) for seed, total in totals.items() if not math.isfinite(total)]:
        return f"not a finite number with seed {', '.join(unknown)}"
    if other := [str(seed) for seed, own in terms.items() if not all(term.is_mean for term in own)]:
        return f"not the mean of its units with seed {', '.join(other)}"
    if alias_of(figure).is_exact:
        return ""
    if len(terms) == 1:
        return ONE_SEED
    if len(terms) < ENOUGH_SEEDS and all(
        len(term.units.values) == 1 for own in terms.values() for term in own
    ):
        return f"one value per seed, which needs {ENOUGH_SEEDS} seeds"
    return ""


def _are_paired(terms: Sequence[_Term]) -> bool:
    """Whether the figures of a seed are of the same units."""
    unit_names = [{name: set(stratum) for name, stratum in term.strata().items()} for term in terms]
    return all(names == unit_names[0] for names in unit_names)


def _strata(terms: Sequence[_Term], paired: bool) -> dict[str, dict[str, float]]:
    """The strata of a seed: differences by unit where arms are paired, else both arms'."""
    every = [term.strata() for term in terms]
    if paired:
        return {
            name: {unit: sum(strata[name][unit] for strata in every) for unit in stratum}
            for name, stratum in every[0].items()
        }
    return {
        f"{number} {name}": dict(stratum)
        for number, strata in enumerate(every)
        for name, stratum in strata.items()
    }


def _drawn_words(counts: Sequence[int], kind: str) -> str:
    """Seeds and the numbers of their units; the kind is empty for figures with one value per seed."""
    seeds = "1 seed" if len(counts) == 1 else f"{len(counts)} seeds"
    if not kind:
        return seeds
    units = str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return f"{seeds} x {units} {kind}"


def _difference_words(terms: Sequence[_Term]) -> str:
    first, *others = terms
    words = f"{first.value:.3f}"
    for other in others:  # at most one
        factor = "" if other.factor == -1 else f"{-other.factor:g} x "
        words += f" - {factor}{other.value:.3f} = {first.value + other.factor * other.value:.3f}"
    return words
