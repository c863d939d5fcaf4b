"""Reliability of a judge: agreement with human verdicts, and consistency over both orders.

The figures are those that are published for Auto-J (Li et al. 2023). A judge agrees with a human
verdict if it gives that verdict in both orders of the responses, so that a position bias counts
against it. The file formats are those of the Auto-J data set: pairs with human labels
(components/data/sources/auto_j.py), and two files with the judge's outputs for the original and for the
swapped order, one {"output": 0, 1 or 2} per line. In both files 0 stands for the response that was
shown first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from components.data.raw import RawRow, one_of
from components.data.records import DataError
from components.data.rows import read_file
from components.data.sources.auto_j import LabeledRow
from components.evaluation.judges.judge import Judge
from components.evaluation.winrate import Verdict, bootstrap_interval, orders_agree
from components.models.selector import Comparison

VERDICT_OF_LABEL = (Verdict.FIRST, Verdict.SECOND, Verdict.TIE)
"""Verdicts by the labels 0, 1 and 2 of the Auto-J data set."""


@dataclass(frozen=True)
class Share:
    """A share of rows with its interval.

    Attributes:
        count: number of rows with the property.
        total: number of rows that were examined.
        rate: count / total; NaN if there are no rows.
        low, high: 95% percentile-bootstrap interval of the rate over the rows.
    """

    count: int
    total: int
    rate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.rate:.2%} [{self.low:.2%}, {self.high:.2%}] ({self.count} of {self.total})"


class VerdictRow(RawRow):
    """A judge's verdict."""

    output: Annotated[int, one_of({0: "first response", 1: "second", 2: "tie", -1: "unparsable"})] | None


@dataclass(frozen=True)
class LabeledComparison:
    """A comparison with a human verdict.

    Attributes:
        scenario: category of the prompt in the data set.
        comparison: prompt and responses.
        label: the human verdict.
    """

    scenario: str
    comparison: Comparison
    label: Verdict


@dataclass(frozen=True)
class Reliability:
    """Agreement of a judge with human verdicts, and with itself.

    Attributes:
        agreement: share of all rows with the human verdict in both orders; unparsable verdicts
            disagree.
        agreement_original, agreement_swapped: the same in one order.
        consistency: share of the rows that were parsed in both orders with equal verdicts in both.
    """

    agreement: Share
    agreement_original: Share
    agreement_swapped: Share
    consistency: Share


@dataclass(frozen=True)
class JudgeReport:
    """A judge compared with human verdicts.

    Attributes:
        overall: figures over all rows.
        scenarios: figures by scenario.
        unparsable_original, unparsable_swapped: number of unparsable verdicts in each order.
    """

    overall: Reliability
    scenarios: dict[str, Reliability]
    unparsable_original: int
    unparsable_swapped: int

    def __str__(self) -> str:
        lines = [
            f"agreement with human verdicts in both orders  {self.overall.agreement}",
            f"  in the original order only  {self.overall.agreement_original}",
            f"  in the swapped order only  {self.overall.agreement_swapped}",
            f"position consistency  {self.overall.consistency}",
            f"unparsable  {self.unparsable_original} original, {self.unparsable_swapped} swapped",
            "agreement, consistency by scenario",
        ]
        for name, figures in self.scenarios.items():
            rates = f"{figures.agreement.rate:.1%}, {figures.consistency.rate:.1%}"
            lines.append(f"  {name}  {rates} ({figures.agreement.total} rows)")
        return "\n".join(lines)


