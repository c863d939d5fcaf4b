"""Timed runs of the project and of peers, each in a process of its own, and their comparison."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from components.config import UserError
from components.paths import PACKAGE

OURS = "fed-rlhf"
TOLERANCE = 1e-3
"""Largest difference between first losses of the same work (nats)."""


@dataclass(frozen=True)
class TimedWork:
    """A round, or the work of one client.

    Attributes:
        seconds: wall time.
        losses: by client, of its first and its last step (nats).
    """

    seconds: float
    losses: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Program:
    """A program that does the work of an exchange folder, and prints its times as JSON.

    Attributes:
        command: with its arguments.
        variables: its environment; None takes that of this process.
        folder: working folder.
    """

    command: Sequence[str]
    variables: Mapping[str, str] | None = None
    folder: Path = PACKAGE


@dataclass
class Measurements:
    """What was measured of one program.

    Attributes:
        seconds: of each run, the median of its rounds or clients without the first one.
        work: of the last run.
    """

    seconds: list[float] = field(default_factory=list)
    work: list[TimedWork] = field(default_factory=list)


def own_program(kind: str, folder: Path) -> Program:
    """The project's own work on an exchange folder; `kind` is that of `python -m perf.peers --measure`."""
    command = [sys.executable, "-m", "perf.peers", "--measure", kind, "--exchange", str(folder)]
    return Program(command)


def run_program(name: str, program: Program) -> list[TimedWork]:
    """Run a program, and read the last line of its output.

    Raises:
        UserError: it fails, or has no such line.
    """
    done = subprocess.run(
        program.command,
        env=dict(os.environ if program.variables is None else program.variables),
        cwd=program.folder,
        capture_output=True,
        text=True,
    )
    try:
        if done.returncode == 0:
            return [parse_work(item) for item in json.loads(done.stdout.strip().splitlines()[-1])]
        lines = done.stderr.strip().splitlines()
    except (ValueError, KeyError, TypeError, IndexError):
        lines = ["its last line is not the JSON of its times"]
    reason = lines[-1] if lines else f"exit status {done.returncode}"
    raise UserError(f"{name} could not be measured: {reason}")


def parse_work(item: Mapping[str, object]) -> TimedWork:
    """A TimedWork of the JSON that programs print."""
    seconds, losses = item["seconds"], item["losses"]
    if not isinstance(seconds, float) or not isinstance(losses, Mapping):
        raise TypeError("seconds are a number, and losses are by client")
    return TimedWork(seconds, {str(name): (float(pair[0]), float(pair[1])) for name, pair in losses.items()})


def alternate(programs: dict[str, Program], repeats: int) -> dict[str, Measurements]:
    """Run all programs in turn, in one order and then in the other.

    Args:
        programs: by name; the first is the project's, whose losses the others must have.
        repeats: runs of each program.

    Raises:
        UserError: a program fails.
        AssertionError: a peer does other work.
    """
    measured = {name: Measurements() for name in programs}
    for number in range(repeats):
        for name in reversed(programs) if number % 2 else programs:
            work = run_program(name, programs[name])
            measured[name].seconds.append(statistics.median(part.seconds for part in work[1:]))
            measured[name].work = work
        ours, *peers = programs
        for name in peers:
            require_equal_work(name, measured[ours].work, measured[name].work)
    return measured


def require_equal_work(name: str, ours: Sequence[TimedWork], peers: Sequence[TimedWork]) -> None:
    """Require the same clients, and equal losses in their first steps.

    The last steps are not judged, because differences of rounding grow with each step.

    Args:
        name: of the peer.
        ours: work of the project.
        peers: work of the peer.

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
    first = []
    last = []
    for own_part, peer_part in zip(ours, peers, strict=True):
        for client, losses in own_part.losses.items():
            first.append(abs(losses[0] - peer_part.losses[client][0]))
            last.append(abs(losses[1] - peer_part.losses[client][1]))
    return max(first), max(last)
