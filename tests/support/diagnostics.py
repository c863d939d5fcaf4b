"""A sink of diagnostics that records what is logged to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class RecordingSink:
    """Records metrics, documents and the paths of plots.

    Attributes:
        folder: plots are drawn into it; None does not draw them.
        metrics: value by name, by step.
        documents: JSON documents by path.
        plots: paths of the plots, as artifacts.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.metrics: dict[int, dict[str, float]] = {}
        self.documents: dict[str, Any] = {}
        self.plots: list[str] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.metrics.setdefault(step, {}).update(metrics)

    def log_json(self, content: Any, path: str) -> None:
        self.documents[path] = content

    def log_plot(self, draw: Callable[[Path], None], path: str) -> None:
        self.plots.append(path)
        if self.folder is not None:
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            draw(target)
