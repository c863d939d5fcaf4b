"""What a judge is: the protocol of whoever says which of two responses is better, and the error of one that cannot be had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from components.data.records import DataError
from components.evaluation.winrate import Verdict
from components.models.selector import Comparison


class JudgeError(DataError):
    """A judge that cannot be had, or that does not answer."""


class Judge(Protocol):
    """Compares two responses to a prompt, in the order given.

    A judge's class may also have `Options` (a config.Section; without it the judge takes none), `check(config,
    prepared)`, which refuses early what could not be had at the end, and two attributes: `figures`, numbers about the
    judge itself, e.g. its held-out accuracy, and `texts`, what it wrote on each comparison (JSON rows).

    Attributes:
        description: what it is, for the report.
    """

    description: str

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict]: ...
