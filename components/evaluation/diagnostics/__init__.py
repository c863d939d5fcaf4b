"""Diagnostics: what is specific to a method in tracking and reports; methods name theirs."""

from __future__ import annotations

from components.config import Registry
from components.evaluation.diagnostics.diagnostic import Diagnostic

DIAGNOSTICS: Registry[type[Diagnostic]] = Registry(
    "diagnostic",
    "fed_rlhf.diagnostics",
    {
        "client_graph": "components.evaluation.diagnostics.client_graph:ClientGraphDiagnostic",
        "grouping": "components.evaluation.diagnostics.grouping_diagnostic:GroupingDiagnostic",
        "objectives": "components.evaluation.diagnostics.objective_figures:ObjectivesDiagnostic",
    },
)
"""Diagnostics by name."""


def load_diagnostics(names: list[str]) -> list[Diagnostic]:
    """Diagnostics of a method, in the order of their names in its options."""
    return [DIAGNOSTICS.load(name)() for name in names]
