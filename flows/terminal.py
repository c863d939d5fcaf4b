"""What a run shows on the terminal: one live line below the lines that stay; without one, plain lines.

The view is a handler of log records. It draws those that carry progress (components/progress.py), and prints
warnings and errors; all others are for the log, which -v prints and Prefect's UI shows. It writes to the
standard error, so that the standard output of a command has its result alone.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from components.config import UserError
from components.environment import USER_ERROR
from components.progress import (
    CLIENTS,
    ROUNDS,
    ClientDone,
    Milestone,
    PhaseStarted,
    Work,
    format_duration,
    format_loss,
)

INTERNAL = "prefect._internal"
"""Logger of Prefect's own threads; a lost server is reported by flows/stopping.py."""
LOGGERS = ("components", "flows", "tasks")
"""Loggers of the project that do not belong to Prefect; their progress is below the level of other logs."""


class Counter:
    """A work as it was reported last, the units that are done, and the time that these take."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.done = work.done
        self._units: set[str] = set()
        self._first = work.done
        self._started = self._last = time.monotonic()

    def report(self, work: Work) -> bool:
        """Take a later report of the same work; False for that of another one, or of a new beginning."""
        if work.name != self.work.name or work.done < self.done:
            return False
        if work.done != self.done:
            self._last = time.monotonic()
        self.work, self.done = work, work.done
        return True

    def add(self, unit: str) -> None:
        """Count a unit."""
        self._units.add(unit)
        self.done = min(len(self._units), self.work.total)

    def seconds_left(self) -> float | None:
        """Expected time until the work is done; None before the first unit is measured, and within
        the last second."""
        measured = self.done - self._first
        if measured <= 0 or self.done >= self.work.total:
            return None
        per_unit = (self._last - self._started) / measured
        left = per_unit * (self.work.total - self.done) - (time.monotonic() - self._last)
        return left if left >= 1 else None

    def position(self) -> str:
        """Where the work is: rounds are named by the one that runs, all else by what is done.

        What follows a finished work, as a measurement or saving, has no count of its own.
        """
        name, done, total = self.work.name, self.done, self.work.total
        if name == ROUNDS:
            text = f"round {min(done + 1, total)} of {total}"
        else:
            text = f"{name} {done} of {total}" if name.endswith("step") else f"{done} of {total} {name}"
        return f"{text} is done, what follows it is running" if done >= total else text


class View(logging.Handler):
    """The view of a run; a context in which it is live.

    Args:
        console: where it is drawn; None is the standard error. There is a live line on a terminal that
            can erase lines.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console = console or Console(stderr=True)
        self._phase = "starting"
        self._since = time.monotonic()
        self._main: Counter | None = None
        self._clients: Counter | None = None
        self._spinner = Spinner("dots")
        self._shown_errors: set[int] = set()
        self._replaced: list[logging.Handler] = []
        self._levels: dict[str, int] = {}
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._draw,
                console=console,
                refresh_per_second=8,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        else:
            self._print("starting ...")
        return self

    def __exit__(self, *_: object) -> None:
        root = logging.getLogger()
        root.removeHandler(self)
        for handler in self._replaced:
            root.addHandler(handler)
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)
        self.end()

    def end(self) -> None:
        """End the live line, and print nothing more."""
        if self._live is not None:
            self._live.stop()
        self._console = Console(quiet=True)

    def replace_console_log(self) -> None:
        """Take the place of the handlers by which Prefect logs to the console, until the block ends.

        Call it once Prefect has its settings. Its handlers for the API stay, so that the log in its UI is
        complete.
        """
        import prefect.main  # noqa: F401  # configures the handlers, and removes those that were there before
        from prefect.logging.handlers import PrefectConsoleHandler

        root = logging.getLogger()
        self._replaced = [handler for handler in root.handlers if isinstance(handler, PrefectConsoleHandler)]
        for handler in self._replaced:
            root.removeHandler(handler)
        root.addHandler(self)
        for name in LOGGERS:
            logger = logging.getLogger(name)
            self._levels[name] = logger.level
            logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Draw the event of a record, or print a warning; a terminal that is gone stops no run."""
        try:
            self._show(record)
        except Exception:
            self.handleError(record)

    def _show(self, record: logging.LogRecord) -> None:
        event = getattr(record, "progress", None)
        match event:
            case PhaseStarted(name):
                self._phase, self._since = name, time.monotonic()
                self._main = self._clients = None
            case Milestone():
                self._print(record.getMessage())
            case Work():
                self._report(event, record)
            case ClientDone(client) if self._clients is not None:
                self._clients.add(client)
            case None if record.levelno >= logging.WARNING and not record.name.startswith(INTERNAL):
                self._warn(record)

    def _report(self, work: Work, record: logging.LogRecord) -> None:
        if work.name == CLIENTS:
            self._clients = Counter(work)
            return
        if self._main is None or not self._main.report(work):
            self._main = Counter(work)
            self._clients = None
        elif work.name == ROUNDS and self._live is None:
            self._print(record.getMessage())

    def _warn(self, record: logging.LogRecord) -> None:
        """Print a warning, or an error that does not end the command with a sentence of its own."""
        message = record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        is_explained = isinstance(error, UserError) or hasattr(record, USER_ERROR)
        if message.startswith(("Finished in state ", "Crash detected!")) or is_explained:
            return
        if error is not None:  # each enclosing flow logs it again
            if id(error) in self._shown_errors:
                return
            self._shown_errors.add(id(error))
            message += "\n" + logging.Formatter().formatException(record.exc_info or (None, None, None))
        self._print(f"{record.levelname.lower()}: {message}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _draw(self) -> Text:
        """The live line: phase, work, loss, and times."""
        text = Text.assemble((self._phase, "bold"))
        main, clients = self._main, self._clients
        if main is not None:
            text.append(f"  {main.position()}")
            if main.done < main.work.total:
                if clients is not None:
                    text.append(f", {clients.done} of {clients.work.total} clients")
                if main.work.loss is not None:
                    text.append(f", loss {format_loss(main.work.loss)}")
        text.append(f"  {format_duration(time.monotonic() - self._since)} so far", "dim")
        left = None if main is None else main.seconds_left()
        if left is not None:
            text.append(f", about {format_duration(left)} left", "dim")
        frame = self._spinner.render(time.monotonic())
        line = Text.assemble(frame if isinstance(frame, Text) else "", " ", text)
        line.truncate(self._console.width, overflow="ellipsis")
        return line
