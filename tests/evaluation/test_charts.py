"""Charts: what their traces show."""

import re

import numpy as np
import pytest

from components.evaluation.charts import (
    COLORS,
    bar_chart,
    curve_charts,
    domain_colors,
    front_chart,
    heat_map,
    interval_chart,
    line_chart,
    network_chart,
    partition_chart,
    write_charts,
)


def luminance(color):
    """Relative luminance of a color of WCAG 2."""
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("page", ["#ffffff", "#14181f"])
@pytest.mark.parametrize("color", COLORS)
def test_lines_have_the_contrast_that_wcag_asks_for_on_a_light_and_on_a_dark_page(color, page):
    first, second = sorted((luminance(color), luminance(page)))
    assert (second + 0.05) / (first + 0.05) >= 3


def test_a_line_has_a_band_of_its_color_and_its_name_in_the_legend_unless_it_is_the_only_one():
    points = [("loss", 1, 0.3), ("loss", 1, 0.7), ("loss", 2, 0.2), ("loss", 2, 0.6), ("a", 1, 0.1)]
    band, line, other = line_chart("t", "round", "nats", points).data
    assert list(band.x) == [1, 2, 2, 1]
    assert list(band.y) == [0.7, 0.6, 0.2, 0.3]
    assert (band.mode, band.showlegend) == ("lines", False)
    assert (line.name, list(line.y)) == ("loss", [0.5, pytest.approx(0.4)])
    assert line.line.color == COLORS[0]
    assert (other.name, other.line.color) == ("a", COLORS[1])
    assert line_chart("t", "round", "nats", [("loss", 1, 1)]).layout.showlegend is False


def test_names_from_data_are_shown_as_they_are():
    figure = line_chart("<b>t</b>", "x", "y", [("<i>ada</i>", 1, 1)])
    assert figure.layout.title.text == "&lt;b&gt;t&lt;/b&gt;"
    assert figure.data[0].name == "&lt;i&gt;ada&lt;/i&gt;"


def test_a_band_over_seeds_is_from_the_smallest_to_the_largest_with_the_mean():
    curves = {
        "DRIFT": {
            0: [{"round": 2, "reward": 1.0}],
            1: [{"round": 2, "reward": 2.0}, {"round": 4, "reward": 3.0}],
        },
        "FedAvg": {0: [{"round": 2, "margin": 1.0}]},
    }
    (figure,) = curve_charts(curves, {"reward": "A", "x": "B"})
    band, line = figure.data
    assert figure.layout.title.text == "A"
    assert (line.name, list(line.x), list(line.y)) == ("DRIFT", [2, 4], [1.5, 3.0])
    assert list(band.y) == [2.0, 3.0, 3.0, 1.0]


def test_bars_of_a_name_that_a_series_lacks_are_missing_and_seeds_are_points():
    values = [("common", "A", 0.9), ("common", "B", 0.8), ("own", "B", 0.4), ("own", "B", 0.6)]
    common, own, _, points = bar_chart("t", "accuracy", values).data
    assert list(common.x) == ["A", "B"]
    assert (list(own.x), list(own.y)) == (["B"], [0.5])
    assert list(points.y) == [0.4, 0.6]
    assert points.offsetgroup == own.offsetgroup != common.offsetgroup


def test_bars_of_more_series_than_colors_differ_by_their_pattern():
    figure = bar_chart("t", "pairs", [(str(n), "A", 1) for n in range(10)], stacked=True)
    assert [bar.marker.color for bar in figure.data[8:]] == [*COLORS[:2]]
    assert [bar.marker.pattern.shape for bar in figure.data[7:9]] == ["", "/"]


def test_a_partition_shows_clients_from_the_largest_and_combines_small_domains():
    counts = {f"client-{n:02}": {f"domain-{m:02}": n + m for m in range(25)} for n in range(45)}
    figure = partition_chart(counts)
    assert "40 of 45 clients" in figure.layout.title.text
    assert len(figure.data) == 8
    assert figure.data[-1].name == "all others"
    assert figure.data[0].x[0] == "client-44"
    assert figure.data[0].x[-1] == "client-00"
    assert sum(bar.y[0] for bar in figure.data) == sum(counts["client-44"].values())


def test_a_domain_has_one_color_in_the_charts_of_a_page():
    counts = {"ada": {"news": 3, "<mail>": 9}, "bea": {"news": 2}}
    colors = domain_colors(counts)
    assert colors == {"<mail>": COLORS[1], "news": COLORS[2]}
    bars = {bar.name: bar.marker.color for bar in partition_chart(counts).data}
    points = [("mean", 1, 0.5), ("news", 1, 0.5), ("<mail>", 1, 0.5)]
    chart = line_chart("t", "x", "y", points, colors=colors | {"mean": COLORS[0]})
    lines = {line.name: line.line.color for line in chart.data}
    assert bars == {"&lt;mail&gt;": COLORS[1], "news": COLORS[2]}
    assert lines == bars | {"mean": COLORS[0]}


