"""An empty MLflow store, made once for a session, since MLflow takes seconds to create its tables."""

from __future__ import annotations

import fcntl
from pathlib import Path


def migrated_store(folder: Path) -> Path:
    """Path of the store (SQLite) in a folder that all workers share; the first one makes it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mlflow.db"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").is_file():
            from mlflow import MlflowClient

            MlflowClient(f"sqlite:///{path}").search_experiments()
            (folder / "done").touch()
    return path