def build_judge_report(
    pairs: Sequence[LabeledComparison],
    original: Sequence[Verdict],
    swapped: Sequence[Verdict],
    resamples: int = 2000,
    seed: int = 0,
) -> JudgeReport:
    """Compare a judge's verdicts with human verdicts.

    Args:
        pairs: comparisons with human verdicts.
        original: the judge's verdicts on the original order, row by row.
        swapped: its verdicts on the swapped order, as they were stated: `Verdict.SECOND` is then a
            verdict for response 1.
        resamples, seed: of the bootstrap intervals.

    Raises:
        DataError: there are no pairs, or not one verdict for each of them in both orders.
    """
    if not pairs or not len(pairs) == len(original) == len(swapped):
        raise DataError(
            "a judge report needs a verdict in both orders for each labeled comparison, but there are"
            f" {len(pairs)} comparisons, {len(original)} verdicts on the original order and {len(swapped)} on"
            " the swapped order"
        )
    rows = list(zip(pairs, original, swapped, strict=True))
    scenarios = {
        name: _reliability([row for row in rows if row[0].scenario == name], resamples, seed)
        for name in sorted({pair.scenario for pair in pairs})
    }
    return JudgeReport(
        overall=_reliability(rows, resamples, seed),
        scenarios=scenarios,
        unparsable_original=sum(verdict is Verdict.UNPARSABLE for verdict in original),
        unparsable_swapped=sum(verdict is Verdict.UNPARSABLE for verdict in swapped),
    )


def _reliability(
    rows: Sequence[tuple[LabeledComparison, Verdict, Verdict]], resamples: int, seed: int
) -> Reliability:
    """Figures over rows of (human verdict, verdict on the original order, on the swapped order)."""
    right_original = [original is pair.label for pair, original, _ in rows]
    right_swapped = [swapped.swapped() is pair.label for pair, _, swapped in rows]
    right_both = [first and second for first, second in zip(right_original, right_swapped, strict=True)]
    return Reliability(
        agreement=estimate_share(right_both, resamples, seed),
        agreement_original=estimate_share(right_original, resamples, seed),
        agreement_swapped=estimate_share(right_swapped, resamples, seed),
        consistency=position_consistency(
            [original for _, original, _ in rows], [swapped for _, _, swapped in rows], resamples, seed
        ),
    )


def position_consistency(
    original: Sequence[Verdict], swapped: Sequence[Verdict], resamples: int = 2000, seed: int = 0
) -> Share:
    """Compute the share of pairs with equal verdicts in both orders; needs no human verdicts.

    Args:
        original, swapped: verdicts on each order, see components.evaluation.winrate.orders_agree.
            Pairs with an unparsable verdict are left out.
        resamples, seed: of the bootstrap interval.
    """
    return estimate_share(orders_agree(original, swapped), resamples, seed)


def estimate_share(outcomes: Sequence[bool], resamples: int = 2000, seed: int = 0) -> Share:
    """Compute the share of true outcomes and its bootstrap interval."""
    if not outcomes:
        return Share(0, 0, float("nan"), float("nan"), float("nan"))
    count = sum(outcomes)
    low, high = bootstrap_interval(outcomes, resamples, seed)
    return Share(count, len(outcomes), count / len(outcomes), low, high)


def measure_judge(
    judge: Judge, pairs: Sequence[LabeledComparison], resamples: int = 2000, seed: int = 0
) -> JudgeReport:
    """Submit labeled comparisons to a judge in both orders, and report its reliability.

    Args:
        judge: the judge to measure.
        pairs: comparisons with human verdicts.
        resamples, seed: of the bootstrap intervals.

    Raises:
        DataError: there are no pairs, or the judge fails.
    """
    comparisons = [pair.comparison for pair in pairs]
    original = judge.compare(comparisons)
    swapped = judge.compare([Comparison(c.prompt, c.second, c.first) for c in comparisons])
    return build_judge_report(pairs, original, swapped, resamples, seed)


def read_pairs(path: Path) -> list[LabeledComparison]:
    """Read the pairs of a file of the Auto-J data set, with their human verdicts.

    Raises:
        DataError: the file cannot be read, or a row does not fit.
    """
    return [
        LabeledComparison(
            row.scenario, Comparison(row.prompt, row.first, row.second), VERDICT_OF_LABEL[row.label]
        )
        for row in LabeledRow.read(read_file(path), str(path))
    ]


def read_verdicts(path: Path) -> list[Verdict]:
    """Read a judge's verdicts from a file with one {"output": n} per line.

    n is 0 (first response), 1 (second), 2 (tie), or -1 or null (unparsable).

    Raises:
        DataError: the file cannot be read, or an output is another value.
    """
    return [
        Verdict.UNPARSABLE if row.output in (-1, None) else VERDICT_OF_LABEL[row.output]
        for row in VerdictRow.read(read_file(path), str(path))
    ]
