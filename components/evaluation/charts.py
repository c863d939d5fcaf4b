"""Charts of plain numbers, for reports and artifacts: plotly figures that need no network.

Names that come from data are encoded and short (components/names.py). Figures have a
transparent background; a page sets the color of their texts (components/reporting/page.html.j2).
Plotly and pandas take seconds to import, and are imported where a chart is drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.names import plotly_text, short_labels

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

COLORS = ("#2f7ec7", "#c4681c", "#23916a", "#a05fc0", "#cc4b5b", "#7d858f", "#9a7b13", "#2a93a8")
"""Of lines and bars, in order; each has a contrast of 3 on a light and on a dark page."""
GREY = COLORS[5]
RED = "#ff4d4d"
DASHES = [dash for dash in ("solid", "dash", "dot", "dashdot") for _ in COLORS]
PATTERNS = [shape for shape in ("", "/", "x", ".", "+") for _ in COLORS]
"""Beside the color, where more series are shown than there are colors."""
MAX_NAMES = 40
"""Number of names beyond which an axis shows none."""
MAX_DOMAINS = 8
"""Number of domains beyond which the smaller ones are combined."""
MAX_CHARACTERS = 38
"""Of a domain's name in the legend of a partition."""
SHADES = 12
"""Colors of the edges of a network, which are drawn together."""

AXIS = {"gridcolor": "rgba(128,128,128,0.25)", "zerolinecolor": "rgba(128,128,128,0.4)", "automargin": True}
LAYOUT: Mapping[str, Any] = {
    "colorway": COLORS,
    "colorscale": {"sequential": "Viridis"},
    "title": {"x": 0, "xref": "container", "font": {"size": 15}},
    "font": {"family": "system-ui, sans-serif", "size": 13},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "margin": {"l": 60, "r": 20, "t": 48, "b": 48},
    "legend": {"orientation": "h", "y": -0.3, "yanchor": "top"},
    "xaxis": AXIS,
    "yaxis": AXIS,
}
CONFIG: Mapping[str, Any] = {"responsive": True, "displaylogo": False, "displayModeBar": False}
"""Of all charts, see plotly.js."""

Point = Mapping[str, float]
Curves = Mapping[str, Mapping[int, Sequence[Point]]]
"""Points by arm and seed; each point has `round` and some other numbers."""


def line_chart(
    title: str,
    x_title: str,
    y_title: str,
    points: Iterable[tuple[str, float, float]],
    *,
    reference_line: tuple[float, str] | None = None,
    y_range: tuple[float, float] | None = None,
    colors: Mapping[str, str] | None = None,
) -> Figure:
    """A line for each name: means of the points with equal x, in a band from the smallest to the largest.

    Args:
        points: (name, x, y).
        reference_line: a horizontal line and what it means, e.g. chance.
        colors: by name; other names get those of COLORS in turn.
    """
    from plotly import express
    from plotly.colors import hex_to_rgb
    from plotly.graph_objects import Figure, Scatter

    rows = list(points)
    frame = _frame(rows, "name", "x", "y")
    names = list(frame["name"].unique())
    lines = frame.groupby(["name", "x"])["y"].agg(["mean", "min", "max"]).reset_index()
    figure = express.line(
        lines,
        x="x",
        y="mean",
        color="name",
        line_dash="name",
        line_dash_sequence=DASHES,
        category_orders={"name": names},
        color_discrete_map=_color_map(colors, (row[0] for row in rows)),
        markers=len(lines) <= 100 * len(names),
        render_mode="svg",
        **_texts(title, x=x_title, mean=y_title),
    )
    bands = []
    style = {"mode": "lines", "line_width": 0, "fill": "toself", "hoverinfo": "skip", "showlegend": False}
    for trace in figure.data:
        line = lines[lines["name"] == trace.name]
        if (line["max"] > line["min"]).any():
            x, y = [*line["x"], *line["x"][::-1]], [*line["max"], *line["min"][::-1]]
            color = f"rgba{(*hex_to_rgb(trace.line.color), 0.15)}"
            bands.append(Scatter(x=x, y=y, fillcolor=color, legendgroup=trace.name, **style))
    figure = Figure([*bands, *figure.data], figure.layout)
    if frame["x"].max() <= 12 and (frame["x"] % 1 == 0).all():
        figure.update_xaxes(dtick=1)
    return _finished(figure, reference_line, showlegend=len(names) > 1, yaxis_range=y_range)


def curve_charts(curves: Curves, titles: Mapping[str, str]) -> list[Figure]:
    """A chart of each number that has a title: a line for each arm, in a band over its seeds."""
    points = {key: list(_points(curves, key)) for key in titles}
    return [line_chart(title, "rounds done", "", points[key]) for key, title in titles.items() if points[key]]


