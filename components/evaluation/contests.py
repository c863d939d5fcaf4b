"""Contests: a judge's verdicts on two policies' answers to the same prompts, and their figures.

One record serves a run, the contests between the arms of a benchmark, and the reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from pydantic import model_validator

from components.data.records import answered_prompt
from components.evaluation.length_control import fit_length_controlled_rate
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

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        counts = {name: len(values) for name, values in self if name != "schema_version"}
        if len(set(counts.values())) > 1:
            raise ValueError(f"numbers of values differ: {counts}")
        return self

    @classmethod
    def pooled(cls, by_seed: Mapping[int, Contest]) -> Self:
        """The verdicts of all seeds as one contest, in which every seed has prompts of its own."""
        pooled: dict[str, list[Any]] = {name: [] for name in cls.model_fields if name != "schema_version"}
        for seed, contest in by_seed.items():
            own = dict(contest) | {"prompts": [f"{seed}/{answer}" for answer in contest.prompts]}
            for name, values in pooled.items():
                values += own[name]
        return cls(**pooled)

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
        }

    def win_rate(self, resamples: int = 2000, seed: int = 0) -> WinRate:
        """The win rate by the verdicts of both orders."""
        return win_rate(self.verdicts, resamples, seed, self.units)

    def figures(self, resamples: int = 2000, seed: int = 0) -> ContestFigures:
        """All figures; resamples and seed are those of the bootstrap intervals."""
        return self._figures(self.units, [0] * len(self.prompts), resamples, seed)

    def _figures(
        self, units: Sequence[str], seeds: Sequence[int], resamples: int, seed: int
    ) -> ContestFigures:
        labels = {n: LABELS[verdict] for n, verdict in enumerate(self.verdicts) if verdict in LABELS}
        controlled = fit_length_controlled_rate(
            list(labels.values()),
            [self.ours[n] for n in labels],
            [self.theirs[n] for n in labels],
            resamples,
            seed,
            [units[n] for n in labels],
            [seeds[n] for n in labels],
        )
        return ContestFigures(
            **win_rate(self.verdicts, resamples, seed, units, seeds).model_dump(),
            consistency=self.consistency,
            ties_half=controlled.uncontrolled,
            length_controlled=controlled.rate,
            length_controlled_low=controlled.low,
            length_controlled_high=controlled.high,
            length_effect=controlled.effect,
            single_order=win_rate(self.original, resamples, seed, units, seeds),
        )


def pooled_figures(by_seed: Mapping[int, Contest], resamples: int = 2000, seed: int = 0) -> ContestFigures:
    """The figures of the contests of several seeds together; intervals are over seeds and prompts."""
    units = [unit for contest in by_seed.values() for unit in contest.units]
    seeds = [own for own, contest in by_seed.items() for _ in contest.prompts]
    return Contest.pooled(by_seed)._figures(units, seeds, resamples, seed)


def judge_contest(judge: Judge, pairs: Mapping[str, Comparison]) -> Contest:
    """Put each pair of our answer and theirs, by the answer's id, to the judge in both orders."""
    different = {name: pair for name, pair in pairs.items() if pair.first.strip() != pair.second.strip()}
    turned = [pair.swapped() for pair in different.values()]
    original = dict(zip(different, judge.compare(list(different.values())), strict=True))
    swapped = dict(zip(different, judge.compare(turned), strict=True))
    return Contest(
        prompts=list(pairs),
        original=[original.get(name, Verdict.TIE) for name in pairs],
        swapped=[swapped.get(name, Verdict.TIE) for name in pairs],
        equal=[name not in different for name in pairs],
        ours=[len(pair.first) for pair in pairs.values()],
        theirs=[len(pair.second) for pair in pairs.values()],
    )
