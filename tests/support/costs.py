"""A pytest plug-in: processor seconds of each test file.

The files that tests/costs.json has as the most expensive ones start first, so that no process runs one alone
at the end. `--costs=print` prints the seconds of a run, `make test PYTEST_ARGS=--costs=record` stores them.
Counted are the processes of tests and those that they wait for, not the session's Prefect server. The same
file needs up to twice as much beside others: no cost fails a session.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "costs.json"
PRINTED = 8.0
"""Processor seconds from which a file is printed."""
MEASURED: Counter[str] = Counter()
"""Processor seconds by file, in this process or, of a controller of xdist, in all of its workers."""


def processor_seconds() -> float:
    """Of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


def recorded_costs() -> dict[str, float]:
    """Processor seconds by file of an earlier run of `make test`; files below a second are left out."""
    costs: dict[str, float] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return costs


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--costs", choices=["print", "record"], help="processor seconds of test files")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the most expensive files first."""
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
    """Send the costs to the controller, or record them."""
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["costs"] = dict(MEASURED)
    elif config.option.costs == "record" and session.exitstatus == pytest.ExitCode.OK:
        kept = {name: cost for name, cost in recorded_costs().items() if (ROOT / name).is_file()}
        costs = kept | {name: round(seconds) for name, seconds in MEASURED.items()}
        costs = {name: seconds for name, seconds in sorted(costs.items()) if seconds >= 1}
        RECORDED.write_text(json.dumps(costs, indent=0) + "\n", encoding="utf-8")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the sum and the most expensive files."""
    if config.option.costs:
        terminalreporter.write_line(f"processor seconds: {MEASURED.total():.0f}")
        for name, seconds in MEASURED.most_common():
            if seconds >= PRINTED:
                terminalreporter.write_line(f"{seconds:6.0f} {name}")
