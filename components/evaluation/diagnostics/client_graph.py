"""The client graph of DRIFT: divergences, spanning tree, shortest paths, aggregation weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import networkx as nx

from components.evaluation.diagnostics.base import (
    DiagnosedRun,
    Diagnostic,
    DiagnosticSink,
    Groups,
    Summary,
)
from components.evaluation.plotting import label, save_figure
from components.federation.graph import own_group_share
from components.federation.methods.drift import GraphMemory
from components.results import FederationResult, StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Edge = frozenset[str]
MAX_LABELED = 5
"""Maximum number of clients for which the divergences of all pairs are written."""


class ClientGraphDiagnostic(Diagnostic):
    """Each round's graph as JSON and as a plot, and the share of own-group neighbors."""

    figure_labels: ClassVar[dict[str, str]] = {
        "neighbors": "own-group neighbors",
        "neighbors_chance": "own-group neighbors by chance",
    }

    def log(self, record: StepRecord, groups: Groups, sink: DiagnosticSink) -> None:
        """Log the graph of a round."""
        memory = GraphMemory.model_validate(record.memory)
        sink.log_json(memory.graph, f"graphs/{record.step:05d}.json")
        if any(groups.values()):
            shares = own_group_share(memory.weights, groups)
            metrics = {f"graph/{name}": value for name, value in shares.items()}
            sink.log_metrics(metrics, record.logged_at)
        sink.log_plot(lambda path: plot_client_graph(memory, groups, path), f"graphs/{record.step:05d}.png")

    def summarize(self, result: FederationResult, run: DiagnosedRun) -> Summary:
        """Mean over the rounds of the share of own-group neighbors, and the share by chance."""
        if not any(run.groups.values()):
            return Summary()
        shares = [
            own_group_share(GraphMemory.model_validate(record.memory).weights, run.groups)
            for record in result.records
        ]
        figures = {}
        for name, key in (("neighbors", "neighbors"), ("neighbors_chance", "chance")):
            values = [share[key] for share in shares if not math.isnan(share[key])]
            if values:
                figures[name] = sum(values) / len(values)
        return Summary(figures)


@dataclass(frozen=True)
class GraphLayout:
    """Layout of a client graph in a plot.

    Attributes:
        graph: the complete graph.
        positions: of each client; clients that diverge less are closer together.
        group_colors: color by true group; clients without a known one are in the group ''.
        groups: true group by client.
        largest: largest divergence (nats).
    """

    graph: nx.Graph
    positions: dict[str, Any]
    group_colors: dict[str, Any]
    groups: Groups
    largest: float

    @property
    def clients(self) -> list[str]:
        """Names of the clients, sorted."""
        return sorted(self.graph)

    def color(self, client: str) -> Any:
        """Color of a client's true group."""
        return self.group_colors[self.groups.get(client) or ""]


@dataclass(frozen=True)
class Panel:
    """What a panel shows of the graph.

    Attributes:
        title: heading.
        edges: drawn edges.
        labeled: edges with their divergence beside them.
        ringed: clients with a red ring.
    """

    title: str
    edges: set[Edge]
    labeled: set[Edge]
    ringed: set[str] = field(default_factory=set)


def plot_client_graph(memory: GraphMemory, groups: Groups, path: Path) -> None:
    """A round's client graph (DRIFT figures 3 to 5 and 12).

    Three panels: all divergences, the minimum spanning tree, and the shortest paths of the first
    client, with a red ring around the clients that it is aggregated with. Edges have their
    divergence beside them; in the first panel only up to MAX_LABELED clients.

    Args:
        memory: the graph, its tree and the aggregation weights.
        groups: the clients' true groups, as colors.
        path: PNG to write.
    """
    import matplotlib

    layout = _layout(memory, groups)
    with save_figure(path, dpi=100, nrows=1, ncols=3, figsize=(18, 6)) as (figure, axes):
        for panel_axes, panel in zip(axes, _panels(memory, layout), strict=True):
            _draw_panel(panel_axes, layout, panel)
        norm = matplotlib.colors.Normalize(0.0, layout.largest)
        scale = matplotlib.cm.ScalarMappable(norm, matplotlib.colormaps["viridis"])
        figure.colorbar(scale, ax=axes, label="symmetric KL (nats)", shrink=0.7)
        if set(layout.group_colors) != {""}:
            _draw_group_legend(axes[0], layout)


