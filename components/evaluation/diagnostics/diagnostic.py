"""The protocol of a diagnostic, which logs and summarizes what is specific to a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from components.config import Recipe
from components.federation.method import Method
from components.results import FederationResult, StepRecord

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TrueClusters = Mapping[str, str | None]
"""True cluster by client; None if the source does not know it."""


class DiagnosticSink(Protocol):
    """Receiver of what a diagnostic logs, e.g. an MLflow run."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers at a round."""

    def log_json(self, content: Any, path: str) -> None:
        """Log a JSON document as an artifact."""

    def log_charts(self, figures: Sequence[Figure], path: str) -> None:
        """Log charts as an artifact, one HTML page."""


@dataclass(frozen=True)
class FrontPoint:
    """A policy in the space of several rewards."""

    scores: dict[str, float]  # mean score by objective, after the rounds
    base_scores: dict[str, float]  # of the base policy
    preferences: dict[str, float]  # how much each objective is preferred


@dataclass(frozen=True)
class Summary:
    """A diagnostic of one run."""

    figures: dict[str, float] = field(default_factory=dict)  # metrics; elsewhere after the diagnostic's name
    data: Any = None  # input of the diagnostic's charts of a benchmark; each has its own type
    front: FrontPoint | None = None  # the run's point in a front; None for methods with one objective


@dataclass(frozen=True)
class DiagnosedRun:
    """Description of a run, for diagnostics."""

    name: str  # method or arm, for labels
    seed: int
    true_clusters: TrueClusters
    preferences: Mapping[str, float] = field(default_factory=dict)  # by objective; empty without several
    options: Method | None = None  # of the method

    @classmethod
    def of(cls, recipe: Recipe, true_clusters: TrueClusters) -> DiagnosedRun:
        """The run of a recipe."""
        method = recipe.federation.options
        return cls(
            recipe.federation.method,
            recipe.seed,
            true_clusters,
            method.sampling.preferences if method.sampling else {},
            method,
        )


class Diagnostic:
    """Logs, summarizes and draws what is specific to a method. All parts are optional."""

    def log(self, record: StepRecord, true_clusters: TrueClusters, sink: DiagnosticSink) -> None:
        """Log a committed step."""

    def log_result(self, result: FederationResult, run: DiagnosedRun, sink: DiagnosticSink) -> None:
        """Log the finished rounds."""

    def summarize(self, result: FederationResult, run: DiagnosedRun) -> Summary:
        """Summarize the finished rounds."""
        return Summary()

    def run_charts(self, result: FederationResult, run: DiagnosedRun) -> list[Figure]:
        """Charts of a run's report."""
        return []

    def benchmark_charts(self, summaries: Mapping[str, Mapping[int, Summary]]) -> list[Figure]:
        """Charts of a benchmark's report, by arm and seed, of the arms whose method has the diagnostic."""
        return []
