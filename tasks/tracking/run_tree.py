"""The tree of MLflow runs: a parent for each flow run, a child for each phase.

In a benchmark, an arm and seed has one run for all phases, a child of the benchmark's run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from components.config import Recipe
from components.config.loading import leaves
from components.config.runtime import TrackingConfig
from components.names import mlflow_key
from components.paths import sqlite_file, tracking_uri, without_credentials
from tasks.flow_runs import FlowRunLink
from tasks.runs import PHASES, Run, git_commit, is_stop
from tasks.tracking.client import (
    RunLog,
    TrackingError,
    explained_failures,
    find_or_create_experiment,
    mlflow_client,
)
from tasks.tracking.report import run_url
from tasks.uncached import task

if TYPE_CHECKING:
    from mlflow import MlflowClient

PARENT_TAG = "mlflow.parentRunId"
MAX_PARAM = 500
"""Characters of a parameter's value that are logged."""
MAX_RUN_NAME = 120
"""Characters of a run's name."""


@task("open MLflow run")
@explained_failures()
def open_run_tracking(run: Run, recipe: Recipe, link: FlowRunLink, parent: str | None = None) -> str:
    """Id of the parent MLflow run of a run or a benchmark; created once, and reopened when it is resumed.

    Args:
        parent: MLflow run of the benchmark to which the run belongs; the run then serves all phases.
    """
    from mlflow.entities import Param

    client = mlflow_client()
    run.record_commit(commit := git_commit())
    tags = link.tags() | {
        "git.commit": commit,
        "recipe": recipe.name,
        "fed_rlhf.run": run.id,
        "fed_rlhf.folder": str(run.folder),
    }
    if not run.is_benchmark:
        tags["method"] = recipe.federation.method
    existing: str | None = run.metadata().get("mlflow_run_id")
    if existing is not None and is_known(existing):
        client.update_run(existing, status="RUNNING")
        RunLog(client, existing).set_tags(tags)
        return existing
    if parent is not None:
        tags[PARENT_TAG] = parent
    experiment = find_or_create_experiment(client, recipe.tracking.experiment)
    run_id = str(client.create_run(experiment, run_name=run_name(run, recipe, parent), tags=tags).info.run_id)
    if not run.is_benchmark:
        values = leaves(recipe.model_dump(mode="json"))
        client.log_batch(
            run_id, params=[Param(mlflow_key(key), str(value)[:MAX_PARAM]) for key, value in values]
        )
    client.log_artifact(run_id, str(run.folder / run.plan_name))
    phases = dict.fromkeys(PHASES, run_id) if parent is not None else {}
    run.update_metadata(mlflow_run_id=run_id, mlflow_phases=phases)
    return run_id


def run_name(run: Run, recipe: Recipe, parent: str | None = None) -> str:
    """The name of a run in MLflow: method and seed, its id, and the settings on top of its recipe.

    Lists and legends cut it, so that what tells runs apart is first. The id of a benchmark's run (one with
    a parent) begins with its arm and seed, and a benchmark has no method of its own.
    """
    is_alone = parent is None and not run.is_benchmark
    first = [recipe.federation.method, f"seed {recipe.seed}"] if is_alone else []
    name = " ".join([*first, run.id, *run.metadata().get("overrides", [])])
    return name if len(name) <= MAX_RUN_NAME else f"{name[: MAX_RUN_NAME - 3]}..."


