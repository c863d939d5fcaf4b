"""The end of a run that is stopped by a signal, or whose Prefect server is lost.

What a run has committed is on disk, and a client may train for minutes, so the process says where the
run stands, closes it in MLflow and Prefect, and ends without waiting for its threads.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from prefect.exceptions import TerminationSignal

from infra.servers import is_up
from tasks.runs import HELD, Run

CLOSING_SECONDS = 3.0
"""For MLflow and Prefect to learn that a run was stopped."""
LOST_SECONDS = 40.0
"""After which a Prefect server that does not answer is lost."""
POLL_SECONDS = 4.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
"""Of Ctrl-C, the system, a terminal or connection that closes, Ctrl-\\, and a limit of processor time."""
STOPPING = threading.Lock()
"""Held by the thread that ends the process."""


@contextmanager
def stopping_on_signals(restore_terminal: Callable[[], None]) -> Iterator[None]:
    """Stop the runs of this process at SIGNALS, and at the loss of its Prefect server.

    A second one ends the process at once, except SIGHUP and SIGXCPU, which the system may send several times.
    What is ignored when the process starts, as SIGHUP under nohup, stays so; Ctrl-C does not. Within a flow,
    SIGTERM has a handler of Prefect, whose exception Python drops if a finalizer runs at that moment; such an
    exception stops the runs too.

    Args:
        restore_terminal: ends a live view before the last sentence is printed.
    """

    def handle(number: int, _: object) -> None:
        status = 128 + number
        if STOPPING.locked():
            if number in (signal.SIGHUP, signal.SIGXCPU):
                return
            os._exit(status)
        # In a thread, since the main one may hold a lock that is needed here.
        threading.Thread(target=stop_runs, args=(restore_terminal, status), daemon=True).start()

    def handle_dropped(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, TerminationSignal):
            handle(signal.SIGTERM, None)
        else:
            previous_hook(dropped)

    numbers = [n for n in SIGNALS if n == signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handle) for number in numbers}
    previous_hook, sys.unraisablehook = sys.unraisablehook, handle_dropped
    try:
        with stopping_without_server(restore_terminal):
            yield
    finally:
        sys.unraisablehook = previous_hook
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def stopping_without_server(restore_terminal: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Stop the runs of this process when its Prefect server has not answered for LOST_SECONDS."""
    url = os.environ.get("PREFECT_API_URL", "")
    ended = threading.Event()

    def watch() -> None:
        answered = time.monotonic()
        while not ended.wait(POLL_SECONDS):
            if is_up(f"{url}/health", timeout=POLL_SECONDS):
                answered = time.monotonic()
            elif time.monotonic() - answered > LOST_SECONDS and not ended.is_set():
                stop_runs(restore_terminal, 1, f"the Prefect server at {url} does not answer any more")

    if url and not os.environ.get("PREFECT_API_KEY"):
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def stop_runs(restore_terminal: Callable[[], None], status: int, fault: str = "") -> NoReturn:
    """Say where the runs of this process stopped, close them in MLflow and Prefect, and end the process.

    Args:
        restore_terminal: see stopping_on_signals.
        status: exit status.
        fault: why, if it is a fault.
    """
    STOPPING.acquire()  # never released: another thread that comes here waits for the end of the process
    runs = list(HELD)
    deadline = time.monotonic() + CLOSING_SECONDS
    closing = threading.Thread(target=_close, args=(runs, not fault), daemon=True)
    closing.start()
    try:
        restore_terminal()  # fails where the terminal is closed, as printing does
        print("\nStopping ...", file=sys.stderr, flush=True)
        closing.join(deadline - time.monotonic())
        sentence = "Stopped"  # at the end, since rounds are committed until the process ends
        if runs:
            sentence += f" {position(runs[-1])}; resume with: {runs[0].resume_command}"
        print(f"error: {fault}. {sentence}" if fault else sentence, file=sys.stderr, flush=True)
        sys.stdout.flush()
    finally:  # a run.json or a recipe that cannot be read must not keep the process alive
        closing.join(max(deadline - time.monotonic(), 0.0))
        os._exit(status)


def position(run: Run) -> str:
    """Where a run stands: 'after round 5 of 60' or 'in phase align'."""
    if run.is_benchmark:
        return "between two runs"
    rounds = run.recipe().federation.rounds
    phase = run.phase()
    done = run.committed_round() if phase == "federate" else None  # the last look, since rounds go on
    return f"in phase {phase}" if done is None else f"after round {done} of {rounds}"


def _close(runs: list[Run], has_server: bool) -> None:
    from prefect.states import Cancelled

    from tasks.flow_runs import end_flow_runs
    from tasks.tracking.run_tree import close_open_runs

    for run in reversed(runs):
        close_open_runs(run, "KILLED")
    flow_run = runs[0].metadata().get("flow_run_id") if runs else None
    if has_server and flow_run is not None:
        end_flow_runs(flow_run, Cancelled(message=f"Stopped; resume with: {runs[0].resume_command}"))
