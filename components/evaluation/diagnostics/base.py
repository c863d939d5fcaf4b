"""The protocol of a diagnostic, which logs and summarizes what is specific to a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from components.evaluation.plotting import Image
from components.results import FederationResult, StepRecord

Groups = Mapping[str, str | None]
"""True group by client; None if the source does not know it."""


class DiagnosticSink(Protocol):
    """Receiver of what a diagnostic logs, e.g. an MLflow run."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers at a round."""
        ...

    def log_json(self, content: Any, path: str) -> None:
        """Log a JSON document as an artifact."""
        ...

    def log_plot(self, draw: Callable[[Path], None], path: str) -> None:
        """Log a plot as an artifact; `draw` writes the PNG."""
        ...


@dataclass(frozen=True)
class FrontPoint:
    """A policy in the space of several rewards.

    Attributes:
        scores: mean score by objective, after the rounds.
        base_scores: of the base policy.
        preferences: how much each objective is preferred.
    """

    scores: dict[str, float]
    base_scores: dict[str, float]
    preferences: dict[str, float]


@dataclass(frozen=True)
class Summary:
    """A diagnostic of one run.

    Attributes:
        figures: numbers for the tables of a benchmark, by name.
        data: input of the diagnostic's plots of a benchmark; each diagnostic has its own type.
        front: the run's point in a front of preferences; None for methods with one objective.
    """

    figures: dict[str, float] = field(default_factory=dict)
    data: Any = None
    front: FrontPoint | None = None


@dataclass(frozen=True)
class DiagnosedRun:
    """Description of a run, for diagnostics.

    Attributes:
        name: method or arm, for labels.
        seed: seed of the run.
        groups: the clients' true groups.
        preferences: how much the method prefers each objective; empty without several.
    """

    name: str
    seed: int
    groups: Groups
    preferences: Mapping[str, float] = field(default_factory=dict)


class Diagnostic:
    """Logs and summarizes what is specific to a method. All parts are optional.

    Attributes:
        figure_labels: labels of its figures in tables, by name.
    """

    figure_labels: ClassVar[dict[str, str]] = {}

    def log(self, record: StepRecord, groups: Groups, sink: DiagnosticSink) -> None:
        """Log a committed step."""

    def log_result(self, result: FederationResult, run: DiagnosedRun, sink: DiagnosticSink) -> None:
        """Log the finished rounds."""

    def summarize(self, result: FederationResult, run: DiagnosedRun) -> Summary:
        """Summarize the finished rounds for a benchmark."""
        return Summary()

    def plot_benchmark(self, summaries: Mapping[str, Mapping[int, Summary]], folder: Path) -> list[Image]:
        """Plots of a benchmark.

        Args:
            summaries: by arm and seed, for the arms whose method declares the diagnostic.
            folder: receives the PNG files.
        """
        return []
