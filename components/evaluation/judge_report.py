"""Reliability of a judge: agreement with human verdicts, and consistency over both orders.

The figures are those that are published for Auto-J (Li et al. 2023). A judge agrees with a human
verdict if it gives that verdict in both orders of the responses, so that a position bias counts
against it. The file formats are those of the Auto-J data set: pairs with human labels
(components/data/sources/hub_pairs.py), and two files with the judge's outputs for the original and for the
swapped order, one {"output": 0, 1 or 2} per line. In both files 0 stands for the response that was
shown first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from components.data.raw import RawRow, one_of
from components.data.records import DataError
from components.data.rows import read_file
from components.data.sources.hub_pairs import LabeledRow
from components.evaluation.judges.judge import Judge
from components.evaluation.winrate import Verdict, bootstrap_interval, orders_agree
from components.models.selector import Comparison
from components.results import Result

VERDICTS = (Verdict.FIRST, Verdict.SECOND, Verdict.TIE)
"""Verdicts by the labels 0, 1 and 2 of the Auto-J data set."""


class VerdictRow(RawRow):
    """A judge's verdict; null, too, is unparsable."""

    output: Annotated[int, one_of({0: "first response", 1: "second", 2: "tie", -1: "unparsable"})] | None


class Share(Result):
    """A share of rows; NaN without rows."""

    count: int
    total: int
    rate: float
    low: float  # 95% percentile-bootstrap interval over the rows
    high: float

    @classmethod
    def of(cls, outcomes: Sequence[bool]) -> Share:
        """The share of true outcomes."""
        rate = low = high = float("nan")
        if outcomes:
            rate = sum(outcomes) / len(outcomes)
            low, high = bootstrap_interval(outcomes)
        return cls(count=sum(outcomes), total=len(outcomes), rate=rate, low=low, high=high)

    def __str__(self) -> str:
        return f"{self.rate:.2%} [{self.low:.2%}, {self.high:.2%}] ({self.count} of {self.total})"


class Reliability(Result):
    """Agreement of a judge with human verdicts, and with itself."""

    agreement: Share  # the human verdict in both orders; unparsable verdicts disagree
    agreement_original: Share  # in one order
    agreement_swapped: Share
    consistency: Share  # equal verdicts in both orders, of the rows that were parsed in both


class JudgeReport(Reliability):
    """A judge compared with human verdicts, over all rows and by scenario."""

    scenarios: dict[str, Reliability]
    unparsable: tuple[int, int]  # verdicts on the original and on the swapped order

    def __str__(self) -> str:
        lines = [
            f"agreement with human verdicts in both orders  {self.agreement}",
            f"  in the original order only  {self.agreement_original}",
            f"  in the swapped order only  {self.agreement_swapped}",
            f"position consistency  {self.consistency}",
            "unparsable  {} original, {} swapped".format(*self.unparsable),
            "agreement, consistency by scenario",
        ]
        for name, figures in self.scenarios.items():
            rates = f"{figures.agreement.rate:.1%}, {figures.consistency.rate:.1%}"
            lines.append(f"  {name}  {rates} ({figures.agreement.total} rows)")
        return "\n".join(lines)


def build_judge_report(
    rows: Sequence[LabeledRow],
    original: Sequence[Verdict],
    swapped: Sequence[Verdict],
) -> JudgeReport:
    """Compare a judge's verdicts on both orders of labeled pairs with the human verdicts, row by row.

    Raises:
        DataError: there is not one verdict for each pair in both orders.
    """
    if not len(rows) == len(original) == len(swapped):
        raise DataError(
            f"{len(rows)} labeled pairs need as many verdicts in both orders, but there are {len(original)}"
            f" on the original order and {len(swapped)} on the swapped order"
        )

    def measure(numbers: Sequence[int]) -> Reliability:
        first = [original[n] is VERDICTS[rows[n].label] for n in numbers]
        second = [swapped[n].swapped() is VERDICTS[rows[n].label] for n in numbers]
        agreements = orders_agree([original[n] for n in numbers], [swapped[n] for n in numbers])
        return Reliability(
            agreement=Share.of([all(both) for both in zip(first, second, strict=True)]),
            agreement_original=Share.of(first),
            agreement_swapped=Share.of(second),
            consistency=Share.of(agreements),
        )

    scenarios: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        scenarios[row.scenario].append(number)
    return JudgeReport(
        **dict(measure(range(len(rows)))),
        scenarios={name: measure(numbers) for name, numbers in sorted(scenarios.items())},
        unparsable=(original.count(Verdict.UNPARSABLE), swapped.count(Verdict.UNPARSABLE)),
    )


def measure_judge(judge: Judge, rows: Sequence[LabeledRow]) -> JudgeReport:
    """Put labeled pairs, equal responses too, to a judge in both orders, and report its reliability."""
    comparisons = [Comparison(row.prompt, row.first, row.second) for row in rows]
    original = judge.compare(comparisons)
    return build_judge_report(rows, original, judge.compare([one.swapped() for one in comparisons]))


def read_pairs(path: Path) -> list[LabeledRow]:
    """Read the pairs of a file of the Auto-J data set, with their human verdicts."""
    return list(LabeledRow.read(read_file(path), str(path)))


def read_verdicts(path: Path) -> list[Verdict]:
    """Read a judge's verdicts on one order."""
    return [
        Verdict.UNPARSABLE if row.output in (-1, None) else VERDICTS[row.output]
        for row in VerdictRow.read(read_file(path), str(path))
    ]
