"""Shared parts of all plots: figures without a display, escaped labels, bands over seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = Mapping[str, float]
Curves = Mapping[str, Mapping[int, Sequence[Point]]]
"""Points by arm and seed; each point has `round` and some other numbers."""


@dataclass(frozen=True)
class Image:
    """A plot of a report.

    Attributes:
        title: heading.
        path: PNG file.
        caption: what the plot shows.
    """

    title: str
    path: Path
    caption: str = ""


@contextmanager
def save_figure(path: Path, dpi: int = 110, **layout: Any) -> Iterator[tuple[Figure, Any]]:
    """Figure and axes of `pyplot.subplots`, saved to a PNG at the end.

    Args:
        path: PNG to write.
        dpi: resolution.
        layout: arguments of `pyplot.subplots`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(layout="constrained", **layout)
    try:
        yield figure, axes
        figure.savefig(path, dpi=dpi)
    finally:
        pyplot.close(figure)


def label(name: str) -> str:
    """A name that comes from data, as matplotlib shows it: `$` would start a formula."""
    return name.replace("$", r"\$")


def integer_ticks(axes: Axes) -> None:
    """Put ticks of the horizontal axis at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))


def plot_bands(axes: Axes, curves: Curves, key: str) -> None:
    """A line per arm, the mean over seeds, in a band from the smallest to the largest seed.

    Args:
        axes: where to draw.
        curves: points by arm and seed.
        key: the number that is drawn over `round`; arms without it have no line.
    """
    for position, (arm, runs) in enumerate(curves.items()):
        values: dict[int, list[float]] = {}
        for curve in runs.values():
            for point in curve:
                if key in point:
                    values.setdefault(int(point["round"]), []).append(point[key])
        rounds = sorted(values)
        if not rounds:
            continue
        color = f"C{position % 10}"
        means = [float(np.mean(values[n])) for n in rounds]
        axes.plot(rounds, means, marker="o", markersize=3, color=color, label=label(arm))
        axes.fill_between(
            rounds,
            [min(values[n]) for n in rounds],
            [max(values[n]) for n in rounds],
            color=color,
            alpha=0.12,
            linewidth=0,
        )
    integer_ticks(axes)