def test_long_domains_that_begin_equally_have_bars_of_their_own():
    names = ["x" * 300, "x" * 299 + "y", "x" * 37 + "…"]
    figure = partition_chart({"ada": dict.fromkeys(names, 1), "bea": dict.fromkeys(names, 2)})
    assert {bar.name for bar in figure.data} == {"x" * 37 + "…", "x" * 33 + "… (2)", "x" * 33 + "… (3)"}
    assert [list(bar.y) for bar in figure.data] == [[2, 1]] * 3


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ('O\'Brien "q"', 'O\'Brien "q"'),
        ("$\\bad{$", "&#36;\\bad{&#36;"),
        ("%{y}", "&#37;{y}"),
        ("研究者-一", "研究者-一"),
        ("x" * 300, "x" * 59 + "…"),
    ],
)
def test_plotly_shows_names_as_they_are(name, label):
    line = line_chart(name, "x", "y", [(name, 1, 0.5), ("other", 1, 0.5)]).data[0]
    bar = bar_chart("t", "y", [("series", name, 1.0)]).data[0]
    cells, frames = heat_map("t", "loss", [name], [name], [[1]], {name: name}).data
    nodes = {name: (0.0, 0.0, name), "other": (1.0, 0.0, "")}
    *_, group = network_chart("t", "nats", {(name, "other"): 1.0}, nodes, largest=1.0).data
    assert line.name == label
    assert list(bar.x) == [label]
    assert (list(cells.x), list(frames.y)) == ([label], [label])
    assert list(group.text) == [label]


def test_intervals_are_rows_and_those_without_a_number_are_left_out():
    intervals = {"A": (0.6, 0.5, 0.8), "B": (float("nan"), 0, 0)}
    first, seeds = interval_chart("t", "win rate", intervals, 0.5, {"A": [0.55, 0.65]}).data
    assert list(first.y) == ["A"]
    assert first.error_x.array[0] == pytest.approx(0.2)
    assert first.error_x.arrayminus[0] == pytest.approx(0.1)
    assert list(seeds.x) == [0.55, 0.65]
    (tied,) = interval_chart("t", "win rate", {"A": (0.5, None, None)}, 0.5).data
    assert list(tied.x) == [0.5]
    assert np.isnan(tied.error_x.array).all()


def test_a_heat_map_has_gaps_and_frames():
    cells, frames = heat_map(
        "t", "loss", ["ada", "bea"], ["s0", "s1"], [[1, 2], [float("nan"), 3]], {"bea": "s1"}
    ).data
    assert cells.z == pytest.approx(np.array([[1, 2], [np.nan, 3]]), nan_ok=True)
    assert (list(frames.x), list(frames.y)) == (["s1"], ["bea"])


def test_a_network_draws_each_edge_once_and_rings_nodes():
    nodes = {"ada": (0.0, 0.0, "x"), "bea": (1.0, 0.0, "x"), "cyd": (0.0, 1.0, "")}
    edges = {("ada", "bea"): 0.1, ("ada", "cyd"): 2.0}
    figure = network_chart(
        "t", "nats", edges, nodes, largest=2.0, rings={"near <ada>": {"bea"}}, labeled=True
    )
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    assert sum(np.isfinite(line.x).sum() for line in lines) == 4
    labels, unknown, known = (trace for trace in figure.data if trace.mode == "markers+text")
    assert list(labels.text) == ["0.1", "2"]
    assert (unknown.name, known.name) == ("group unknown", "group x")
    (ring,) = (trace for trace in figure.data if trace.mode == "markers")
    assert (ring.name, list(ring.x), list(ring.y)) == ("near &lt;ada&gt;", [1.0], [0.0])


def test_dominated_policies_of_a_front_are_hollow_and_off_its_line():
    front = [("FIRM", "a", 1.0, 1.0, True), ("FIRM", "b", 2.0, 2.0, False)]
    line, points, base = front_chart("t", ("x", "y"), front, ("base policy", 0.0, 0.5)).data
    assert list(line.x) == [2.0]
    assert list(points.marker.symbol) == ["circle-open", "circle"]
    assert (base.name, base.x[0], base.y[0]) == ("base policy", 0.0, 0.5)


def test_written_charts_load_nothing_from_a_network(tmp_path):
    write_charts([line_chart("t", "x", "y", [("a", 1, 1)])], tmp_path / "charts.html")
    text = (tmp_path / "charts.html").read_text(encoding="utf-8")
    assert "plotly.js" in text
    assert not re.search(r"<(script|link)[^>]+(src|href)=", text)
