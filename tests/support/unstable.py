"""A pytest plug-in beside pytest-rerunfailures: names the tests that passed when they ran once more."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each of them, with the first line of its failure."""
    stats = terminalreporter.stats
    failed = {report.nodeid for kind in ("failed", "error") for report in stats.get(kind, [])}
    for report in stats.get("rerun", []):
        if report.nodeid not in failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash is not None else report.longreprtext
            terminalreporter.write_line(f"unstable: {report.nodeid} - {message.partition(chr(10))[0]}")
