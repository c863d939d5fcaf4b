"""An MLflow store of a test's own: SQLite, a copy of the session's empty one."""

import shutil

import pytest

from tests.support.mlflow_store import forget_stores


@pytest.fixture
def mlflow_store(migrated_store, tmp_path, monkeypatch):
    """The tracking URI of an empty store in tmp_path; MLflow's global settings are reset afterwards."""
    shutil.copy(migrated_store, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.delenv("MLFLOW_REGISTRY_URI", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    yield uri
    forget_stores()
