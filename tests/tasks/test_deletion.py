"""Deletion of a run's MLflow runs with its folder."""

import os

import pytest

from components.recipes import load_recipe
from infra.servers import free_port
from tasks.runs import Run, create_run
from tasks.tracking.client import mlflow_client
from tests.support.command_line import fed_rlhf, refusal


@pytest.fixture
def client(mlflow_store):
    return mlflow_client()


@pytest.fixture
def logged(runs, client):
    """A run with a parent and two phases in MLflow, and the ids of these."""
    run = create_run(load_recipe("debug"), runs / "debug-1")
    ids = new_runs(client, 3)
    run.update_metadata(
        mlflow_run_id=ids[0], mlflow_phases=dict(zip(("prepare", "align"), ids[1:], strict=True))
    )
    return run, ids


def new_runs(client, count):
    experiment = client.get_experiment_by_name("one")
    experiment_id = experiment.experiment_id if experiment else client.create_experiment("one")
    return [client.create_run(experiment_id).info.run_id for _ in range(count)]


def stages(client, ids):
    return {client.get_run(run_id).info.lifecycle_stage for run_id in ids}


def test_the_runs_of_a_run_in_mlflow_are_deleted_with_its_folder_and_no_others(logged, client):
    run, ids = logged
    others = new_runs(client, 1)
    result = fed_rlhf("delete", "debug-1", "--with-mlflow", answer="y\n")
    assert result.exit_code == 0, result.output
    assert f"Delete {run.folder} and its runs in MLflow?" in result.stdout
    assert "deleted 3 runs in MLflow; `mlflow gc` frees their space\n" in result.stdout
    assert "registered" not in result.stdout
    assert stages(client, ids) == {"deleted"}
    assert stages(client, others) == {"active"}
    assert not run.folder.exists()


def test_without_the_option_mlflow_keeps_the_runs(logged, client):
    run, ids = logged
    assert fed_rlhf("delete", "debug-1", "--yes").stdout == f"deleted {run.folder}\n"
    assert stages(client, ids) == {"active"}


def test_the_runs_of_a_benchmark_in_mlflow_are_deleted_with_its_own(runs, client):
    ids = new_runs(client, 2)
    run = create_run(load_recipe("debug"), runs / "nightly-1" / "one-seed-0")
    run.update_metadata(mlflow_run_id=ids[1], mlflow_phases={"prepare": ids[1], "align": ids[1]})
    (runs / "nightly-1" / "benchmark.yaml").write_text("recipe: debug\n")
    Run("nightly-1", runs / "nightly-1").update_metadata(mlflow_run_id=ids[0], mlflow_phases={})
    assert "deleted 2 runs in MLflow" in fed_rlhf("delete", "nightly-1", "--yes", "--with-mlflow").stdout
    assert stages(client, ids) == {"deleted"}


def test_registered_models_stay_and_are_named(logged, client, tmp_path):
    client.create_registered_model("policy")
    client.create_model_version("policy", (tmp_path / "model").as_uri(), run_id=logged[1][2])
    result = fed_rlhf("delete", "debug-1", "--yes", "--with-mlflow")
    assert "registered models stay: policy version 1\n" in result.stdout
    assert client.get_model_version("policy", "1").run_id == logged[1][2]


def test_models_of_the_run_are_deleted_too_but_registered_ones(logged, client):
    _, ids = logged
    experiment = client.get_run(ids[0]).info.experiment_id
    models = [client.create_logged_model(experiment, source_run_id=run_id).model_id for run_id in ids[1:]]
    client.create_registered_model("policy")
    client.create_model_version("policy", f"models:/{models[0]}", run_id=ids[1], model_id=models[0])
    fed_rlhf("delete", "debug-1", "--yes", "--with-mlflow")
    assert [one.model_id for one in client.search_logged_models([experiment])] == models[:1]


def test_nothing_is_deleted_where_the_store_has_none_of_the_runs(logged):
    run, _ = logged
    run.update_metadata(mlflow_run_id="0" * 32, mlflow_phases={"prepare": "1" * 32})
    assert "none of its runs is in MLflow's store sqlite:" in refusal(
        "delete", "debug-1", "--yes", "--with-mlflow"
    )
    assert run.folder.is_dir()


def test_a_run_that_mlflow_does_not_have_is_counted_and_the_others_are_deleted(logged, client):
    run, ids = logged
    run.update_metadata(mlflow_phases={"prepare": ids[1], "align": "0" * 32})
    result = fed_rlhf("delete", "debug-1", "--yes", "--with-mlflow")
    assert "deleted 2 runs in MLflow" in result.stdout
    assert "1 of its runs are not in MLflow's store sqlite:" in result.stdout
    assert stages(client, ids[:2]) == {"deleted"}
    assert not run.folder.exists()


def test_a_run_that_was_not_logged_needs_no_store(runs, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    create_run(load_recipe("debug"), runs / "debug-1")
    assert "it has no runs in MLflow" in fed_rlhf("delete", "debug-1", "--yes", "--with-mlflow").stdout
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("command", [["delete", "debug-1"], ["prune", "--older-than", "1h"]])
@pytest.mark.parametrize("kind", ["missing", "damaged", "server"])
def test_nothing_is_deleted_where_the_store_cannot_be_reached(logged, monkeypatch, tmp_path, command, kind):
    for path in logged[0].folder.rglob("*"):
        os.utime(path, (1, 1))  # long ago
    path = tmp_path / "other.db"
    if kind == "damaged":
        path.write_text("no database")
    server = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server if kind == "server" else f"sqlite:///{path}")
    result = fed_rlhf(*command, "--yes", "--with-mlflow")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "resume" not in result.stderr
    assert (server if kind == "server" else str(path)) in result.stderr
    assert (logged[0].folder / "recipe.yaml").is_file()
    assert path.exists() == (kind == "damaged")
