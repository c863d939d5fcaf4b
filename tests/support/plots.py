"""The figure that a plot function draws, for tests that read what it shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def drawn_figure(draw: Callable[[], object]) -> Figure:
    """The only figure that a function draws and closes; its axes can be read after it is closed."""
    from matplotlib import pyplot

    close = pyplot.close
    figures: list[Figure] = []

    def record_and_close(figure: Figure) -> None:
        figures.append(figure)
        close(figure)

    with mock.patch.object(pyplot, "close", record_and_close):
        draw()
    (figure,) = figures
    return figure