def _points(curves: Curves, key: str) -> Iterator[tuple[str, float, float]]:
    for arm, runs in curves.items():
        for point in chain.from_iterable(runs.values()):
            if key in point:
                yield arm, point["round"], point[key]


def bar_chart(
    title: str,
    y_title: str,
    values: Iterable[tuple[str, str, float]],
    *,
    stacked: bool = False,
    reference_line: tuple[float, str] | None = None,
    colors: Mapping[str, str] | None = None,
) -> Figure:
    """Means as bars side by side, with a point for each value; or stacked sums.

    The values are (series, name, value), of which several of the same bar are e.g. of several seeds; line and
    colors are as of `line_chart`.
    """
    from plotly import express

    rows = list(values)
    frame = _frame(rows, "series", "name", "value")
    bars = frame.groupby(["series", "name"], sort=False)["value"].agg("sum" if stacked else "mean")
    texts = _texts(title, name="", value=y_title)
    figure = express.bar(
        bars.reset_index(),
        x="name",
        y="value",
        color="series",
        color_discrete_map=_color_map(colors, (row[0] for row in rows)),
        pattern_shape="series",
        pattern_shape_sequence=PATTERNS,
        barmode="stack" if stacked else "group",
        **texts,
    )
    if not stacked:
        marker = {"size": 7, "line": {"width": 1, "color": "white"}}
        for trace in express.scatter(frame, x="name", y="value", color="series", **texts).data:
            figure.add_trace(trace.update(marker=marker, offsetgroup=trace.name, showlegend=False))
    figure.update_xaxes(type="category", showticklabels=frame["name"].nunique() <= MAX_NAMES)
    return _finished(figure, reference_line, scattermode="group")


