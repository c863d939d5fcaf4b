"""Signals that stop the runs of a process."""

import gc
import os
import queue
import signal
import subprocess
import sys
import threading

import pytest
from prefect import flow
from prefect.exceptions import TerminationSignal

from flows import process, stopping
from tasks.runs import HELD, Run, lock


class Finalized:
    def __init__(self, error):
        self.error = error

    def __del__(self):
        raise self.error


@pytest.fixture
def stops(monkeypatch):
    """The statuses with which runs would be stopped."""
    statuses = queue.Queue()
    monkeypatch.setattr(stopping, "stop_runs", lambda _, status: statuses.put(status))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return statuses


def test_a_signal_whose_exception_is_dropped_in_a_finalizer_stops_the_runs(stops, monkeypatch):
    stop, error = TerminationSignal(signal=15), ValueError()
    others = []

    def hook(dropped):
        if dropped.exc_value in (stop, error):  # and not of another thread
            others.append(dropped.exc_value)

    monkeypatch.setattr("sys.unraisablehook", hook)
    with stopping.stopping_on_signals(lambda: None):
        Finalized(stop)
        assert stops.get(timeout=60) == 128 + 15
        Finalized(error)
    assert others == [error]
    assert stops.empty()


@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_a_signal_stops_the_runs_and_has_its_earlier_handler_afterwards(stops, number):
    before = signal.signal(number, signal.SIG_DFL)  # it is ignored where the tests run under nohup
    try:
        with stopping.stopping_on_signals(lambda: None):
            signal.raise_signal(number)
            assert stops.get(timeout=60) == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_hangup_that_is_ignored_as_under_nohup_stays_ignored(stops):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping.stopping_on_signals(lambda: None):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert stops.empty()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGXCPU])
def test_a_signal_that_the_system_repeats_does_not_end_the_process_before_the_runs_are_closed(
    stops, number, monkeypatch
):
    monkeypatch.setattr(stopping, "STOPPING", threading.Lock())
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail("ended at once"))
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with stopping.stopping_on_signals(lambda: None), stopping.STOPPING:
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)
    assert stops.empty()


def test_runs_are_closed_where_the_terminal_is_gone(monkeypatch):
    class EndedError(Exception):
        """The process has ended."""

    def end(status):
        raise EndedError(status)

    def write_to_a_closed_terminal():
        raise OSError(5, "Input/output error")

    closed = []
    monkeypatch.setattr(stopping, "STOPPING", threading.Lock())
    monkeypatch.setattr(stopping, "_close", lambda runs, has_server: closed.append(has_server))
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(EndedError, match="129"):
        stopping.stop_runs(write_to_a_closed_terminal, 129)
    assert closed == [True]


def test_a_run_is_stopped_where_prefect_hides_the_signal_in_a_failure(prefect_session, tmp_path, monkeypatch):
    run = Run("stopped", tmp_path)

    @flow
    def phase():
        try:
            raise TerminationSignal(signal=15)
        except TerminationSignal:
            raise ValueError("Task run is not set")  # noqa: B904

    @flow
    def pipeline():
        with lock(run):
            phase()

    def stop(_, status):
        assert [run] == HELD
        raise SystemExit(status)

    monkeypatch.setenv("PREFECT_API_URL", prefect_session)
    monkeypatch.setenv("FED_RLHF_HOME", str(tmp_path))
    monkeypatch.setattr(stopping, "stop_runs", stop)
    monkeypatch.setattr(process, "import_module", lambda _: stopping)
    monkeypatch.setattr(stopping, "pipeline", pipeline, raising=False)
    try:
        with pytest.raises(SystemExit) as ended:
            process.run_flow("stopping:pipeline", True, dict)
    finally:
        HELD.clear()
    assert ended.value.code == 128 + 15


@pytest.mark.long
def test_what_is_imported_while_the_server_starts_leaves_prefect_out_which_reads_its_settings_then():
    code = (
        "import sys; from flows.process import import_libraries; import_libraries();"
        " print([name for name in ('torch', 'transformers', 'prefect') if name in sys.modules])"
    )
    assert printed_by(code) == "['torch', 'transformers']\n"


@pytest.mark.long
def test_a_full_collection_leaves_out_what_was_imported():
    code = (
        "import gc; from flows.process import import_for_good; before = gc.get_freeze_count();"
        " import_for_good('torch'); frozen, left = gc.get_freeze_count(), len(gc.get_objects());"
        " print(before, frozen > 9 * left, gc.isenabled())"
    )
    assert printed_by(code) == "0 True True\n"


def test_an_import_that_fails_leaves_the_collector_on():
    with pytest.raises(ModuleNotFoundError):
        process.import_for_good("no_such_module")
    assert gc.isenabled()


def printed_by(code: str) -> str:
    """What a Python process with this code prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
