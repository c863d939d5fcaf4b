"""A sink of diagnostics that records what is logged to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class RecordingSink:
    """Records metrics, documents and charts.

    Attributes:
        metrics: value by name, by step.
        documents: JSON documents by path.
        charts: figures by path.
    """

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}
        self.documents: dict[str, Any] = {}
        self.charts: dict[str, Sequence[Any]] = {}

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.metrics.setdefault(step, {}).update(metrics)

    def log_json(self, content: Any, path: str) -> None:
        self.documents[path] = content

    def log_charts(self, figures: Sequence[Any], path: str) -> None:
        self.charts[path] = figures
