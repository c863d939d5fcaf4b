"""Charts of plain numbers, for reports and artifacts: plotly figures that need no network.

Names that come from data are escaped, because plotly reads tags in texts. Figures have a
transparent background; a page sets the color of their texts (components/reporting/page.html.j2).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLORS = ("#2f7ec7", "#c4681c", "#23916a", "#a05fc0", "#cc4b5b", "#7d858f", "#9a7b13", "#2a93a8")
"""Of lines and bars, in order; each has a contrast of 3 on a light and on a dark page."""
GREY = COLORS[5]
MAX_NAMES = 40
"""Number of names beyond which an axis shows none."""

MAX_DOMAINS = 20
"""Number of domains beyond which the smaller ones are combined."""
MAX_CHARACTERS = 38
"""Of a domain's name."""

Point = Mapping[str, float]
Curves = Mapping[str, Mapping[int, Sequence[Point]]]
"""Points by arm and seed; each point has `round` and some other numbers."""


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        name: in the legend; lines of one name share a color and an entry.
        x, y: the points.
        low, high: bounds of a band around the line; empty without one.
        dashed: whether the line is dashed.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False


@dataclass(frozen=True)
class Interval:
    """A number with its interval, and single values beside it.

    Attributes:
        name: of the row.
        value, low, high: the number.
        singles: values of single seeds.
    """

    name: str
    value: float
    low: float
    high: float
    singles: Sequence[float] = ()


def line_chart(
    title: str,
    x_title: str,
    y_title: str,
    lines: Sequence[Line],
    *,
    reference: tuple[float, str] | None = None,
    y_range: tuple[float, float] | None = None,
) -> Figure:
    """Lines over whole numbers, e.g. rounds.

    Args:
        title, x_title, y_title: texts; a unit is part of the axis' text.
        lines: drawn in this order.
        reference: a horizontal line and what it means, e.g. chance.
        y_range: of the vertical axis; by the data where it is left out.
    """
    from plotly.graph_objects import Scatter

    figure = _figure(title, x_title, y_title)
    colors: dict[str, str] = {}
    for line in lines:
        first = line.name not in colors
        color = colors.setdefault(line.name, COLORS[len(colors) % len(COLORS)])
        x = list(line.x)
        if line.low:
            figure.add_trace(
                Scatter(
                    x=x + x[::-1],
                    y=[*line.high, *reversed(line.low)],
                    mode="lines",
                    fill="toself",
                    fillcolor=_translucent(color, 0.15),
                    line={"width": 0},
                    hoverinfo="skip",
                    showlegend=False,
                    legendgroup=line.name,
                )
            )
        figure.add_trace(
            Scatter(
                x=x,
                y=list(line.y),
                name=escape(line.name),
                legendgroup=line.name,
                showlegend=first,
                mode="lines+markers" if len(x) <= 100 else "lines",
                line={"color": color, "dash": "dash" if line.dashed else "solid"},
            )
        )
    if reference is not None:
        figure.add_hline(reference[0], line={"color": GREY, "dash": "dot"}, annotation_text=reference[1])
    figure.update_layout(showlegend=len(colors) > 1)
    largest = max((max(line.x) for line in lines if len(line.x)), default=0)
    if largest <= 12 and all(float(x).is_integer() for line in lines for x in line.x):
        figure.update_xaxes(dtick=1)
    if y_range is not None:
        figure.update_yaxes(range=y_range)
    return figure


def seed_bands(curves: Curves, key: str) -> list[Line]:
    """A line per arm: the mean of `key` over the seeds, in a band from the smallest to the largest."""
    lines = []
    for arm, runs in curves.items():
        values: dict[int, list[float]] = {}
        for curve in runs.values():
            for point in curve:
                if key in point:
                    values.setdefault(int(point["round"]), []).append(point[key])
        rounds = sorted(values)
        if rounds:
            means = [float(np.mean(values[n])) for n in rounds]
            lows, highs = [min(values[n]) for n in rounds], [max(values[n]) for n in rounds]
            several = len(runs) > 1
            lines.append(Line(arm, rounds, means, lows if several else (), highs if several else ()))
    return lines


def curve_charts(curves: Curves, titles: Mapping[str, str]) -> list[Figure]:
    """A chart of bands over the seeds for each number of the curves that has a title, in their order."""
    charts = []
    for key, title in titles.items():
        if lines := seed_bands(curves, key):
            charts.append(line_chart(title, "rounds done", title, lines))
    return charts


