"""A pytest plug-in: processor seconds of each test file, compared with those of tests/costs.json.

`--costs=check` fails the session where a file needs 30 seconds more than recorded: give its expensive
tests the mark `long`, or record the costs anew by `make test PYTEST_ARGS=--costs=record`, and say why.
Counted are the test processes and the processes that they wait for, not the session's Prefect server.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from statistics import median

import pytest

RECORDED = Path(__file__).resolve().parents[1] / "costs.json"
ALLOWED_GROWTH = 30.0
"""Processor seconds."""
MEASURABLE = 3.0
"""Processor seconds from which a file tells how fast the machine is."""
MEASURED: Counter[str] = Counter()
"""Processor seconds by file, in this process or, of a controller of xdist, in all of its workers."""


def processor_seconds() -> float:
    """Of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


def recorded_costs() -> dict[str, float]:
    """Processor seconds by file of an earlier run of `make test`; files below a second are left out."""
    costs: dict[str, float] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return costs


def grown_files(measured: Mapping[str, float], recorded: Mapping[str, float]) -> list[str]:
    """A sentence for each file that has become too expensive.

    Recorded costs are scaled by the median ratio, since machines differ; a faster one allows no more.
    """
    ratios = [
        measured[name] / cost for name, cost in recorded.items() if cost >= MEASURABLE and name in measured
    ]
    scale = max(1.0, median(ratios)) if ratios else 1.0
    lines = []
    for name, seconds in sorted(measured.items()):
        expected = scale * recorded.get(name, 0.0)
        if seconds > expected + ALLOWED_GROWTH:
            lines.append(
                f"{name} needs {seconds:.0f} processor seconds, and {expected:.0f} were recorded: mark its"
                " expensive tests `long`, or record the costs anew with --costs=record."
            )
    return lines


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--costs", choices=["check", "record"], help="check or record tests/costs.json")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the most expensive files first, so that no process runs one alone at the end."""
    costs = recorded_costs()
    items.sort(key=lambda item: -costs.get(item.nodeid.partition("::")[0], 0))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Add what a test, with the fixtures that it starts and ends, needs."""
    before = processor_seconds()
    try:
        return (yield)
    finally:
        MEASURED[item.nodeid.partition("::")[0]] += processor_seconds() - before


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_testnodedown(node: object) -> None:
    """Add what a worker of xdist has measured."""
    MEASURED.update(getattr(node, "workeroutput", {}).get("costs", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the costs to the controller, or check or record them."""
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["costs"] = dict(MEASURED)
    elif config.option.costs == "record":
        costs = {name: round(seconds) for name, seconds in sorted(MEASURED.items()) if seconds >= 1}
        RECORDED.write_text(json.dumps(costs, indent=0) + "\n", encoding="utf-8")
    elif config.option.costs == "check" and grown_files(MEASURED, recorded_costs()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the files that have become too expensive, and the sum."""
    if config.option.costs:
        terminalreporter.write_line(f"processor seconds: {MEASURED.total():.0f}")
    if config.option.costs == "check":
        for line in grown_files(MEASURED, recorded_costs()):
            terminalreporter.write_line(f"error: {line}", red=True)
