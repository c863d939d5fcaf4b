"""An MLflow store of a test's own: SQLite, a copy of the session's empty one."""

import os
import shutil

import pytest


@pytest.fixture
def mlflow_store(migrated_store, tmp_path, monkeypatch):
    """The tracking URI of an empty store in tmp_path; MLflow's global settings are reset afterwards."""
    import mlflow

    shutil.copy(migrated_store, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.delenv("MLFLOW_REGISTRY_URI", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    yield uri
    mlflow.set_tracking_uri(None)
    mlflow.set_registry_uri(None)
    os.environ.pop("MLFLOW_REGISTRY_URI", None)
