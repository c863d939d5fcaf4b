"""A pytest plug-in beside pytest-rerunfailures: names the tests that passed when they ran once more."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each of them, with the last line of its failure."""
    stats = terminalreporter.stats
    failed = {report.nodeid for kind in ("failed", "error") for report in stats.get(kind, [])}
    lines = {report.nodeid: report.longreprtext.strip() for report in stats.get("rerun", [])}
    for name, text in lines.items():
        if name not in failed:
            terminalreporter.write_line(f"unstable: {name} - {text.rpartition(chr(10))[2]}")
