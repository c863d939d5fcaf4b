"""Contests: a judge's verdicts on two policies' answers to the same prompts, and their figures.

One record serves a run, the contests between the arms of a benchmark, and the reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from components.data.records import answered_prompt
from components.evaluation.intervals import Estimate, by_unit, estimate_share
from components.evaluation.judge_errors import correct_rate, judge_counts
from components.evaluation.length_control import (
    STYLE,
    estimate_equal_length,
    fit_length_controlled_rate,
    style_differences,
)
from components.evaluation.winrate import Verdict, orders_agree, win_rate
from components.results import ContestFigures, StoredResult, WinRate

if TYPE_CHECKING:
    from components.evaluation.judges.judge import Judge
    from components.models.selector import Comparison

LABELS = {Verdict.FIRST: 1.0, Verdict.TIE: 0.5, Verdict.SECOND: 0.0}
"""Soft labels of the rate at equal length; unparsable verdicts have none."""


class Contest(StoredResult):
    """A judge's verdicts on N pairs of our answer and theirs, in both orders."""

    prompts: list[str]  # ids of the answers, see components.data.records.answer_id
    original: list[Verdict]  # our answer shown first
    swapped: list[Verdict]  # their answer shown first, as the judge stated it
    equal: list[bool]  # equal answers are not put to the judge; they are ties in both orders
    ours: list[int]  # lengths (characters)
    theirs: list[int]
    # Differences of style by name, see length_control.py; empty without evaluation.style_control.
    style: dict[str, list[int]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        lists = {
            name: values for name, values in self if name not in ("schema_version", "style")
        } | self.style
        counts = {name: len(values) for name, values in lists.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"numbers of values differ: {counts}")
        return self

    @classmethod
    def pooled(cls, by_seed: Mapping[int, Contest]) -> Self:
        """The verdicts of all seeds as one contest, in which every seed has prompts of its own.

        It has the differences of style that all seeds have.
        """
        names = [name for name in cls.model_fields if name not in ("schema_version", "style")]
        pooled: dict[str, list[Any]] = {name: [] for name in names}
        for seed, contest in by_seed.items():
            own = dict(contest) | {"prompts": [f"{seed}/{answer}" for answer in contest.prompts]}
            for name, values in pooled.items():
                values += own[name]
        contests = list(by_seed.values())
        style = {name: [n for one in contests for n in one.style[name]] for name in shared_style(contests)}
        return cls(**pooled, style=style)

    @property
    def units(self) -> list[str]:
        """The prompt of each pair; the answers to a prompt are drawn together in a bootstrap."""
        return [answered_prompt(answer) for answer in self.prompts]

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdict of both orders: a tie where they disagree, unparsable where one of them is."""
        verdicts = []
        for first, second in zip(self.original, self.swapped, strict=True):
            if Verdict.UNPARSABLE in (first, second):
                verdicts.append(Verdict.UNPARSABLE)
            else:
                verdicts.append(first if first is second.swapped() else Verdict.TIE)
        return verdicts

    @property
    def consistency(self) -> float:
        """Share of the pairs put to the judge, and parsed in both orders, on which the orders agree."""
        judged = [n for n, equal in enumerate(self.equal) if not equal]
        agreements = orders_agree([self.original[n] for n in judged], [self.swapped[n] for n in judged])
        return sum(agreements) / len(agreements) if agreements else float("nan")

    def combined(self) -> dict[str, Any]:
        """What the verdicts of both orders say, as JSON."""
        return {
            "prompts": self.prompts,
            "verdicts": [verdict.value for verdict in self.verdicts],
            "ours": self.ours,
            "theirs": self.theirs,
            "consistency": self.consistency,
            **({"style": self.style} if self.style else {}),
        }

    def win_rate(self, resamples: int = 2000, seed: int = 0) -> WinRate:
        """The counts, and the share of wins, by the verdicts of both orders."""
        return win_rate(self.verdicts, resamples, seed, self.units)

    def figures(
        self, resamples: int = 2000, seed: int = 0, judge: Mapping[str, float] | None = None
    ) -> ContestFigures:
        """All figures; by the judge's own, on its held-out pairs, the rate is corrected for its errors."""
        units = self.units
        labels = self.labels()
        rows = (
            list(labels.values()),
            [self.ours[n] for n in labels],
            [self.theirs[n] for n in labels],
            resamples,
            seed,
            [units[n] for n in labels],
        )
        controlled = fit_length_controlled_rate(*rows)
        further = tie_figures([self], [judge or {}])
        if self.style:
            style = {name: [values[n] for n in labels] for name, values in self.style.items()}
            styled = fit_length_controlled_rate(*rows, style)
            further |= {
                "style_controlled": styled.rate,
                "style_controlled_low": styled.low,
                "style_controlled_high": styled.high,
                "style_effects": {"length": styled.effect} | styled.style_effects,
            }
        return ContestFigures(
            **win_rate(self.verdicts, resamples, seed, units).model_dump(),
            consistency=self.consistency,
            ties_half=controlled.uncontrolled,
            length_controlled=controlled.rate,
            length_controlled_low=controlled.low,
            length_controlled_high=controlled.high,
            length_effect=controlled.effect,
            single_order=win_rate(self.original, resamples, seed, units),
            **further,
        )

    def labels(self) -> dict[int, float]:
        """By position, 1 for a win, 1/2 for a tie, 0 for a loss; unparsable verdicts have none."""
        return {n: LABELS[verdict] for n, verdict in enumerate(self.verdicts) if verdict in LABELS}

    def counts(
        self, verdicts: Sequence[Verdict], others: Sequence[Verdict]
    ) -> dict[str, tuple[float, float]]:
        """By prompt, how many of some verdicts are wins, and how many are one of the others."""
        values = [(float(one is Verdict.FIRST), float(one in others)) for one in verdicts]
        return by_unit(self.units, values)


NO_WINS = (Verdict.TIE, Verdict.SECOND)


def pooled_figures(
    by_seed: Mapping[int, Contest],
    resamples: int = 2000,
    seed: int = 0,
    judges: Sequence[Mapping[str, float]] = (),
) -> ContestFigures:
    """The figures of the contests of several seeds together; intervals are over seeds and prompts.

    The intervals of one seed are over its prompts, and concern its policies alone.

    Args:
        by_seed: the contests.
        resamples, seed: of the bootstrap intervals.
        judges: figures of the seeds' judges, see Contest.figures.
    """
    contests = list(by_seed.values())
    if len(contests) < 2:
        return contests[0].figures(resamples, seed, next(iter(judges), None))
    figures = Contest.pooled(by_seed).figures(resamples, seed)
    update = tie_figures(contests, judges)
    if (rate := estimate_share([one.counts(one.verdicts, NO_WINS) for one in contests])) is not None:
        low, high = rate.interval()
        update |= {"low": low, "high": high}
    if (rate := estimate_share([one.counts(one.original, NO_WINS) for one in contests])) is not None:
        low, high = rate.interval()
        update["single_order"] = figures.single_order.model_copy(update={"low": low, "high": high})
    if (equal := equal_length(contests)) is not None:
        low, high = equal.interval()
        update |= {"length_controlled_low": low, "length_controlled_high": high}
    names = shared_style(contests)
    if names and (equal := equal_length(contests, names)) is not None:
        low, high = equal.interval()
        update |= {"style_controlled_low": low, "style_controlled_high": high}
    return figures.model_copy(update=update)


def tie_figures(contests: Sequence[Contest], judges: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The fields of ContestFigures on the interval of ties_half, and on that rate without the judges' errors.

    Contests and the figures of their judges are by seed. What is not known is left out.
    """
    estimate = ties_half(contests)
    if estimate is None:
        return {}
    figures = {}
    low, high = estimate.interval()
    if low < high:
        figures = {"ties_half_low": low, "ties_half_high": high}
    right, pairs = judge_counts(judges)
    if pairs and (rate := correct_rate(estimate, right, pairs)) is not None:
        figures |= zip(("corrected", "corrected_low", "corrected_high"), rate, strict=True)
    return figures


def ties_half(contests: Sequence[Contest]) -> Estimate | None:
    """The rate with a tie as half a win, over seeds and prompts, or over the prompts of a single seed.

    None where fewer than two of them have a verdict.
    """
    seeds = []
    for contest in contests:
        units, labels = contest.units, contest.labels()
        values = [(label, 1 - label) for label in labels.values()]
        seeds.append(by_unit([units[n] for n in labels], values))
    if len(seeds) == 1:
        # The prompts of a seed vary as seeds do that have a prompt of their own each.
        return estimate_share([{prompt: counts} for prompt, counts in seeds[0].items()])
    return estimate_share(seeds)


def shared_style(contests: Sequence[Contest]) -> list[str]:
    """Names of the differences of style that all contests have."""
    return [name for name in STYLE if contests and all(name in contest.style for contest in contests)]


def equal_length(contests: Sequence[Contest], style: Sequence[str] = ()) -> Estimate | None:
    """The rate at equal length over the contests of several seeds, with a tie as half a win.

    The differences of style with these names are to be equal as well.
    """
    rows = [(number, n) for number, contest in enumerate(contests) for n in contest.labels()]
    labels = [contest.labels() for contest in contests]
    units = [contest.units for contest in contests]
    return estimate_equal_length(
        [labels[number][n] for number, n in rows],
        [contests[number].ours[n] for number, n in rows],
        [contests[number].theirs[n] for number, n in rows],
        [units[number][n] for number, n in rows],
        [number for number, _ in rows],
        {name: [contests[number].style[name][n] for number, n in rows] for name in style},
    )


def judge_contest(judge: Judge, pairs: Mapping[str, Comparison], style_control: bool = False) -> Contest:
    """Put each pair of our answer and theirs, by the answer's id, to the judge in both orders.

    With style_control the contest has the pairs' differences of style.
    """
    different = {name: pair for name, pair in pairs.items() if pair.first.strip() != pair.second.strip()}
    turned = [pair.swapped() for pair in different.values()]
    original = dict(zip(different, judge.compare(list(different.values())), strict=True))
    swapped = dict(zip(different, judge.compare(turned), strict=True))
    ours = [pair.first for pair in pairs.values()]
    theirs = [pair.second for pair in pairs.values()]
    return Contest(
        prompts=list(pairs),
        original=[original.get(name, Verdict.TIE) for name in pairs],
        swapped=[swapped.get(name, Verdict.TIE) for name in pairs],
        equal=[name not in different for name in pairs],
        ours=[len(text) for text in ours],
        theirs=[len(text) for text in theirs],
        style=style_differences(ours, theirs) if style_control else {},
    )
