"""A pytest plug-in: processor seconds of each test file, compared with those of tests/costs.json.

`--costs=check` notes which file needs 30 seconds more than recorded, and whether all files need half as much
again: give expensive tests the mark `long`, or record the costs anew by `make test
PYTEST_ARGS=--costs=record`. No note fails a session, since the same file needs up to twice as much beside
others. What is expected grows by the median ratio of measured to recorded seconds. Counted are the processes
of tests and those that they wait for, not the session's Prefect server.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "costs.json"
ALLOWED_GROWTH = 30.0
"""Processor seconds."""
ALLOWED_TOTAL = 1.5
"""Of the recorded sum."""
MEASURED: Counter[str] = Counter()
"""Processor seconds by file, in this process or, of a controller of xdist, in all of its workers."""
NOTES: list[str] = []
"""What the check has found."""


def processor_seconds() -> float:
    """Of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


def recorded_costs() -> dict[str, float]:
    """Processor seconds by file of an earlier run of `make test`; files below a second are left out."""
    costs: dict[str, float] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return costs


def grown_files(measured: Mapping[str, float], recorded: Mapping[str, float]) -> list[str]:
    """A sentence for each file that has become too expensive, and for the sum.

    Args:
        measured, recorded: processor seconds by file.
    """
    if not measured:
        return ["no test file was measured: --costs checks a run of the tests"]
    ratios = [seconds / recorded[name] for name, seconds in measured.items() if name in recorded]
    scale = max(1.0, statistics.median(ratios)) if ratios else 1.0
    files = {name: scale * cost for name, cost in recorded.items()}
    advice = "mark expensive tests `long`, or record the costs again with --costs=record"
    lines = []
    for name, seconds in sorted(measured.items()):
        if seconds > files.get(name, 0.0) + scale * ALLOWED_GROWTH:
            known = f"{files[name]:.0f} are expected" if name in files else "it is new or has another name"
            lines.append(f"{name} needs {seconds:.0f} processor seconds, and {known}: {advice}.")
    total, expected = sum(measured.values()), sum(files.get(name, 0.0) for name in measured)
    if total > ALLOWED_TOTAL * expected + scale * ALLOWED_GROWTH:
        lines.append(
            f"all files need {total:.0f} processor seconds, and {expected:.0f} are expected: {advice}."
        )
    return lines


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--costs", choices=["check", "record"], help="compare with or record tests/costs.json")


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
    elif config.option.costs == "record" and session.exitstatus == pytest.ExitCode.OK:
        kept = {name: cost for name, cost in recorded_costs().items() if (ROOT / name).is_file()}
        costs = kept | {name: round(seconds) for name, seconds in MEASURED.items()}
        costs = {name: seconds for name, seconds in sorted(costs.items()) if seconds >= 1}
        RECORDED.write_text(json.dumps(costs, indent=0) + "\n", encoding="utf-8")
    elif config.option.costs == "check":
        NOTES.extend(grown_files(MEASURED, recorded_costs()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the files that have become too expensive, and the sum."""
    if config.option.costs:
        terminalreporter.write_line(f"processor seconds: {MEASURED.total():.0f}")
        for line in NOTES:
            terminalreporter.write_line(f"note: {line}")
