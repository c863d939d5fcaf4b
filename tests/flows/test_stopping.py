"""Signals that stop the runs of a process."""

import queue

from prefect.exceptions import TerminationSignal

from flows import stopping


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
