"""Calls that share the threads of CPU operations.

An operation on a few rows is too small for many threads, which then wait for each other. Two such
operations at a time, with half of the threads each, take less time than one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def concurrent_parts(device: torch.device) -> int:
    """Parts into which work on a device is divided: two on the CPU if there are threads for both, else one.

    The number follows from the threads of CPU operations, which a run stores with its recipe, so
    the same run is always divided in the same way.
    """
    import torch

    return 2 if device.type == "cpu" and torch.get_num_threads() > 1 else 1


def run_concurrently(calls: Sequence[Callable[[], T]], at_once: int | None = None) -> list[T]:
    """Results of calls, each in a thread with an even share of the threads of CPU operations.

    A single call, and calls of which one runs at a time, run in the thread of the caller.

    Args:
        calls: what is called; what a call computes may not depend on the others.
        at_once: how many run at the same time; None runs all.

    Returns:
        their results, in the order of the calls.

    Raises:
        Exception: what the first call that failed raised, once all calls have ended.
    """
    import torch

    parts = min(at_once or len(calls), len(calls))
    if parts < 2:
        return [call() for call in calls]
    threads = torch.get_num_threads()
    share = max(1, threads // parts)

    def run(call: Callable[[], T]) -> T:
        torch.set_num_threads(share)
        return call()

    try:
        with ThreadPoolExecutor(parts) as executor:
            futures = [executor.submit(run, call) for call in calls]
        return [future.result() for future in futures]
    finally:
        torch.set_num_threads(threads)  # new threads would begin with the number that was set last
