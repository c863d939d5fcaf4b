"""Progress of a run, as the attribute `progress` of log records.

The code that works logs a line as ever, and adds what it means: `log.info(..., extra=progress(event))`. A log
shows the line, and the view of the terminal draws the event, see flows/terminal.py.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

ROUNDS = "round"
"""The work of which each unit has a line where there is no terminal."""
CLIENTS = "client"
"""The work within a round."""


@dataclass(frozen=True)
class PhaseStarted:
    """A phase begins; the work of the one before it is over."""

    name: str


@dataclass(frozen=True)
class Milestone:
    """The record's line stays on the terminal."""


@dataclass(frozen=True)
class Work:
    """How much of something is done."""

    name: str
    done: int
    total: int
    loss: float | None = None


@dataclass(frozen=True)
class ClientDone:
    """One more client is done in a step, which several threads work on; a repeated client counts once."""

    client: str


Event = PhaseStarted | Milestone | Work | ClientDone


def progress(event: Event) -> dict[str, Event]:
    """The `extra` of a log record with an event."""
    return {"progress": event}


def report_work(log: logging.Logger, work: Work) -> None:
    """Log how much of a work is done, where the work has no line of its own."""
    log.info("%s: %d of %d", work.name, work.done, work.total, extra=progress(work))


def format_loss(loss: float) -> str:
    """A loss; one near 0, as the mean of a policy's loss in PPO, by its first two digits."""
    return f"{loss:.3f}" if abs(loss) >= 0.01 or not loss else f"{loss:.2g}"


def format_duration(seconds: float) -> str:
    """A duration in its two largest units, e.g. '42 s', '3 min 20 s' or '2 h 5 min'."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
