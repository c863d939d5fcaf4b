"""The claims of a benchmark's file, checked against its figures.

A claim holds if the whole 95% interval over seeds and prompts (or clients, or questions) meets it,
fails if none of the interval does, and is undecided otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from components.config.benchmark import WINS, Claim
from components.evaluation.contests import Contest
from components.evaluation.winrate import Verdict
from components.reporting.benchmark_results import BenchmarkResults
from components.reporting.bootstrap import Stratum, mean_interval, share_interval
from components.reporting.formats import format_equal_length
from components.reporting.metrics import alias_of, named
from components.reporting.page import Table
from components.reporting.units import PROMPTS, Units
from components.seeding import generator

HOLDS = "holds"
FAILS = "fails"
UNDECIDED = "undecided"
MAY_BE_CHANCE = "at equal length it may be chance"

ROUNDING = 1e-9
"""Tolerance of a comparison of a number with a limit, and of a figure with its units' mean."""
ENOUGH_SEEDS = 3
"""Seeds that a verdict needs, unless the figure is exact."""
ONE_SEED = "one seed"

DECIDED = (Verdict.FIRST, Verdict.SECOND)
"""Verdicts that are no ties: a win and a loss."""


@dataclass(frozen=True)
class Finding:
    """A claim and its numbers."""

    claim: str  # as text
    figure: str  # label of what it is on
    limit: float  # minimum or lower bound of the figure
    verdict: str  # HOLDS, FAILS or UNDECIDED
    value: float | None  # the figure over all seeds; None if it was not measured
    low: float | None  # the 95% interval; None without one
    high: float | None
    reason: str  # why there is no interval, or what else a reader of the verdict must know
    drawn: str  # what the interval is over
    by_seed: str  # the numbers, as text
    overall: str

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.verdict}{interval}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class _Measured:
    """What a claim is on, over the seeds that have it."""

    by_seed: Mapping[int, str]  # the numbers, as text
    overall: str = "-"
    value: float | None = None  # the same as a number
    interval: tuple[float, float] | None = None  # None if there is none
    reason: str = ""  # why there is none
    drawn: str = "-"  # what the interval is over


def check_claims(claims: Sequence[Claim], results: BenchmarkResults) -> list[Finding]:
    """Check each claim against each arm that it names."""
    findings = []
    for claim in claims:
        opponents: list[str | None] = [*claim.against] or [None]
        findings += [_check(claim, other, results) for other in opponents]
    return findings


def claims_table(findings: Sequence[Finding]) -> Table:
    """The findings as a table of the report."""
    rows = [
        {
            "claim": finding.claim,
            "verdict [95%]": str(finding),
            "interval over": finding.drawn,
            "by seed": finding.by_seed,
            "over all seeds": finding.overall,
        }
        for finding in findings
    ]
    return Table.of(
        "Claims",
        rows,
        "Claims of the benchmark's file. A claim holds if the whole interval meets it, fails if none of it"
        " does, and is undecided otherwise, or without an interval. The interval is a 95% bootstrap: seeds"
        " are resampled with replacement, and prompts (or clients, or questions) too: once for all seeds that"
        " have them, else within each seed; the same ones for both arms where they are paired. For a figure"
        " with one value per seed, seeds alone are resampled. With few seeds the interval is too narrow: one"
        " or two seeds decide nothing but counts.",
    )


def _check(claim: Claim, other: str | None, results: BenchmarkResults) -> Finding:
    if claim.figure == WINS:
        name = f"{claim.arm} against {other}"
        figure = "share of wins among wins and losses"
        words = f"{name}: {figure}"
        measured = _measure_wins(name, results)
    else:
        factor = "" if claim.times == 1 else f"{claim.times:g} x "
        difference = f" less {factor}{other}" if other else ""
        figure = alias_of(claim.figure).label
        words = f"{claim.arm}{difference}: {figure}"
        measured = _measure_figure(claim, other, results)
    seeds = len(measured.by_seed)
    enough = seeds >= ENOUGH_SEEDS or (claim.figure != WINS and alias_of(claim.figure).is_exact)
    verdict = _verdict(claim, *measured.interval) if measured.interval is not None and enough else UNDECIDED
    remarks = [measured.reason] if measured.reason else []
    if 0 < seeds < len(results.seeds):
        remarks.append(f"{seeds} of {len(results.seeds)} seeds")
    elif measured.interval is not None and not enough:
        remarks.append(f"{seeds} seeds")
    if claim.figure == WINS and verdict == HOLDS and not results.pools[name].length_controlled_low > 0.5:
        remarks.append(MAY_BE_CHANCE)
    low, high = measured.interval or (None, None)
    return Finding(
        claim=f"{words} {_limit_words(claim)}",
        figure=figure,
        limit=claim.limit,
        verdict=verdict,
        value=measured.value,
        low=low,
        high=high,
        reason=", ".join(remarks),
        drawn=measured.drawn,
        by_seed="; ".join(f"{seed}: {text}" for seed, text in measured.by_seed.items()) or "-",
        overall=measured.overall,
    )


def _verdict(claim: Claim, low: float, high: float) -> str:
    if claim.at_least is not None:
        holds, fails = low >= claim.limit - ROUNDING, high < claim.limit - ROUNDING
    else:
        holds, fails = low > claim.limit + ROUNDING, high <= claim.limit + ROUNDING
    return HOLDS if holds else FAILS if fails else UNDECIDED


def _limit_words(claim: Claim) -> str:
    return f"{'above' if claim.at_least is None else 'at least'} {claim.limit:g}"


# --- wins


