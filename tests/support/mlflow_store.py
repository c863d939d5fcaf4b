"""An empty MLflow store, made once for a session, since MLflow takes seconds to create its tables."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def global_store(uri: str) -> Iterator[None]:
    """Let MLflow's functions use a store and its registry, and forget both at the end."""
    import mlflow

    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    try:
        yield
    finally:
        forget_stores()


def forget_stores() -> None:
    """Unset the stores that MLflow's functions use, with MLFLOW_TRACKING_URI and MLFLOW_REGISTRY_URI."""
    import mlflow

    mlflow.set_tracking_uri(None)
    mlflow.set_registry_uri(None)
    os.environ.pop("MLFLOW_REGISTRY_URI", None)  # set_registry_uri sets it, and does not unset it