def is_known(run_id: str) -> bool:
    """Whether the tracking store has a run that is not deleted."""
    from mlflow.exceptions import MlflowException

    try:
        return bool(mlflow_client().get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException:
        return False


def _reopen(client: MlflowClient, run_id: str) -> bool:
    """Let a run be at work again, also if it was deleted; False where the store does not have it any more."""
    from mlflow.exceptions import MlflowException

    try:
        if client.get_run(run_id).info.lifecycle_stage == "deleted":
            client.restore_run(run_id)
        client.update_run(run_id, status="RUNNING")
    except MlflowException:
        return False
    return True


@contextmanager
def phase_tracking(run: Run, config: TrackingConfig, phase: str) -> Iterator[str]:
    """Id of the child run of a phase, which is created once, and reopened later; ended after the block.

    In a benchmark the phases share the run of the arm, which stays open.
    """
    with explained_failures():
        run_id = _open_phase(run, config, phase)
        yield run_id
        if run_id != run.metadata()["mlflow_run_id"]:
            mlflow_client().set_terminated(run_id)


def _open_phase(run: Run, config: TrackingConfig, phase: str) -> str:
    client = mlflow_client()
    metadata = run.metadata()
    phases: dict[str, str] = metadata.get("mlflow_phases", {})
    parent: str = metadata["mlflow_run_id"]
    if phase in phases and _reopen(client, phases[phase]):
        return phases[phase]
    tags = {PARENT_TAG: parent, "phase": phase, "fed_rlhf.run": run.id}
    tags["mlflow.note.content"] = f"The phase {phase} of [{run.id}]({run_url(parent)})."
    experiment = find_or_create_experiment(client, config.experiment)
    run_id = str(client.create_run(experiment, run_name=f"{phase}, {run.id}", tags=tags).info.run_id)
    run.update_metadata(mlflow_phases=phases | {phase: run_id})
    return run_id


@contextmanager
def ending(run: Run, is_finished: bool = True) -> Iterator[None]:
    """End the MLflow runs of a run after the block: FINISHED, FAILED at an exception, KILLED if stopped.

    Args:
        is_finished: whether the run is finished after the block; otherwise it stays RUNNING.
    """
    with explained_failures():
        try:
            yield
        except BaseException as error:
            with suppress(TrackingError):  # the error of the block says more
                close_open_runs(run, "KILLED" if is_stop(error) else "FAILED")
            raise
        if is_finished:
            mlflow_client().set_terminated(run.metadata()["mlflow_run_id"])


@explained_failures()
def close_open_runs(run: Run, status: str) -> None:
    """End the MLflow runs of a run that are still open as FAILED or KILLED."""
    from mlflow.exceptions import MlflowException

    client = mlflow_client()
    metadata = run.metadata()
    for run_id in {*metadata.get("mlflow_phases", {}).values(), metadata.get("mlflow_run_id")} - {None}:
        try:
            if client.get_run(run_id).info.status == "RUNNING":
                client.set_terminated(run_id, status)
        except MlflowException as error:  # a run that was deleted must not keep the others open
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise


def _experiment_of(client: MlflowClient, run_id: str) -> str | None:
    """The experiment of an MLflow run; None where the store has no such run."""
    from mlflow.exceptions import MlflowException

    try:
        return str(client.get_run(run_id).info.experiment_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


@explained_failures("delete it again, or without --with-mlflow")
def delete_tracked_runs(runs: Sequence[Run]) -> list[str]:
    """Delete the MLflow runs of runs and benchmarks, phases included, and their models, as MLflow's UI does.

    Returns:
        sentences on how many were deleted, and on what stays.

    Raises:
        TrackingError: the store is not there, has none of the runs, or fails.
        RecipeError: a run.json is damaged.
    """
    metadata = [run.metadata() for run in runs]
    named = [(own.get("mlflow_run_id"), *own.get("mlflow_phases", {}).values()) for own in metadata]
    run_ids = list(dict.fromkeys(run_id for ids in named for run_id in ids if run_id))
    if not run_ids:
        return ["it has no runs in MLflow"]
    store = without_credentials(tracking_uri())
    file = sqlite_file(tracking_uri())
    if file is not None and not file.is_file():  # MLflow would create it
        raise TrackingError(f"there is no MLflow store {store}: delete the run without --with-mlflow.")
    client = mlflow_client()
    versions = [one for run_id in run_ids for one in client.search_model_versions(f"run_id = '{run_id}'")]
    registered = {version.source for version in versions}
    experiments = {run_id: experiment for run_id in run_ids if (experiment := _experiment_of(client, run_id))}
    if not experiments:
        raise TrackingError(f"none of its runs is in MLflow's store {store}: name their store")
    for run_id, experiment in reversed(experiments.items()):  # parents last, so that none lacks its parent
        for model in client.search_logged_models([experiment], f"source_run_id = '{run_id}'"):
            if f"models:/{model.model_id}" not in registered:
                client.delete_logged_model(model.model_id)
        client.delete_run(run_id)
    sentences = [f"deleted {len(experiments)} runs in MLflow; `mlflow gc` frees their space"]
    if missing := len(run_ids) - len(experiments):
        sentences.append(f"{missing} of its runs are not in MLflow's store {store}")
    if versions:
        names = ", ".join(f"{one.name} version {one.version}" for one in versions)
        sentences.append(f"registered models stay: {names}")
    return sentences
