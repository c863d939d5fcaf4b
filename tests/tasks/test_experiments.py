"""Experiments of MLflow that a run cannot use are refused with the command that helps."""

import shutil

import pytest
from mlflow.exceptions import MlflowException

from components.config import RecipeError
from tasks.tracking.client import (
    RunLog,
    TrackingError,
    explained_failures,
    find_or_create_experiment,
    mlflow_client,
)

NAME = "é experiment"


@pytest.fixture
def use(migrated_store, monkeypatch):
    """A function that takes the store of a folder, which is made where it is missing."""

    def take(folder):
        folder.mkdir(exist_ok=True)
        if not (folder / "mlflow.db").exists():
            shutil.copy(migrated_store, folder / "mlflow.db")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        return mlflow_client()

    return take


def test_a_deleted_experiment_is_refused_with_the_command_that_restores_it(use, tmp_path):
    client = use(tmp_path / "here")
    number = find_or_create_experiment(client, NAME)
    client.delete_experiment(number)
    with pytest.raises(RecipeError, match=rf"'{NAME}' of MLflow is deleted: .* restore -x {number}`"):
        find_or_create_experiment(client, NAME)
    client.restore_experiment(number)
    assert find_or_create_experiment(client, NAME) == number


def test_an_experiment_says_which_columns_to_begin_with_unless_it_is_described_otherwise(use, tmp_path):
    client = use(tmp_path / "here")
    number = find_or_create_experiment(client, NAME)
    note = client.get_experiment(number).tags["mlflow.note.content"]
    assert "aligned_vs_base/ties_half" in note
    client.set_experiment_tag(number, "mlflow.note.content", "mine")
    find_or_create_experiment(client, NAME)
    assert client.get_experiment(number).tags["mlflow.note.content"] == "mine"


def test_an_experiment_of_a_moved_project_is_refused_with_both_places(use, tmp_path):
    number = find_or_create_experiment(use(tmp_path / "here"), NAME)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    moved = use(tmp_path / "there")
    with pytest.raises(RecipeError, match=rf"here/mlartifacts.* but .*there/mlartifacts.*rename -x {number}"):
        find_or_create_experiment(moved, NAME)
    moved.rename_experiment(number, "of the old place")
    assert find_or_create_experiment(moved, NAME) != number
    assert find_or_create_experiment(use(tmp_path / "here"), NAME) == number


def test_a_project_is_found_by_another_name_of_its_folder(use, tmp_path):
    number = find_or_create_experiment(use(tmp_path / "here"), NAME)
    (tmp_path / "link").symlink_to(tmp_path / "here")
    assert find_or_create_experiment(use(tmp_path / "link"), NAME) == number


def test_an_experiment_with_a_place_of_its_own_is_used_as_it_is(use, tmp_path):
    client = use(tmp_path / "here")
    number = client.create_experiment("own", artifact_location="s3://bucket/mlartifacts/own")
    assert find_or_create_experiment(client, "own") == number


def test_a_store_that_was_deleted_in_a_run_ends_in_one_sentence(use, tmp_path):
    client = use(tmp_path / "here")
    run = client.create_run(find_or_create_experiment(client, NAME)).info.run_id
    for path in (tmp_path / "here").glob("mlflow.db*"):
        path.unlink()
    words = rf"store sqlite:///{tmp_path}/here/mlflow.db failed \(attempt to write a readonly database\)"
    with pytest.raises(TrackingError, match=words), explained_failures():
        RunLog.open(run).log_metrics({"loss": 1.0}, 0)


def test_a_server_that_is_gone_is_named_without_its_password(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(TrackingError, match="Connection refused.*see that its server answers") as error:
        explained_failures()(lambda: mlflow_client().get_run("1"))()
    assert str(error.value).startswith("MLflow's store http://127.0.0.1:9 failed (")
    assert "secret" not in str(error.value)


def test_a_wrong_call_of_mlflow_is_an_error_of_the_program(use, tmp_path):
    client = use(tmp_path / "here")
    with pytest.raises(MlflowException, match="Invalid clause"), explained_failures():
        client.search_runs(["0"], "no filter")
