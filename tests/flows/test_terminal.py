"""What a run shows: its live line on a terminal, and plain lines without one (also tests/wheel)."""

import contextlib
import io
import logging
import os
import pty
import re
import sys
import threading
from types import SimpleNamespace

import pytest
from rich.console import Console

from components.config import RecipeError
from components.environment import USER_ERROR_FILTER
from components.progress import (
    CLIENTS,
    ROUNDS,
    ClientDone,
    Milestone,
    PhaseStarted,
    Work,
    format_duration,
    progress,
)
from flows.terminal import View
from tests.support.screen import screen

log = logging.getLogger("flows.a_run")
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Clock:
    """Time that a test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("flows.terminal.time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def plain():
    """A view without a terminal, of all records of the logger `log`."""
    with shown(View(Console(file=io.StringIO(), width=200))) as view:
        yield view


def shown(view):
    """The view, which gets the records of `log` until it is closed."""
    log.setLevel(logging.INFO)
    log.addHandler(view)
    view.close = lambda: log.removeHandler(view)
    return view


@pytest.fixture(autouse=True)
def detached():
    yield
    for handler in list(log.handlers):
        log.removeHandler(handler)


def lines(view):
    return view._console.file.getvalue().splitlines()


def line(view):
    """The live line, without the spinner."""
    return view._draw().plain[2:]


def report(event, text="a line"):
    log.info(text, extra=progress(event))


def test_without_a_terminal_there_is_a_line_for_each_round_and_phase(plain):
    report(PhaseStarted("federate"))
    report(Work(ROUNDS, 0, 2))
    report(Work(CLIENTS, 0, 2))
    report(ClientDone("a"))
    report(Work(ROUNDS, 1, 2), "round 1 of 2: loss [0.5]")
    report(Work("DPO step", 1, 4))
    log.info("a line for the log")
    report(Milestone(), "federate: 2 rounds in 1 s")
    assert lines(plain) == ["starting ...", "round 1 of 2: loss [0.5]", "federate: 2 rounds in 1 s"]


def test_long_lines_are_not_wrapped_and_warnings_are_shown_without_a_time_and_a_logger(plain):
    report(Milestone(), "word " * 100)
    log.warning("%d pairs are equal", 3)
    assert lines(plain)[1:] == ["word " * 100, "warning: 3 pairs are equal"]


def test_an_error_is_shown_once_with_its_stack_trace(plain):
    for _ in range(2):  # the task and the flow around it log the same exception
        try:
            raise ERROR
        except OSError:
            log.exception("Encountered exception during execution")
    log.error("Finished in state Failed('disk full')")
    assert sum(text.startswith("error: ") for text in lines(plain)) == 1
    assert lines(plain)[-1] == "OSError: disk full"


ERROR = OSError("disk full")


def test_an_error_of_the_user_is_left_to_the_command_with_or_without_its_stack_trace(plain):
    try:
        raise RecipeError("use at most 3")
    except RecipeError:
        log.exception("Encountered exception during execution")
    assert lines(plain) == ["starting ..."]
    log.addFilter(USER_ERROR_FILTER)
    try:
        raise RecipeError("use at most 3")
    except RecipeError:
        log.exception("Encountered exception during execution")
    finally:
        log.removeFilter(USER_ERROR_FILTER)
    assert lines(plain) == ["starting ..."]


def test_a_closed_terminal_stops_no_run(plain, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    plain._console.file.close()
    report(Milestone())
    report(PhaseStarted("align"))
    assert plain._phase == "align"


def test_the_live_line_has_phase_round_clients_and_loss(plain, clock):
    report(PhaseStarted("federate"))
    report(Work(ROUNDS, 2, 8))
    report(Work(CLIENTS, 0, 3))
    report(ClientDone("a"))
    report(ClientDone("a"))  # a repeated task
    assert line(plain) == "federate  round 3 of 8, 1 of 3 clients  0 s so far"
    clock.now += 10
    report(Work(ROUNDS, 3, 8, loss=0.25))
    report(Work(CLIENTS, 0, 3))
    assert line(plain) == "federate  round 4 of 8, 0 of 3 clients, loss 0.250  10 s so far, about 50 s left"


def test_the_time_left_is_that_of_measured_rounds_and_counts_down(plain, clock):
    report(PhaseStarted("federate"))
    report(Work(ROUNDS, 4, 8))
    clock.now += 5
    assert "left" not in line(plain)
    clock.now += 55
    report(Work(ROUNDS, 6, 8))
    assert "about 1 min 0 s left" in line(plain)
    clock.now += 20
    assert "about 40 s left" in line(plain)
    clock.now += 100
    assert "left" not in line(plain)


def test_the_live_line_has_the_step_of_dpo_and_its_loss_and_says_when_it_is_done(plain, clock):
    report(PhaseStarted("align"))
    report(Work("DPO step", 3, 40, loss=0.6931))
    assert line(plain) == "align  DPO step 3 of 40, loss 0.693  0 s so far"
    report(Work("DPO step", 3, 40, loss=-0.00021))
    assert "loss -0.00021" in line(plain)
    report(PhaseStarted("align"))
    report(Work("DPO step", 40, 40, loss=0.5))
    assert line(plain) == "align  DPO step 40 of 40 is done, what follows it is running  0 s so far"
    report(Work(ROUNDS, 7, 8))
    assert "done" not in line(plain)
    report(Work(ROUNDS, 8, 8))
    assert line(plain) == "align  round 8 of 8 is done, what follows it is running  0 s so far"


def test_a_phase_begins_without_earlier_work_and_a_work_that_begins_again_is_measured_anew(plain, clock):
    report(Work("DPO step", 3, 40))
    report(PhaseStarted("evaluate"))
    assert line(plain) == "evaluate  0 s so far"
    report(PhaseStarted("evaluate"))
    report(Work("comparisons by the judge", 0, 8))
    clock.now += 10
    report(Work("comparisons by the judge", 4, 8))
    report(Work("comparisons by the judge", 0, 8))
    assert line(plain) == "evaluate  0 of 8 comparisons by the judge  10 s so far"


def test_the_live_line_is_cut_to_the_width_of_the_terminal(clock):
    view = View(Console(file=io.StringIO(), width=20))
    view._phase = "a phase with a long name"
    assert len(view._draw().plain) == 20


def test_an_error_within_the_live_view_leaves_a_clean_terminal():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with pytest.raises(RecipeError), View(console):
        raise RecipeError("a sentence")
    assert "starting" in file.getvalue()
    assert screen(file.getvalue()) == ["", ""]
    assert file.getvalue().rfind(SHOW_CURSOR) > file.getvalue().rfind(HIDE_CURSOR)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (42, "42 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_a_duration_has_its_two_largest_units(seconds, text):
    assert format_duration(seconds) == text


# --- the command


@contextlib.contextmanager
def on_a_terminal():
    """A terminal as the standard streams of this process; a list gets what is printed."""
    master, slave = pty.openpty()
    printed = []

    def read():
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(master, 65536):
                printed.append(part.decode())

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w", buffering=1) as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        patch.setenv("TERM", "xterm")
        yield printed
    reader.join()
    os.close(master)


@pytest.mark.long
def test_a_run_on_a_terminal_draws_one_line_that_is_gone_at_the_end(new_workplace):
    from flows.cli import app

    place = new_workplace("terminal")
    with on_a_terminal() as printed:
        status, _ = place.call(lambda: app(["run", "debug"], standalone_mode=False))
    text = re.sub(r"\x1b\[[0-9;]*m", "", "".join(printed))  # without colors
    assert status == 0
    assert "prepare  " in text
    assert re.search(r"round \d of 3, \d of 2 clients", text)
    assert "Finished in state" not in text
    rows = screen(text)
    assert not [row for row in rows if "of 2 clients" in row or "starting" in row]
    phases = [row.partition(":")[0] for row in rows if re.match(r"(prepare|federate|align|evaluate): ", row)]
    assert phases == ["prepare", "federate", "align", "evaluate"]
    assert "Next" in rows
    assert text.rfind(SHOW_CURSOR) > text.rfind(HIDE_CURSOR)