def bar_chart(
    title: str,
    y_title: str,
    bars: Mapping[str, Mapping[str, float]],
    *,
    stacked: bool = False,
    reference: tuple[float, str] | None = None,
    singles: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
) -> Figure:
    """Bars side by side, or stacked.

    Args:
        title, y_title: texts.
        bars: heights by series and name; a name that a series lacks has no bar.
        stacked: one bar for each name.
        reference: a horizontal line and what it means.
        singles: points over the bars, e.g. of single seeds, by series and name.
    """
    from plotly.graph_objects import Bar, Scatter

    figure = _figure(title, "", y_title)
    names = list(dict.fromkeys(name for heights in bars.values() for name in heights))
    for number, (series, heights) in enumerate(bars.items()):
        color = COLORS[number % len(COLORS)]
        figure.add_trace(
            Bar(
                x=[escape(name) for name in names],
                y=[heights.get(name) for name in names],
                name=escape(series),
                marker={"color": color, "pattern": {"shape": _pattern(number)}},
                offsetgroup=None if stacked else str(number),
            )
        )
        for name, values in ((singles or {}).get(series) or {}).items():
            figure.add_trace(
                Scatter(
                    x=[escape(name)] * len(values),
                    y=list(values),
                    mode="markers",
                    marker={"color": color, "size": 7, "line": {"width": 1, "color": "white"}},
                    offsetgroup=str(number),
                    showlegend=False,
                    hovertemplate="one seed: %{y:.3f}<extra></extra>",
                )
            )
    figure.update_layout(barmode="stack" if stacked else "group", scattermode="group")
    figure.update_xaxes(type="category", showticklabels=len(names) <= MAX_NAMES)
    if reference is not None:
        figure.add_hline(reference[0], line={"color": GREY, "dash": "dot"}, annotation_text=reference[1])
    return figure


def partition_chart(counts: Mapping[str, Mapping[str, int]]) -> Figure:
    """The pairs of each client by domain (FedBiscuit figure 3).

    Of many clients some are shown, at even distances by size, including the largest and the
    smallest; of many domains the smaller ones are combined.

    Args:
        counts: number of pairs by client and domain.
    """
    ranked = sorted(counts, key=lambda client: (-sum(counts[client].values()), client))
    shown = ranked
    if len(ranked) > MAX_NAMES:
        shown = [ranked[round(i * (len(ranked) - 1) / (MAX_NAMES - 1))] for i in range(MAX_NAMES)]
    totals: Counter[str] = Counter()
    for by_domain in counts.values():
        totals.update(by_domain)
    domains = sorted(totals, key=lambda domain: (-totals[domain], domain))
    largest = domains if len(domains) <= MAX_DOMAINS else domains[: MAX_DOMAINS - 1]
    bars = {
        _shortened(domain or "all pairs"): {client: float(counts[client].get(domain, 0)) for client in shown}
        for domain in largest
    }
    if len(largest) < len(domains):
        bars["all others"] = {
            client: float(sum(n for domain, n in counts[client].items() if domain not in largest))
            for client in shown
        }
    title = f"Pairs of {len(shown)} clients"
    if len(shown) < len(ranked):
        title = f"Pairs of {len(shown)} of {len(ranked)} clients, from the largest to the smallest"
    return bar_chart(title, "pairs", bars, stacked=True)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"


def interval_chart(title: str, x_title: str, rows: Sequence[Interval], reference: float) -> Figure:
    """Shares with their intervals, a row each, from the top; a dotted line at the reference."""
    from plotly.graph_objects import Scatter

    figure = _figure(title, x_title, "")
    known = [row for row in rows if math.isfinite(row.value)]
    names = [escape(row.name) for row in known]
    figure.add_trace(
        Scatter(
            x=[row.value for row in known],
            y=names,
            mode="markers",
            marker={"color": COLORS[0], "size": 10},
            error_x={
                "symmetric": False,
                "array": [row.high - row.value for row in known],
                "arrayminus": [row.value - row.low for row in known],
                "color": COLORS[0],
            },
            showlegend=False,
        )
    )
    for row in known:
        if len(row.singles) > 1:
            figure.add_trace(
                Scatter(
                    x=list(row.singles),
                    y=[escape(row.name)] * len(row.singles),
                    mode="markers",
                    marker={"color": COLORS[1], "symbol": "line-ns-open", "size": 12},
                    name="one seed",
                    legendgroup="seed",
                    showlegend=row is known[0],
                )
            )
    figure.add_vline(reference, line={"color": GREY, "dash": "dot"})
    figure.update_xaxes(range=(0, 1), tickformat=".0%")
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_layout(height=140 + 38 * max(len(known), 1))
    return figure


