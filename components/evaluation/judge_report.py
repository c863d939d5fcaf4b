"""How far a judge can be trusted: its agreement with human verdicts and with itself, as Auto-J reports them (Li et al., 2023).

A judge agrees with a human verdict where it gives that verdict in both orders of the responses; so its position bias
counts against it. The formats are those of the Auto-J set: pairs with human labels (components/data/auto_j.py), and two
files of a judge's words, {"output": 0, 1 or 2} a line, on the pairs as given and with the responses exchanged. In both
files 0 means the response that was shown first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from components.data.auto_j import read_labelled
from components.data.records import DataError
from components.data.rows import read_file
from components.evaluation.judge_protocol import Judge
from components.evaluation.winrate import Verdict, bootstrap_interval, orders_agree
from components.models.selector import Comparison

BY_LABEL = (Verdict.FIRST, Verdict.SECOND, Verdict.TIE)


@dataclass(frozen=True)
class Share:
    """A share of rows.

    Attributes:
        count, of: rows for which it holds, and all that were asked about.
        rate: count / of; NaN where there were none.
        low, high: its 95% percentile-bootstrap interval over the rows.
    """

    count: int
    of: int
    rate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.rate:.2%} [{self.low:.2%}, {self.high:.2%}] ({self.count} of {self.of})"


@dataclass(frozen=True)
class LabelledPair:
    """A comparison with a human verdict on it."""

    scenario: str
    comparison: Comparison
    label: Verdict


@dataclass(frozen=True)
class JudgeReport:
    """A judge against human verdicts.

    Attributes:
        agreement: right in both orders, of all rows; what could not be parsed is wrong.
        agreement_given, agreement_exchanged: right in that one order.
        consistency: the same in both orders, of the rows that could be parsed in both.
        unparsable_given, unparsable_exchanged: words that could not be parsed, in each order.
        scenarios: agreement and consistency by scenario.
    """

    agreement: Share
    agreement_given: Share
    agreement_exchanged: Share
    consistency: Share
    unparsable_given: int
    unparsable_exchanged: int
    scenarios: dict[str, tuple[Share, Share]]

    def __str__(self) -> str:
        return "\n".join([
            f"agreement with human verdicts, right in both orders  {self.agreement}",
            f"  as given alone  {self.agreement_given}", f"  exchanged alone  {self.agreement_exchanged}",
            f"position consistency  {self.consistency}",
            f"unparsable  {self.unparsable_given} as given, {self.unparsable_exchanged} exchanged", "agreement, consistency by scenario",
            *(f"  {name}  {agreement.rate:.1%}, {consistency.rate:.1%} ({agreement.of} rows)" for name, (agreement, consistency) in self.scenarios.items())])


def judge_report(
    labels: Sequence[Verdict], given: Sequence[Verdict], exchanged: Sequence[Verdict], scenarios: Sequence[str], resamples: int = 2000, seed: int = 0,
) -> JudgeReport:
    """Compare a judge's words with human verdicts.

    Args:
        labels: human verdicts, row by row.
        given: the judge's words on the responses as given.
        exchanged: its words on the exchanged responses, as it said them (`Verdict.SECOND` is for response 1).
        scenarios: of the rows.
        resamples, seed: of the bootstrap intervals.

    Raises:
        DataError: the rows are not as many in all four, or there are none.
    """
    counts = [len(labels), len(given), len(exchanged), len(scenarios)]
    if len(set(counts)) > 1 or not labels:
        raise DataError(f"a judge report needs a human verdict, two words of the judge and a scenario for every row, but there are {counts[0]}, {counts[1]}, {counts[2]} and {counts[3]}")

    def shares(rows: Sequence[int]) -> list[Share]:
        first, second = [given[i] is labels[i] for i in rows], [exchanged[i].exchanged() is labels[i] for i in rows]
        both = [one and other for one, other in zip(first, second, strict=True)]
        return [*(share(outcomes, resamples, seed) for outcomes in (both, first, second)),
                position_consistency([given[i] for i in rows], [exchanged[i] for i in rows], resamples, seed)]

    agreement, agreement_given, agreement_exchanged, consistency = shares(range(len(labels)))
    by_scenario = {}
    for name in sorted(set(scenarios)):
        both, _, _, consistent = shares([i for i, scenario in enumerate(scenarios) if scenario == name])
        by_scenario[name] = (both, consistent)
    unparsable = [sum(word is Verdict.UNPARSABLE for word in words) for words in (given, exchanged)]
    return JudgeReport(agreement, agreement_given, agreement_exchanged, consistency, *unparsable, by_scenario)


def position_consistency(given: Sequence[Verdict], exchanged: Sequence[Verdict], resamples: int = 2000, seed: int = 0) -> Share:
    """The share of pairs, of those parsed in both orders, on which a judge says the same in both; needs no human verdicts."""
    return share(orders_agree(given, exchanged), resamples, seed)


def share(outcomes: Sequence[bool], resamples: int = 2000, seed: int = 0) -> Share:
    """A share with its interval."""
    if not outcomes:
        return Share(0, 0, float("nan"), float("nan"), float("nan"))
    return Share(sum(outcomes), len(outcomes), sum(outcomes) / len(outcomes), *bootstrap_interval(outcomes, resamples, seed))


def measure_judge(judge: Judge, pairs: Sequence[LabelledPair], resamples: int = 2000, seed: int = 0) -> JudgeReport:
    """Put labelled pairs to a judge in both orders, and report."""
    given = judge.compare([pair.comparison for pair in pairs])
    exchanged = judge.compare([Comparison(pair.comparison.prompt, pair.comparison.second, pair.comparison.first) for pair in pairs])
    return judge_report([pair.label for pair in pairs], given, exchanged, [pair.scenario for pair in pairs], resamples, seed)


def read_pairs(path: Path) -> list[LabelledPair]:
    """The pairs of a file of the Auto-J set, with their human verdicts.

    Raises:
        DataError: see components.data.auto_j.read_labelled.
    """
    return [LabelledPair(row["scenario"] or "", Comparison(row["prompt"] or "", row["response 1"] or "", row["response 2"] or ""), BY_LABEL[row["label"]])
            for row in read_labelled(path)]


def read_verdicts(path: Path) -> list[Verdict]:
    """A judge's words from a file of {"output": n}: 0 the first response, 1 the second, 2 a tie, -1 or null unparsable.

    Raises:
        DataError: the file cannot be read, or an output is something else.
    """
    words = []
    for number, row in enumerate(read_file(path, ("output",)), 1):
        output = row["output"]
        if output is not None and (type(output) is not int or output not in (0, 1, 2, -1)):
            raise DataError(f"{path}, row {number}: 'output' is {output!r}, but 0 (first response), 1 (second), 2 (tie), or -1 or null (unparsable) is expected")
        words.append(Verdict.UNPARSABLE if output in (-1, None) else BY_LABEL[output])
    return words