def domain_colors(counts: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """A color for each domain in all charts of a page, the largest domains first.

    The first one of COLORS is left to what is of several domains.
    """
    totals: Counter[str] = Counter()
    for own in counts.values():
        totals.update(own)
    domains = sorted(totals, key=lambda name: (-totals[name], name))
    return {name: COLORS[(n + 1) % len(COLORS)] for n, name in enumerate(domains)}


def partition_chart(counts: Mapping[str, Mapping[str, int]]) -> Figure:
    """The number of pairs by client and domain (FedBiscuit figure 3), in the colors of domain_colors.

    Of many clients some are shown, at even distances by size, including the largest and the
    smallest; of many domains the smaller ones are combined.
    """
    import pandas as pd

    table = pd.DataFrame(counts).fillna(0)  # [domains, clients]
    for axis in (0, 1):  # from the largest to the smallest, equal ones by name
        totals = table.sum(axis=1 - axis).sort_index().sort_values(ascending=False, kind="stable")
        table = table.reindex(totals.index, axis=axis)
    clients = table.shape[1]
    title = f"Pairs of {clients} clients"
    if clients > MAX_NAMES:
        table = table.iloc[:, [round(i * (clients - 1) / (MAX_NAMES - 1)) for i in range(MAX_NAMES)]]
        title = f"Pairs of {MAX_NAMES} of {clients} clients, from the largest to the smallest"
    names = list(short_labels(table.index, MAX_CHARACTERS).values())
    colors = domain_colors(counts)
    colors = {name: colors[domain] for name, domain in zip(names, table.index, strict=True)}
    colors["all others"] = COLORS[0]
    if len(names) > MAX_DOMAINS:
        names[MAX_DOMAINS - 1 :] = ["all others"] * (len(names) - MAX_DOMAINS + 1)
    table.index = names
    bars = [(domain, client, pairs) for (domain, client), pairs in table.stack().items()]
    figure = bar_chart(title, "pairs", bars, stacked=True, colors=colors)
    if max(map(len, table.columns)) > MAX_CHARACTERS // 2:  # such names, e.g. UUIDs, would cover the chart
        figure.update_xaxes(showticklabels=False)
    return figure


def interval_chart(
    title: str,
    x_title: str,
    intervals: Mapping[str, tuple[float, float | None, float | None]],
    reference_line: float,
    singles: Mapping[str, Sequence[float]] | None = None,
) -> Figure:
    """Shares with their intervals, a row each, from the top; a dotted line at `reference_line`.

    By name, the intervals are the share with its lower and upper bound, left out without a number (without
    bounds it has no bar), and the singles the shares of single seeds.
    """
    from plotly import express

    frame = _frame([(name, *numbers) for name, numbers in intervals.items()], "name", "share", "low", "high")
    frame = frame.dropna(subset="share").astype({"low": float, "high": float})
    bounds = {"error_x": frame["high"] - frame["share"], "error_x_minus": frame["share"] - frame["low"]}
    texts = _texts(title, share=x_title, name="")
    figure = express.scatter(frame, x="share", y="name", **bounds, **texts)
    figure.update_traces(marker={"size": 10, "color": COLORS[0]})
    if singles:
        rows = [(name, share) for name, shares in singles.items() for share in shares]
        seeds = _frame(rows, "name", "share")
        marker = {"color": COLORS[1], "symbol": "line-ns-open", "size": 12}
        style = {"mode": "markers", "marker": marker, "name": "one seed", "showlegend": True}
        figure.add_scatter(x=seeds["share"], y=seeds["name"], **style)
    figure.add_vline(reference_line, line={"color": GREY, "dash": "dot"})
    figure.update_xaxes(range=(0, 1), tickformat=".0%")
    figure.update_yaxes(autorange="reversed", type="category")
    return _finished(figure, height=140 + 38 * max(len(frame), 1))


def heat_map(
    title: str,
    value: str,
    rows: Sequence[str],
    columns: Sequence[str],
    table: Sequence[Sequence[float]],
    marked: Mapping[str, str],
) -> Figure:
    """A table of numbers, NaN where there is none, as colors.

    `value` says what they are, with their unit; `marked` is by row the column that has a frame.
    """
    from plotly import express

    x, y = _labels(columns), _labels(rows)
    names = {"x": [x[name] for name in columns], "y": [y[name] for name in rows]}
    figure = express.imshow(table, **names, aspect="auto", **_texts(title, color=value))
    figure.add_scatter(
        x=[x[marked[name]] for name in rows if name in marked],
        y=[y[name] for name in rows if name in marked],
        mode="markers",
        marker={"symbol": "square-open", "size": 14, "color": RED, "line": {"width": 2}},
        showlegend=False,
        hoverinfo="skip",
    )
    figure.update_xaxes(type="category")
    figure.update_yaxes(type="category", showticklabels=len(rows) <= 2 * MAX_NAMES)
    return _finished(figure, height=min(260 + 22 * len(rows), 900))


def network_chart(
    title: str,
    weight: str,
    edges: Mapping[tuple[str, str], float],
    nodes: Mapping[str, tuple[float, float, str]],
    *,
    largest: float,
    rings: Mapping[str, Collection[str]] | None = None,
    labeled: bool = False,
) -> Figure:
    """A graph whose edges are colored by their weight, and whose nodes by their group.

    Args:
        weight: what the weights are, with their unit.
        nodes: position and group; the group is '' where it is unknown.
        largest: weight at the end of the color scale.
        rings: by what a ring means, the nodes that have one.
    """
    import numpy as np
    from plotly import express
    from plotly.colors import sample_colorscale

    by_group = sorted(nodes.items(), key=lambda node: node[1][2])
    rows = [(name, x, y, f"group {group}" if group else "group unknown") for name, (x, y, group) in by_group]
    frame = _frame(rows, "name", "x", "y", "group")
    figure = express.scatter(frame, x="x", y="y", color="group", text="name", **_texts(title))
    figure.update_traces(cliponaxis=False, textposition="top center", marker_size=16)
    groups = figure.data
    gap = (np.nan, np.nan)
    ends = np.array([(nodes[one][:2], nodes[other][:2], gap) for one, other in edges]).reshape(-1, 3, 2)
    weights = np.array(list(edges.values()))
    shades = np.minimum(weights / (largest or 1.0) * SHADES, SHADES - 1).astype(int)
    for shade in np.unique(shades):
        x, y = ends[shades == shade].reshape(-1, 2).T
        color = sample_colorscale("Viridis", shade / (SHADES - 1))[0]
        figure.add_scatter(x=x, y=y, mode="lines", line_color=color, hoverinfo="skip", showlegend=False)
    texts = [f"{value:.2g}" for value in weights]
    labels = _labels(nodes)
    ends_text = [" – ".join(labels[name] for name in edge) for edge in edges]
    x, y = ends[:, :2].mean(axis=1).T
    figure.add_scatter(
        x=x,
        y=y,
        mode="markers+text" if labeled else "markers",
        text=texts,
        hovertext=[f"{edge}: {text}" for edge, text in zip(ends_text, texts, strict=True)],
        hoverinfo="text",
        marker={"opacity": 0, "size": 12, "color": weights, "coloraxis": "coloraxis"},
        textfont={"size": 10},
        showlegend=False,
    )
    ring = {"symbol": "circle-open", "size": 22, "color": RED, "line_width": 3}
    for meaning, names in (rings or {}).items():
        x, y = np.array([nodes[name][:2] for name in names]).reshape(-1, 2).T
        style = {"mode": "markers", "marker": ring, "hoverinfo": "skip", "cliponaxis": False}
        figure.add_scatter(x=x, y=y, name=plotly_text(meaning), **style)
    figure.data = figure.data[len(groups) :] + groups  # nodes over edges
    scale = {"cmin": 0, "cmax": largest, "colorscale": "Viridis"}
    figure.update_layout(
        coloraxis=scale | {"colorbar": {"title": weight, "thickness": 12}},
        xaxis_visible=False,
        yaxis_visible=False,
    )
    return _finished(figure, height=460, showlegend=len(groups) > 1 or bool(rings))


def front_chart(
    title: str,
    plane: tuple[str, str],
    policies: Iterable[tuple[str, str, float, float, bool]],
    base: tuple[str, float, float],
) -> Figure:
    """Fronts in the plane of two rewards; dominated policies are hollow and off the line.

    A policy is (front, policy, both rewards, whether another policy of the front dominates it), and the base
    policy its name and rewards.
    """
    from plotly import express
    from plotly.graph_objects import Figure

    frame = _frame(policies, "front", "policy", "x", "y", "dominated")
    texts = _texts(title, x=f"reward, {plane[0]}", y=f"reward, {plane[1]}")
    best = frame[~frame["dominated"]].sort_values(["x", "y"])
    order = {"front": list(frame["front"].unique())}
    lines = express.line(best, x="x", y="y", color="front", category_orders=order, **texts)
    lines.update_traces(name=None, showlegend=False, hoverinfo="skip", hovertemplate=None)
    points = express.scatter(frame, x="x", y="y", color="front", text="policy", **texts)
    for number, trace in enumerate(points.data):
        dominated = frame.loc[frame["front"] == trace.name, "dominated"]
        symbols = ["circle-open" if worse else "circle" for worse in dominated]
        side = "bottom left" if number % 2 else "top right"
        trace.update(marker={"size": 10, "symbol": symbols}, textposition=side, textfont={"size": 10})
    figure = Figure([*lines.data, *points.data], points.layout)
    marker = {"symbol": "x", "color": GREY, "size": 11}
    figure.add_scatter(x=[base[1]], y=[base[2]], mode="markers", name=plotly_text(base[0]), marker=marker)
    return _finished(figure, height=440)


def write_charts(figures: Sequence[Figure], path: Path) -> None:
    """Write charts as one HTML file that needs no network."""
    parts = [
        figure.to_html(CONFIG, include_plotlyjs=n == 0, full_html=False, div_id=f"chart-{n}")
        for n, figure in enumerate(figures)
    ]
    head = f'<!doctype html>\n<meta charset="utf-8"><title>{escape(path.stem)}</title>'
    path.write_text("\n".join([head, *parts]) + "\n", encoding="utf-8")


def _frame(rows: Iterable[Sequence[Any]], *columns: str) -> pd.DataFrame:
    """Rows as a frame, in which texts are labels."""
    import pandas as pd

    frame = pd.DataFrame(list(rows), columns=list(columns))
    for column in columns:
        labels = _labels(cell for cell in frame[column] if isinstance(cell, str))
        if labels:
            frame[column] = [labels.get(cell, cell) for cell in frame[column]]
    return frame


def _labels(names: Iterable[str]) -> dict[str, str]:
    """By name, its label in a chart."""
    return {name: plotly_text(label) for name, label in short_labels(names).items()}


def _color_map(colors: Mapping[str, str] | None, names: Iterable[str]) -> dict[str, str]:
    """The color of each label of a chart with these names."""
    return {label: colors[name] for name, label in _labels(names).items() if colors and name in colors}


def _texts(title: str, **labels: str) -> dict[str, Any]:
    """Arguments of plotly.express: the title, the labels of columns, and how all charts look."""
    labels = {column: plotly_text(label) for column, label in labels.items()}
    return {"title": plotly_text(title), "labels": labels, "template": {"layout": LAYOUT}}


def _finished(figure: Figure, reference_line: tuple[float, str] | None = None, **layout: Any) -> Figure:
    """The figure with a reference line; its legend has no title unless the layout gives one."""
    if reference_line is not None:
        figure.add_hline(
            reference_line[0],
            line={"color": GREY, "dash": "dot"},
            annotation_text=plotly_text(reference_line[1]),
        )
    return figure.update_layout({"height": 340, "legend_title_text": ""} | layout)
