"""How threads of a CPU operation wait for each other: a selector step alone and beside a busy program."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

from components.environment import SPIN
from perf.comparison import Comparison, Ratios, format_seconds
from perf.selector_costs import CONCURRENT, ONE_POSITION, measure_arm

WAITING: Mapping[str, Mapping[str, str]] = {
    "asleep": {"OMP_WAIT_POLICY": "PASSIVE"},
    "short-spin": SPIN,
    "long-spin": {"GOMP_SPINCOUNT": "300000"},
}
"""Threads that sleep at once, spin as the project sets, and spin as long as by libgomp's default."""


def compare_waiting(comparison: Comparison) -> Ratios:
    """Print the seconds of a selector step for each way to wait, alone and beside a busy process.

    A step in one part waits after every operation. A step in concurrent parts has one thread for
    each, and does not wait on two cores.

    Returns:
        how many times faster the project's setting is than each other one.
    """
    ratios: Ratios = {}
    print(f"\nSelector training step ({comparison.recipe}) by how threads wait, {comparison.repeats} runs")
    for arm in (ONE_POSITION, CONCURRENT):
        for place in ("alone", "beside-a-busy-process"):
            seconds = _measure(comparison, arm, busy=place != "alone")
            print(f"  {arm}, {place}")
            for name, times in seconds.items():
                print(f"    {name:<12}{format_seconds(times, 3)}")
            ours = statistics.median(seconds["short-spin"])
            for name in ("asleep", "long-spin"):
                ratio = statistics.median(seconds[name]) / ours
                ratios[f"waiting/{arm}/{place}/short_spin_against_{name}"] = ratio
                print(f"    short-spin against {name}: {ratio:.2f}x")
    return ratios


def _measure(comparison: Comparison, arm: str, busy: bool) -> dict[str, list[float]]:
    """Seconds of a step for each way to wait; the ways alternate."""
    seconds: dict[str, list[float]] = {name: [] for name in WAITING}
    with busy_process() if busy else nullcontext():
        for _ in range(comparison.repeats):
            for name, variables in WAITING.items():
                seconds[name].append(measure_arm(comparison.recipe, arm, variables).seconds)
    return seconds


@contextmanager
def busy_process() -> Iterator[None]:
    """A process that uses one core."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
