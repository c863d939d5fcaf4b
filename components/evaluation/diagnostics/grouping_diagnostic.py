"""The grouping of clients (FedBiscuit section 5.1): losses, and agreement with the true clusters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from components.evaluation.charts import heat_map, line_chart
from components.evaluation.diagnostics.diagnostic import (
    DiagnosedRun,
    Diagnostic,
    DiagnosticSink,
    Summary,
    TrueClusters,
)
from components.federation.grouping import adjusted_rand_index
from components.federation.methods.fedbiscuit import GroupingMemory
from components.results import FederationResult, StepRecord

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

RandCurve = list[tuple[int, float]]
"""(rounds done, adjusted Rand index) of each grouping."""


class GroupingDiagnostic(Diagnostic):
    """The losses by which clients are grouped, and adjusted Rand index if the true clusters are known."""

    def log(self, record: StepRecord, true_clusters: TrueClusters, sink: DiagnosticSink) -> None:
        """Log the agreement of a grouping; other steps have none."""
        assignment = grouping_of(record)
        if assignment is not None and any(true_clusters.values()):
            index = adjusted_rand_index(assignment, true_clusters)
            sink.log_metrics({"grouping/adjusted_rand_index": index}, record.logged_at)

    def summarize(self, result: FederationResult, run: DiagnosedRun) -> Summary:
        """Agreement of the last grouping, and of each."""
        if not any(run.true_clusters.values()):
            return Summary()
        curve: RandCurve = []
        for record in result.records:
            assignment = grouping_of(record)
            if assignment is not None:
                curve.append((record.rounds_done, adjusted_rand_index(assignment, run.true_clusters)))
        figures = {}
        if result.outcome.assignment:
            figures["adjusted_rand_index"] = adjusted_rand_index(result.outcome.assignment, run.true_clusters)
        return Summary(figures, curve)

    def run_charts(self, result: FederationResult, run: DiagnosedRun) -> list[Figure]:
        """The losses of the last grouping, and the agreement over the rounds."""
        groupings = [record for record in result.records if grouping_of(record) is not None]
        charts = [loss_map(groupings[-1], run.true_clusters)] if groupings else []
        return charts + self.benchmark_charts({run.name: {run.seed: self.summarize(result, run)}})

    def benchmark_charts(self, summaries: Mapping[str, Mapping[int, Summary]]) -> list[Figure]:
        """Agreement over the rounds, a line per arm and seed."""
        points: list[tuple[str, float, float]] = []
        for arm, runs in summaries.items():
            for seed, summary in runs.items():
                points += [(f"{arm}, seed {seed}", done, index) for done, index in summary.data or ()]
        if not points:
            return []
        title = "Agreement with the true groups (1: equal)"
        return [
            line_chart(title, "rounds done", "adjusted Rand index", points, reference_line=(0.0, "chance"))
        ]


def grouping_of(record: StepRecord) -> dict[str, str] | None:
    """Selector by client after a step that grouped the clients; None for any other step."""
    memory = GroupingMemory.model_validate(record.memory)
    is_grouping = memory.grouped_at == record.round and not record.ends_round
    return memory.assignment if is_grouping else None


def loss_map(record: StepRecord, true_clusters: TrueClusters) -> Figure:
    """Clients' validation losses on all selectors (nats), with a frame around the selector of each.

    Rows are sorted by the clients' true clusters; clients that reported no losses have no colors.
    """
    assignment = grouping_of(record) or {}
    selectors = list(record.adapters)
    names = sorted(assignment, key=lambda name: (true_clusters.get(name) or "", name))
    labels = {name: name + (f" ({true_clusters[name]})" if true_clusters.get(name) else "") for name in names}
    losses = {name: client.losses for name, client in record.clients.items()}
    unknown = [float("nan")] * len(selectors)
    return heat_map(
        f"Client grouping after round {record.rounds_done} (frame: the client's selector)",
        "validation loss (nats)",
        list(labels.values()),
        selectors,
        [losses.get(name, unknown) for name in names],
        {label: assignment[name] for name, label in labels.items()},
    )
