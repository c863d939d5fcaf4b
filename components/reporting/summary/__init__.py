"""The summary of a run: metrics, lines of its log, and the table at its end."""

from components.reporting.summary.lines import (
    accuracy_line,
    margins_line,
    measure_line,
    partition_line,
    questions_line,
    round_line,
)
from components.reporting.summary.metrics import accuracy_metrics, evaluation_metrics, question_figures
from components.reporting.summary.table import FinishedRun, summarize_run

__all__ = [
    "FinishedRun",
    "accuracy_line",
    "accuracy_metrics",
    "evaluation_metrics",
    "margins_line",
    "measure_line",
    "partition_line",
    "question_figures",
    "questions_line",
    "round_line",
    "summarize_run",
]