def _layout(memory: GraphMemory, groups: Groups) -> GraphLayout:
    import matplotlib

    graph = nx.node_link_graph(memory.graph, edges="edges")
    names = sorted(graph)
    weights = [weight for _, _, weight in graph.edges.data("weight")]
    largest = max(weights, default=0.0) or 1.0
    distances = {
        one: {other: graph[one][other]["weight"] / largest + 0.4 for other in names if other != one}
        for one in names
    }
    positions = nx.kamada_kawai_layout(graph, dist=distances) if len(names) > 2 else nx.circular_layout(graph)
    palette = matplotlib.colormaps["Set2"]
    group_names = sorted({groups.get(name) or "" for name in names})
    group_colors = {group: palette(number % 8) for number, group in enumerate(group_names)}
    return GraphLayout(graph, positions, group_colors, groups, largest)


def _panels(memory: GraphMemory, layout: GraphLayout) -> list[Panel]:
    source = layout.clients[0]
    paths = nx.single_source_dijkstra_path(layout.graph, source, weight="weight")
    path_edges: set[Edge] = set()
    for nodes in paths.values():
        path_edges |= {frozenset(step) for step in pairwise(nodes)}
    tree_edges = {frozenset(edge) for edge in memory.tree}
    all_edges = {frozenset(edge) for edge in layout.graph.edges}
    members = set(memory.weights.get(source, {}))
    labeled = all_edges if len(layout.clients) <= MAX_LABELED else set()
    return [
        Panel("divergence of all pairs", all_edges, labeled),
        Panel("minimum spanning tree", tree_edges, tree_edges),
        Panel(f"shortest paths from {label(source)}, red: aggregated with", path_edges, path_edges, members),
    ]


def _draw_group_legend(axes: Axes, layout: GraphLayout) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], marker="o", linestyle="", color=color, label=label(group or "unknown"))
        for group, color in layout.group_colors.items()
    ]
    axes.legend(handles=handles, title="group", fontsize=8)


def _draw_panel(axes: Axes, layout: GraphLayout, panel: Panel) -> None:
    import matplotlib

    graph = layout.graph
    names = layout.clients
    nx.draw_networkx_nodes(
        graph,
        layout.positions,
        ax=axes,
        nodelist=names,
        node_size=500,
        node_color=[layout.color(name) for name in names],
        edgecolors=["red" if name in panel.ringed else "white" for name in names],
        linewidths=2,
    )
    nx.draw_networkx_labels(
        graph, layout.positions, ax=axes, labels={name: label(name) for name in names}, font_size=8
    )
    drawn = [tuple(sorted(edge)) for edge in sorted(panel.edges, key=sorted)]
    nx.draw_networkx_edges(
        graph,
        layout.positions,
        ax=axes,
        edgelist=drawn,
        width=1.5,
        edge_color=[graph.edges[edge]["weight"] for edge in drawn],
        edge_cmap=matplotlib.colormaps["viridis"],
        edge_vmin=0.0,
        edge_vmax=layout.largest,
    )
    texts = {tuple(sorted(edge)): f"{graph.edges[tuple(edge)]['weight']:.2g}" for edge in panel.labeled}
    nx.draw_networkx_edge_labels(
        graph, layout.positions, ax=axes, edge_labels=texts, font_size=7, rotate=False
    )
    axes.set_title(panel.title)
    axes.set_axis_off()
    axes.margins(0.15)