def heat_map(
    title: str,
    value: str,
    rows: Sequence[str],
    columns: Sequence[str],
    table: Sequence[Sequence[float]],
    marked: Mapping[str, str],
) -> Figure:
    """A table of numbers as colors.

    Args:
        title: text.
        value: what the numbers are, with their unit.
        rows, columns: names.
        table: a number for each row and column; NaN where there is none.
        marked: by row, the column that has a frame.
    """
    from plotly.graph_objects import Heatmap, Scatter

    figure = _figure(title, "", "")
    shown = [escape(name) for name in rows]
    cells = [[number if math.isfinite(number) else None for number in row] for row in table]
    figure.add_trace(
        Heatmap(
            z=cells,
            x=[escape(name) for name in columns],
            y=shown,
            colorscale="Viridis",
            colorbar={"title": value},
        )
    )
    figure.add_trace(
        Scatter(
            x=[escape(marked[name]) for name in rows if name in marked],
            y=[escape(name) for name in rows if name in marked],
            mode="markers",
            marker={"symbol": "square-open", "size": 14, "color": "#ff4d4d", "line": {"width": 2}},
            showlegend=False,
            hoverinfo="skip",
        )
    )
    figure.update_xaxes(type="category")
    figure.update_yaxes(type="category", autorange="reversed", showticklabels=len(rows) <= 2 * MAX_NAMES)
    figure.update_layout(height=min(260 + 22 * len(rows), 900))
    return figure


@dataclass(frozen=True)
class Network:
    """A graph that is drawn.

    Attributes:
        title: text.
        positions: of each node.
        groups: of each node, shown as its color; '' for unknown ones.
        edges: weights of the drawn edges.
        largest: weight at the end of the color scale.
        ringed: nodes with a ring.
        labeled: whether weights are written beside the edges.
    """

    title: str
    positions: Mapping[str, tuple[float, float]]
    groups: Mapping[str, str]
    edges: Mapping[tuple[str, str], float]
    largest: float
    ringed: frozenset[str] = frozenset()
    labeled: bool = False


SHADES = 12
"""Colors of the edges of a network, which are drawn together."""


def network_chart(network: Network, weight: str) -> Figure:
    """A graph whose edges are colored by their weight, and whose nodes by their group.

    Args:
        network: the graph.
        weight: what the weights are, with their unit.
    """
    from plotly.colors import sample_colorscale
    from plotly.graph_objects import Scatter

    figure = _figure(network.title, "", "")
    palette = sample_colorscale("Viridis", [n / (SHADES - 1) for n in range(SHADES)])
    by_shade: dict[int, list[tuple[str, str]]] = {}
    for edge, value in network.edges.items():
        share = value / network.largest if network.largest else 0.0
        by_shade.setdefault(min(int(share * SHADES), SHADES - 1), []).append(edge)
    for shade, edges in sorted(by_shade.items()):
        x: list[float | None] = []
        y: list[float | None] = []
        for one, other in edges:
            x += [network.positions[one][0], network.positions[other][0], None]
            y += [network.positions[one][1], network.positions[other][1], None]
        figure.add_trace(
            Scatter(
                x=x, y=y, mode="lines", line={"color": palette[shade]}, hoverinfo="skip", showlegend=False
            )
        )
    middles = [
        np.mean([network.positions[one], network.positions[other]], axis=0) for one, other in network.edges
    ]
    texts = [f"{value:.2g}" for value in network.edges.values()]
    figure.add_trace(
        Scatter(
            x=[float(middle[0]) for middle in middles],
            y=[float(middle[1]) for middle in middles],
            mode="text" if network.labeled else "markers",
            text=texts,
            hovertext=[
                f"{escape(one)} – {escape(other)}: {text}"
                for (one, other), text in zip(network.edges, texts, strict=True)
            ],
            hoverinfo="text",
            marker={"opacity": 0, "size": 12},
            textfont={"size": 10},
            showlegend=False,
        )
    )
    figure.add_trace(
        Scatter(
            x=[None],
            y=[None],
            mode="markers",
            marker={
                "color": [0],
                "colorscale": "Viridis",
                "cmin": 0,
                "cmax": network.largest,
                "showscale": True,
                "colorbar": {"title": weight, "thickness": 12},
            },
            showlegend=False,
        )
    )
    names = sorted(set(network.groups.values()))
    for number, group in enumerate(names):
        nodes = [node for node in network.positions if network.groups[node] == group]
        figure.add_trace(
            Scatter(
                x=[network.positions[node][0] for node in nodes],
                y=[network.positions[node][1] for node in nodes],
                mode="markers+text",
                text=[escape(node) for node in nodes],
                textposition="top center",
                name=escape(group or "unknown"),
                showlegend=len(names) > 1,
                marker={
                    "color": COLORS[number % len(COLORS)],
                    "size": 16,
                    "line": {
                        "width": [3 if node in network.ringed else 0 for node in nodes],
                        "color": "#ff4d4d",
                    },
                },
            )
        )
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.update_layout(height=460, legend={"title": {"text": "group"}})
    return figure


