"""What a judge is: the protocol of whoever says which of two responses is better, and the error of one that cannot be had."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from components.data.records import DataError, read_rows
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


def check_judges_rows(prepared: Path, who: str) -> None:
    """Refuse prepared data that a judge could not be trained or measured on.

    Args:
        prepared: folder of prepared data.
        who: the judge, for the error.

    Raises:
        JudgeError: there are no pairs to learn from, or none to be measured on.
    """
    table = prepared / "judge.parquet"
    train, held_out = len(read_rows(table, split="train")), len(read_rows(table, split="test"))
    if not train or not held_out:
        raise JudgeError(
            f"{table} has {train} training and {held_out} held-out pairs, but {who} needs both, of owners that are not in the federation: set more owners apart in data.options.")
