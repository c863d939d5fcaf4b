"""The client graph of DRIFT: divergences, spanning tree, shortest paths, aggregation weights."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import networkx as nx

from components.evaluation.charts import network_chart
from components.evaluation.diagnostics.diagnostic import (
    DiagnosedRun,
    Diagnostic,
    DiagnosticSink,
    Summary,
    TrueClusters,
)
from components.federation.graph import own_cluster_share
from components.federation.methods.drift import Drift, GraphMemory
from components.names import short_labels
from components.results import FederationResult, StepRecord

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MAX_LABELED = 10
"""Number of edges up to which the divergences of all pairs are written beside them."""
WEIGHT = "symmetric KL (nats)"


class ClientGraphDiagnostic(Diagnostic):
    """Each round's graph as JSON, all as charts, and the share of neighbors of the same true cluster."""

    def log(self, record: StepRecord, true_clusters: TrueClusters, sink: DiagnosticSink) -> None:
        """Log the graph of a round."""
        memory = GraphMemory.model_validate(record.memory)
        sink.log_json(memory.graph, f"graphs/{record.step:05d}.json")
        if any(true_clusters.values()):
            shares = own_cluster_share(memory.weights, true_clusters)
            metrics = {f"graph/{name}": value for name, value in shares.items()}
            sink.log_metrics(metrics, record.logged_at)

    def log_result(self, result: FederationResult, run: DiagnosedRun, sink: DiagnosticSink) -> None:
        """Log the spanning trees and shortest paths of all rounds as one page."""
        figures: list[Figure] = []
        for record in result.records:
            figures += graph_charts(record, run)[1:]
        sink.log_charts(figures, "graphs/graphs.html")

    def summarize(self, result: FederationResult, run: DiagnosedRun) -> Summary:
        """Mean over the rounds of that share, and the share by chance."""
        if not any(run.true_clusters.values()):
            return Summary()
        memories = [GraphMemory.model_validate(record.memory) for record in result.records]
        shares = [own_cluster_share(memory.weights, run.true_clusters) for memory in memories]
        figures = {}
        for name, key in (("neighbors", "neighbors"), ("neighbors_chance", "chance")):
            values = [share[key] for share in shares if not math.isnan(share[key])]
            if values:
                figures[name] = sum(values) / len(values)
        return Summary(figures)

    def run_charts(self, result: FederationResult, run: DiagnosedRun) -> list[Figure]:
        """The graph of the last round."""
        return graph_charts(result.records[-1], run)


def graph_charts(record: StepRecord, run: DiagnosedRun) -> list[Figure]:
    """A round's client graph as three charts (DRIFT figures 3 to 5 and 12).

    All divergences, the minimum spanning tree, and the shortest paths of the first client. The graph
    that decides who is aggregated says so, and has a ring around those that the first client is
    aggregated with. Clients that diverge less are closer together, and true clusters are colors.
    """
    memory = GraphMemory.model_validate(record.memory)
    graph = nx.node_link_graph(memory.graph, edges="edges")
    names = sorted(graph)
    first = names[0]
    label = short_labels([first])[first]
    weights = {tuple(sorted(edge[:2])): edge[2] for edge in graph.edges.data("weight")}
    largest = max(weights.values(), default=0.0) or 1.0
    distances = {
        one: {other: graph[one][other]["weight"] / largest + 0.4 for other in names if other != one}
        for one in names
    }
    layout = nx.kamada_kawai_layout(graph, dist=distances) if len(names) > 2 else nx.circular_layout(graph)
    nodes = {name: (*layout[name], run.true_clusters.get(name) or "") for name in names}
    paths: set[tuple[str, ...]] = set()
    for path in nx.single_source_dijkstra_path(graph, first, weight="weight").values():
        paths |= {tuple(sorted(step)) for step in pairwise(path)}
    tree = {tuple(sorted(edge)) for edge in memory.tree}
    variant = run.options.variant if isinstance(run.options, Drift) else ""
    figures = []
    for name, words, edges in (
        ("", "divergence of all pairs", set(weights)),
        ("mst", "minimum spanning tree", tree),
        ("sp", f"shortest paths from {label}", paths),
    ):
        decides = name != "" and name == variant
        rings = {f"aggregated with {label}": memory.weights.get(first, {})} if decides else {}
        figures.append(
            network_chart(
                f"Round {record.rounds_done}: {words}{', which decides the aggregation' if decides else ''}",
                WEIGHT,
                {edge: weights[edge] for edge in sorted(edges)},
                nodes,
                largest=largest,
                rings=rings,
                labeled=name != "" or len(weights) <= MAX_LABELED,
            )
        )
    return figures