@dataclass(frozen=True)
class FrontLine:
    """The policies of a front in the plane of two rewards.

    Attributes:
        name: of the front.
        arms: names of the policies.
        x, y: their rewards.
        dominated: whether another policy of the front is better by both.
    """

    name: str
    arms: Sequence[str]
    x: Sequence[float]
    y: Sequence[float]
    dominated: Sequence[bool]


def front_chart(
    title: str, plane: tuple[str, str], fronts: Sequence[FrontLine], base: tuple[str, float, float]
) -> Figure:
    """Fronts in the plane of two rewards; dominated policies are hollow and off the line.

    Args:
        title: text.
        plane: names of the rewards.
        fronts: a color each.
        base: name and rewards of the base policy.
    """
    from plotly.graph_objects import Scatter

    figure = _figure(title, f"reward, {plane[0]}", f"reward, {plane[1]}")
    for number, front in enumerate(fronts):
        color = COLORS[number % len(COLORS)]
        best = sorted(
            (x, y) for x, y, worse in zip(front.x, front.y, front.dominated, strict=True) if not worse
        )
        figure.add_trace(
            Scatter(
                x=[x for x, _ in best],
                y=[y for _, y in best],
                mode="lines",
                line={"color": color},
                showlegend=False,
                hoverinfo="skip",
            )
        )
        figure.add_trace(
            Scatter(
                x=list(front.x),
                y=list(front.y),
                mode="markers+text",
                name=escape(front.name),
                text=[escape(arm) for arm in front.arms],
                textposition="bottom left" if number % 2 else "top right",
                textfont={"size": 10},
                marker={
                    "color": color,
                    "size": 10,
                    "symbol": ["circle-open" if worse else "circle" for worse in front.dominated],
                },
            )
        )
    figure.add_trace(
        Scatter(
            x=[base[1]],
            y=[base[2]],
            mode="markers",
            name=escape(base[0]),
            marker={"symbol": "x", "color": GREY, "size": 11},
        )
    )
    figure.update_layout(height=440)
    return figure


def write_charts(figures: Sequence[Figure], path: Path) -> None:
    """Write charts as one HTML file that needs no network."""
    from plotly.io import to_html
    from plotly.offline import get_plotlyjs

    parts = [
        to_html(figure, include_plotlyjs=False, full_html=False, config=CONFIG, div_id=f"chart-{number}")
        for number, figure in enumerate(figures)
    ]
    head = f'<meta charset="utf-8"><title>{escape(path.stem)}</title><script>{get_plotlyjs()}</script>'
    path.write_text(
        f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>\n", encoding="utf-8"
    )


CONFIG: dict[str, Any] = {"responsive": True, "displaylogo": False, "displayModeBar": False}
"""Of all charts, see plotly.js."""


def _figure(title: str, x_title: str, y_title: str) -> Figure:
    """An empty figure."""
    from plotly.graph_objects import Figure

    grid = {
        "gridcolor": "rgba(128,128,128,0.25)",
        "zerolinecolor": "rgba(128,128,128,0.4)",
        "automargin": True,
    }
    figure = Figure()
    figure.update_layout(
        template="none",
        title={"text": escape(title), "x": 0, "xref": "container", "font": {"size": 15}},
        font={"family": "system-ui, sans-serif", "size": 13},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 60, "r": 20, "t": 48, "b": 48},
        height=340,
        hovermode="closest",
        legend={"orientation": "h", "y": -0.3, "yanchor": "top"},
        xaxis={"title": {"text": escape(x_title)}} | grid,
        yaxis={"title": {"text": escape(y_title)}} | grid,
    )
    return figure


def _translucent(color: str, alpha: float) -> str:
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def _pattern(number: int) -> str:
    """A pattern beside the color where more series are shown than there are colors."""
    return ("", "/", "x", ".", "+")[number // len(COLORS) % 5]