def _measure_wins(name: str, results: BenchmarkResults) -> _Measured:
    contests = results.contests.get(name, {})
    if not contests:
        return _Measured({}, reason="not measured")
    pool = results.pools[name]
    by_seed = {n: _decided_words(*map(one.verdicts.count, DECIDED)) for n, one in contests.items()}
    counts = _decided_words(pool.wins, pool.losses)
    overall = f"{counts}; at equal length, a tie half, {format_equal_length(pool)}"
    seeds = [_outcomes(contest) for contest in contests.values() if contest.prompts]
    decided = {unit for outcomes in seeds for unit, won_and_lost in outcomes.items() if any(won_and_lost)}
    if not decided:
        return _Measured(by_seed, overall, reason="0 wins to 0 losses")
    share = pool.wins / (pool.wins + pool.losses)
    if len(seeds) == 1:
        return _Measured(by_seed, overall, share, reason=ONE_SEED)
    numbers = generator(results.seeds[0], "claim", WINS, name)
    interval = share_interval(seeds, len(decided), results.resamples, numbers)
    drawn = _drawn_words([len(prompts) for prompts in seeds], PROMPTS)
    return _Measured(by_seed, overall, share, interval, drawn=drawn)


def _outcomes(contest: Contest) -> Stratum:
    """Wins and losses by prompt, times the number of prompts, so that their means are a seed's totals."""
    outcomes = {prompt: [0, 0] for prompt in contest.units}
    for prompt, verdict in zip(contest.units, contest.verdicts, strict=True):
        if verdict in DECIDED:
            outcomes[prompt][DECIDED.index(verdict)] += len(outcomes)
    return outcomes


def _decided_words(wins: int, losses: int) -> str:
    share = f" ({wins / (wins + losses):.3f})" if wins + losses else ""
    return f"{wins} to {losses}{share}"


# --- figures


@dataclass(frozen=True)
class _Term:
    """An arm's figure with one seed, and the factor that it enters a claim with."""

    factor: float
    value: float
    units: Units | None

    @property
    def count(self) -> int:
        """Number of its units."""
        return 1 if self.units is None else len(self.units.values)

    @property
    def is_mean(self) -> bool:
        """Whether the value is the mean of the units, if it has any."""
        mean = self.value if self.units is None else self.units.mean
        return math.isclose(mean, self.value, rel_tol=ROUNDING, abs_tol=ROUNDING)

    def strata(self) -> dict[str, dict[str, float]]:
        """Its values by stratum and unit; their strata's means add up to the factor times the figure."""
        strata = {"": {"": self.value}} if self.units is None else self.units.strata
        share = self.factor / len(strata)
        return {name: {unit: share * value for unit, value in own.items()} for name, own in strata.items()}


def _measure_figure(claim: Claim, other: str | None, results: BenchmarkResults) -> _Measured:
    factors = {claim.arm: 1.0} | ({other: -claim.times} if other else {})
    by_arm: dict[str, dict[int, _Term]] = {arm: {} for arm in factors}
    for arm, factor in factors.items():
        for seed, run in results.metrics.get(arm, {}).items():
            if (value := named(run, claim.figure)) is not None:
                units = named(results.units.get(arm, {}).get(seed, {}), claim.figure)
                by_arm[arm][seed] = _Term(factor, value, units)
    if missing := [arm for arm, own in by_arm.items() if not own]:
        return _Measured({}, reason=f"not measured: {', '.join(missing)}")
    shared = sorted(set.intersection(*map(set, by_arm.values())))
    if not shared:
        return _Measured({}, reason="no seed has both arms")
    terms = {seed: [own[seed] for own in by_arm.values()] for seed in shared}
    by_seed = {seed: _difference_words(own) for seed, own in terms.items()}
    totals = {seed: sum(term.factor * term.value for term in own) for seed, own in terms.items()}
    mean = float(np.mean(list(totals.values())))
    overall = f"mean {mean:.3f}"
    reason = _why_no_interval(claim.figure, terms, totals)
    if reason:
        return _Measured(by_seed, overall, mean, reason=reason)
    numbers = generator(results.seeds[0], "claim", claim.figure, *factors)
    paired = all(map(_are_paired, terms.values()))
    seeds = [_strata(own, paired) for own in terms.values()]
    interval = mean_interval(seeds, results.resamples, numbers)
    return _Measured(by_seed, overall, mean, interval, drawn=_drawn_by(list(terms.values()), paired))


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
    if len(terms) < ENOUGH_SEEDS and all(term.count == 1 for own in terms.values() for term in own):
        return f"one value per seed, which needs {ENOUGH_SEEDS} seeds"
    return ""


def _are_paired(terms: Sequence[_Term]) -> bool:
    """Whether the figures of a seed are of the same units."""
    unit_names = [{name: set(stratum) for name, stratum in term.strata().items()} for term in terms]
    return all(names == unit_names[0] for names in unit_names)


def _strata(terms: Sequence[_Term], paired: bool) -> dict[str, Stratum]:
    """The strata of a seed that are resampled: differences by unit where arms are paired, else both arms'."""
    every = [term.strata() for term in terms]
    if paired:
        return {
            name: {unit: [sum(strata[name][unit] for strata in every)] for unit in stratum}
            for name, stratum in every[0].items()
        }
    return {
        f"{number} {name}": {unit: [value] for unit, value in stratum.items()}
        for number, strata in enumerate(every)
        for name, stratum in strata.items()
    }


def _drawn_by(seeds: Sequence[Sequence[_Term]], paired: bool) -> str:
    measured = [term.units for terms in seeds for term in terms if term.units is not None]
    if not measured:
        return _drawn_words([1] * len(seeds), "")
    words = _drawn_words([max(term.count for term in terms) for terms in seeds], measured[0].unit)
    return words + ("" if len(seeds[0]) == 1 else ", paired" if paired else ", not paired")


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
