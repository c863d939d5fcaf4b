"""The claims of a benchmark's file, checked against its figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from components.config.benchmark import WINS, Claim
from components.reporting.contests import PooledContest, format_equal_length
from components.reporting.figures import figure_label
from components.reporting.tables import Figures, Table

HOLDS = "holds in every seed"
HOLDS_ON_AVERAGE = "holds on average"
FAILS = "does not hold"
NOT_MEASURED = "not measured"
MAY_BE_CHANCE = ", but at equal length it may be chance"

VERDICT_CLASSES = {
    "may be chance": "partly",
    HOLDS: "holds",
    HOLDS_ON_AVERAGE: "partly",
    FAILS: "fails",
}
"""Classes of the HTML report, by words of a verdict; the first that fits counts."""

ROUNDING = 1e-9
"""Tolerance of a comparison of two shares with a limit."""


@dataclass(frozen=True)
class Value:
    """A number and its text."""

    number: float
    text: str


@dataclass(frozen=True)
class Finding:
    """A claim and its numbers.

    Attributes:
        claim: as text.
        verdict: whether the numbers support it.
        by_seed, overall: the numbers, as text.
    """

    claim: str
    verdict: str
    by_seed: str
    overall: str


def check_claims(
    claims: Sequence[Claim],
    figures: Figures,
    pools: Mapping[str, PooledContest],
    seeds: Sequence[int],
) -> list[Finding]:
    """Check each claim against each arm that it names.

    A claim holds in every seed if the number of each seed meets it, and on average if the mean over
    seeds does (for wins: the share over the answers of all seeds). Wins are marked as possibly due
    to chance if one half lies within, or above, the interval at equal length.

    Args:
        claims: of the benchmark.
        figures: by arm and seed.
        pools: the contests, by name.
        seeds: of the benchmark; a verdict states how many were measured if some are missing.
    """
    findings = []
    for claim in claims:
        opponents: list[str | None] = [*claim.against] or [None]
        for other in opponents:
            if claim.figure == WINS:
                findings.append(_check_wins(claim, other, pools.get(f"{claim.arm} against {other}"), seeds))
            else:
                findings.append(_check_figure(claim, other, figures, seeds))
    return findings


def claims_table(findings: Sequence[Finding]) -> Table:
    """The findings as a table of the report."""
    return Table(
        "Claims",
        ["claim", "verdict", "by seed", "over all seeds"],
        [[finding.claim, finding.verdict, finding.by_seed, finding.overall] for finding in findings],
        "Claims of the benchmark's file, checked against the numbers. On average: only the mean over seeds"
        " (of wins: the share over all answers) meets the claim, which may be chance with so few seeds. At"
        " equal length it may be chance: the interval of the win rate at equal length includes one half, or"
        " is below it.",
    )


def _check_wins(claim: Claim, other: str | None, pool: PooledContest | None, seeds: Sequence[int]) -> Finding:
    words = f"{claim.arm} against {other}: share of wins among wins and losses {_limit_words(claim)}"
    if pool is None:
        return Finding(words, NOT_MEASURED, "-", "-")
    by_seed = {seed: _decided(rate.wins, rate.losses) for seed, rate in pool.by_seed.items()}
    overall = _decided(pool.rate.wins, pool.rate.losses)
    verdict = _verdict(by_seed, overall, _limit(claim))
    if verdict in (HOLDS, HOLDS_ON_AVERAGE) and not pool.equal_length.low > 0.5:
        verdict += MAY_BE_CHANCE
    text = f"{overall.text}; at equal length, a tie half, {format_equal_length(pool.equal_length)}"
    return _finding(words, verdict, by_seed, text, seeds)


def _check_figure(claim: Claim, other: str | None, figures: Figures, seeds: Sequence[int]) -> Finding:
    factor = "" if claim.times == 1 else f"{claim.times:g} x "
    difference = f" less {factor}{other}" if other else ""
    words = f"{claim.arm}{difference}: {figure_label(claim.figure)} {_limit_words(claim)}"
    ours = _by_seed(figures, claim.arm, claim.figure)
    if other is None:
        by_seed = {seed: Value(value, f"{value:.3f}") for seed, value in ours.items()}
    else:
        theirs = _by_seed(figures, other, claim.figure)
        by_seed = {}
        for seed in ours:
            if seed in theirs:
                value = ours[seed] - claim.times * theirs[seed]
                text = f"{ours[seed]:.3f} - {factor}{theirs[seed]:.3f} = {value:.3f}"
                by_seed[seed] = Value(value, text)
    overall = _mean([value.number for value in by_seed.values()])
    verdict = _verdict(by_seed, overall, _limit(claim))
    return _finding(words, verdict, by_seed, overall.text, seeds)


def _finding(
    words: str, verdict: str, by_seed: Mapping[int, Value], overall: str, seeds: Sequence[int]
) -> Finding:
    if by_seed and len(by_seed) < len(seeds):
        verdict += f" ({len(by_seed)} of {len(seeds)} seeds)"
    shown = "; ".join(f"{seed}: {value.text}" for seed, value in by_seed.items())
    return Finding(words, verdict, shown or "-", overall)


def _limit_words(claim: Claim) -> str:
    return f"at least {claim.at_least:g}" if claim.at_least is not None else f"above {claim.above:g}"


def _limit(claim: Claim) -> Callable[[float], bool]:
    if claim.at_least is not None:
        least = claim.at_least - ROUNDING
        return lambda value: value >= least
    above = (claim.above if claim.above is not None else math.nan) + ROUNDING
    return lambda value: value > above


def _verdict(by_seed: Mapping[int, Value], overall: Value, meets: Callable[[float], bool]) -> str:
    if not by_seed:
        return NOT_MEASURED
    if all(meets(value.number) for value in by_seed.values()):
        return HOLDS
    return HOLDS_ON_AVERAGE if meets(overall.number) else FAILS


def _by_seed(figures: Figures, arm: str, name: str) -> dict[int, float]:
    return {seed: run[name] for seed, run in figures.get(arm, {}).items() if name in run}


def _mean(values: Sequence[float]) -> Value:
    if not values:
        return Value(math.nan, "-")
    return Value(float(np.mean(values)), f"mean {np.mean(values):.3f}")


def _decided(wins: int, losses: int) -> Value:
    """Wins among wins and losses; NaN, which meets no claim, without either."""
    if not wins + losses:
        return Value(math.nan, f"{wins} to {losses}")
    rate = wins / (wins + losses)
    return Value(rate, f"{wins} to {losses} ({rate:.3f})")
