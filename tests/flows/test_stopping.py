"""Signals that stop the runs of a process."""

import queue
import subprocess
import sys

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


def test_a_signal_whose_exception_is_dropped_in_a_finalizer_stops_the_runs(monkeypatch):
    statuses = queue.Queue()
    monkeypatch.setattr(stopping, "stop_runs", lambda _, status: statuses.put(status))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    others = []
    monkeypatch.setattr("sys.unraisablehook", lambda dropped: others.append(dropped.exc_type))
    with stopping.stopping_on_signals(lambda: None):
        Finalized(TerminationSignal(signal=15))
        assert statuses.get(timeout=10) == 128 + 15
        Finalized(ValueError())
    assert others == [ValueError]
    assert statuses.empty()


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
            process.run_flow("stopping:pipeline", verbose=True)
    finally:
        HELD.clear()
    assert ended.value.code == 128 + 15


@pytest.mark.long
def test_what_is_imported_while_the_server_starts_leaves_prefect_out_which_reads_its_settings_then():
    code = (
        "import sys; from flows.process import import_libraries; import_libraries();"
        " print([name for name in ('torch', 'transformers', 'prefect') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "['torch', 'transformers']\n"
