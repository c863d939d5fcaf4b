"""An MLflow store of a test's own: SQLite, copied from one that was migrated once."""

import os
import shutil

import pytest


@pytest.fixture(scope="session")
def migrated_store(tmp_path_factory):
    """MLflow takes seconds to make its tables, so it does it once."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def mlflow_store(migrated_store, tmp_path, monkeypatch):
    """The tracking URI of an empty store in tmp_path; MLflow's own global settings are none afterwards."""
    import mlflow

    shutil.copy(migrated_store, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.delenv("MLFLOW_REGISTRY_URI", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    yield uri
    mlflow.set_tracking_uri(None)
    mlflow.set_registry_uri(None)
    os.environ.pop("MLFLOW_REGISTRY_URI", None)
