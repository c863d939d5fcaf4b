"""The growth of a run, in its smallest form."""

import os

import pytest

from perf import growth


def test_files_are_counted_by_what_they_are(tmp_path):
    for name, size in {
        "mlflow.db": 1,
        "mlflow.db-wal": 2,
        ".prefect/prefect.db": 4,
        "runs/a/b.json": 8,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"0" * size * 1000)
    os.symlink("missing", tmp_path / "runs" / "dangling")
    assert growth.sizes(tmp_path) == {
        "MLflow database": 0.003,
        "Prefect database": 0.004,
        "MLflow artifacts": 0.0,
        "run folder": 0.008,
        "everything": 0.015,
        "files": 4,
    }


@pytest.mark.long
def test_a_run_is_looked_at_from_round_5_to_the_last_one(tmp_path):
    frame = growth.measure_growth(tmp_path / "home", "debug", 8)
    rounds = frame["round"].tolist()
    assert rounds[0] >= 5
    assert rounds[-1] == 8
    assert rounds == sorted(set(rounds))
    for column in ("seconds per round", "MLflow database", "Prefect database", "run folder"):
        assert (frame[column] > 0).all()
    assert frame["run folder"].is_monotonic_increasing
