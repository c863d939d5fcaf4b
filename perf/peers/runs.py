"""Timed work of the project and of peers, and its comparison."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, TypeAdapter, ValidationError

from components.config import UserError
from perf import harness

if TYPE_CHECKING:
    import pandas as pd

OURS = "fed-rlhf"
TOLERANCE = 1e-3
"""Largest difference between first losses of the same work (nats)."""


class TimedWork(BaseModel):
    """A round, or the work of one client."""

    seconds: float  # wall time
    losses: dict[str, tuple[float, float]]  # by client, of its first and its last step (nats)


Program = Callable[[], Any]
"""Does the work in a process of its own, and gives the JSON of its TimedWork."""


def parse_work(name: str, items: Any) -> list[TimedWork]:
    """The work of the JSON that a program printed.

    Raises:
        UserError: it has another form.
    """
    try:
        return TypeAdapter(list[TimedWork]).validate_python(items)
    except ValidationError:
        raise UserError(f"{name} could not be measured: its last line is not the JSON of its times") from None


def alternate(programs: Mapping[str, Program], repeats: int) -> pd.DataFrame:
    """Run all programs in turn; see harness.alternate.

    Args:
        programs: by name; the first is the project's, whose losses the others must have.
        repeats: runs of each program.

    Returns:
        the median seconds of each run's rounds or clients without the first one, and the largest
        differences of its losses from the project's in the same repeat.

    Raises:
        UserError: a program fails.
        AssertionError: a peer does other work.
    """

    def timed(name: str) -> dict[str, Any]:
        work = parse_work(name, programs[name]())
        return {"seconds": statistics.median(part.seconds for part in work[1:]), "work": work}

    frame = harness.alternate({name: partial(timed, name) for name in programs}, repeats)
    ours = frame[frame["name"] == OURS].set_index("repeat")["work"]
    for row in frame.itertuples():
        require_equal_work(row.name, ours[row.repeat], row.work)
    columns = ["loss difference, first steps", "loss difference, last steps"]
    frame[columns] = [largest_difference(ours[row.repeat], row.work) for row in frame.itertuples()]
    return frame.drop(columns="work")


def require_equal_work(name: str, ours: Sequence[TimedWork], peers: Sequence[TimedWork]) -> None:
    """Require the same clients, and equal losses in their first steps.

    The last steps are not judged, because differences of rounding grow with each step.

    Raises:
        AssertionError: clients differ, or a loss differs by more than TOLERANCE.
    """
    if [set(part.losses) for part in ours] != [set(part.losses) for part in peers]:
        raise AssertionError(f"{name} must train the clients of {OURS}: {ours} and {peers}")
    first, _ = largest_difference(ours, peers)
    if not first <= TOLERANCE:
        raise AssertionError(
            f"{name} must do the work of {OURS}, but losses of first steps differ by {first:.4f}:"
            f" {ours} and {peers}"
        )


def largest_difference(ours: Sequence[TimedWork], peers: Sequence[TimedWork]) -> tuple[float, float]:
    """Largest difference between losses of the same clients, in first and in last steps (nats)."""
    differences = []
    for own_part, peer_part in zip(ours, peers, strict=True):
        for client, losses in own_part.losses.items():
            differences.append(np.abs(np.subtract(losses, peer_part.losses[client])))
    first, last = np.max(differences, axis=0).tolist()
    return first, last
