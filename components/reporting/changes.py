"""Figures beside those of the last runs, and which of them are regressions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from components.reporting.formats import format_number
from components.reporting.metrics import alias_of, named
from components.reporting.page import Table

MeansByArm = Mapping[str, Mapping[str, float]]
"""Means over the seeds, by arm and metric."""


@dataclass(frozen=True)
class Change:
    """A figure of an arm, of which more is better, beside those of earlier runs."""

    arm: str
    figure: str  # its label
    now: float | None  # mean over the seeds; None if it was not measured
    earlier: Sequence[float]  # of the last runs of the same benchmark
    tolerance: float  # how far it may fall below their median
    needed: int = 1  # earlier runs without which it is not judged

    @property
    def median(self) -> float | None:
        """The median of the earlier runs; None where they are too few."""
        return statistics.median(self.earlier) if len(self.earlier) >= self.needed else None

    @property
    def change(self) -> float | None:
        """The difference from the median; None where one of the two is missing."""
        return None if self.now is None or self.median is None else self.now - self.median

    @property
    def verdict(self) -> str:
        """What the change means."""
        if self.now is None:
            return "not measured"
        if self.change is None:
            return "first run" if not self.earlier else "too few runs before"
        return "regression" if self.is_regression else "no regression"

    @property
    def is_regression(self) -> bool:
        """Whether the figure is below the median by more than the tolerance."""
        return self.change is not None and self.change < -self.tolerance

    def __str__(self) -> str:
        now, median = format_number(self.now), format_number(self.median)
        return f"{self.arm}, {self.figure}: {now} after {median} (median of {len(self.earlier)} earlier runs)"


def find_changes(
    means: MeansByArm, earlier: Sequence[MeansByArm], tolerances: Mapping[str, float]
) -> list[Change]:
    """Compare figures with those of earlier runs; tolerances are `regressions` of the benchmark's file."""
    changes = []
    for arm, metrics in means.items():
        for name, tolerance in tolerances.items():
            values = [named(run.get(arm, {}), name) for run in earlier]
            known = [value for value in values if value is not None]
            changes.append(Change(arm, alias_of(name).label, named(metrics, name), known, tolerance))
    return changes


def change_rows(changes: Sequence[Change]) -> list[dict[str, str]]:
    """A row of a table for each figure, with its verdict."""
    return [
        {
            "method": change.arm,
            "figure": change.figure,
            "verdict": change.verdict,
            "now": format_number(change.now),
            "median before": format_number(change.median),
            "change": "-" if change.change is None else f"{change.change:+.3f}",
            "runs before": str(len(change.earlier)),
        }
        for change in changes
    ]


def regressions(changes: Sequence[Change]) -> str:
    """The changes that are regressions, as one line; empty without any."""
    return "; ".join(str(change) for change in changes if change.is_regression)


def changes_table(changes: Sequence[Change]) -> Table:
    """The table of a benchmark's report."""
    return Table.of(
        "Since the last runs",
        change_rows(changes),
        "Means over the seeds, beside the median of the last runs of the same arms and seeds. The same code"
        " gives the same figures on the same machine: a change comes from code, recipe, data, libraries or"
        " machine. A regression is a fall by more than the benchmark's file allows (its key regressions).",
    )
