"""What a benchmark's file asks beside its claims: regressions since the last runs, choices of arms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from components.config.benchmark import Choice
from components.reporting.formats import format_number
from components.reporting.metrics import MetricsByArm, alias_of, named, values_of
from components.reporting.page import Table

MeansByArm = Mapping[str, Mapping[str, float]]
"""Means over the seeds, by arm and metric."""


@dataclass(frozen=True)
class Change:
    """A figure of which more is better, beside those of earlier runs."""

    arm: str  # of a benchmark; empty for a figure of the whole run
    figure: str  # its label
    now: float | None  # None if it was not measured
    earlier: Sequence[float]  # of the last runs under the same conditions
    tolerance: float  # how far it may fall below their median
    needed: int = 1  # earlier runs, at least, with which it is judged

    @property
    def median(self) -> float | None:
        """The median of the earlier runs; None where they are too few."""
        return statistics.median(self.earlier) if len(self.earlier) >= self.needed else None

    @property
    def change(self) -> float | None:
        """The difference from the median; None where one of the two is missing or not finite."""
        difference = math.nan if self.now is None or self.median is None else self.now - self.median
        return difference if math.isfinite(difference) else None

    @property
    def verdict(self) -> str:
        """What the change means."""
        if self.now is None or not math.isfinite(self.now):
            return "not measured"
        if self.change is None:
            few = f"not judged: {len(self.earlier)} of {self.needed} earlier runs"
            return few if self.needed > 1 else "first run"
        return "regression" if self.is_regression else "no regression"

    @property
    def is_regression(self) -> bool:
        """Whether the figure is below the median by more than the tolerance."""
        return self.change is not None and self.change < -self.tolerance

    def __str__(self) -> str:
        what = f"{', '.join(filter(None, (self.arm, self.figure)))}: {format_number(self.now)}"
        if self.median is None:
            return what
        return f"{what} instead of {format_number(self.median)} (median of {len(self.earlier)} earlier runs)"


def find_changes(
    means: MeansByArm, earlier: Sequence[MeansByArm], tolerances: Mapping[str, float]
) -> list[Change]:
    """Compare figures with those of earlier runs; tolerances are `regressions` of the benchmark's file."""
    changes = []
    for arm, metrics in means.items():
        for name, tolerance in tolerances.items():
            values = [named(run.get(arm, {}), name) for run in earlier]
            known = [value for value in values if value is not None and math.isfinite(value)]
            changes.append(Change(arm, alias_of(name).label, named(metrics, name), known, tolerance))
    return changes


def regressions(changes: Sequence[Change]) -> str:
    """The changes that are regressions, as one line; empty without any."""
    return "; ".join(str(change) for change in changes if change.is_regression)


def changes_table(changes: Sequence[Change]) -> Table:
    """The table of a benchmark's report, a row for each figure with its verdict."""
    rows = [
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
    return Table.of(
        "Since the last runs",
        rows,
        "Means over the seeds, beside the median of the last runs of the same arms and seeds. The same code"
        " gives the same figures on the same machine: a change comes from code, recipe, data, libraries or"
        " machine. A regression is a fall by more than the benchmark's file allows (its key regressions).",
    )


def choose_arms(choices: Mapping[str, Choice], metrics: MetricsByArm, seeds: Sequence[int]) -> dict[str, str]:
    """By choice the arm with the largest mean, of equal ones the first; empty before all have all seeds."""
    chosen = {}
    for name, choice in choices.items():
        values = {arm: values_of(metrics.get(arm, {}), choice.figure) for arm in choice.among}
        is_complete = all(len(own) == len(seeds) for own in values.values())
        chosen[name] = max(choice.among, key=lambda arm: float(np.mean(values[arm]))) if is_complete else ""
    return chosen


def choices_table(choices: Mapping[str, Choice], chosen: Mapping[str, str]) -> Table:
    """A line for each choice; the means are in the table of methods."""
    rows = [
        {"for": name, "chosen arm": arm or "not measured", "by": alias_of(choices[name].figure).label}
        for name, arm in chosen.items()
    ]
    return Table.of(
        "Choices", rows, "The arm with the largest mean over the seeds; of equal ones, the first."
    )
