"""Verdicts of contests for tests of reports."""

from __future__ import annotations

from components.evaluation.winrate import Verdict
from components.reporting.contests import ContestVerdicts

WIN = Verdict.FIRST.value
TIE = Verdict.TIE.value
LOSS = Verdict.SECOND.value


def contest(verdicts: list[str], consistency: float | None = None) -> ContestVerdicts:
    """A contest on the prompts a, b, c, ..., with answers of 5 characters each."""
    count = len(verdicts)
    prompts = list("abcdefghijklmnopqrstuvwxyz"[:count])
    return ContestVerdicts(prompts, verdicts, [5] * count, [5] * count, consistency)
