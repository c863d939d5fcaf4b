"""The tree of MLflow runs: a parent for each flow run, a child for each phase.

In a benchmark, an arm and seed has one run for all phases, a child of the benchmark's run.
"""

from __future__ import annotations

from dataclasses import dataclass

from components.config import Recipe, TrackingConfig
from tasks.runs import Run, git_commit
from tasks.tracking.client import find_or_create_experiment, flatten, mlflow_client
from tasks.uncached import task

PARENT_TAG = "mlflow.parentRunId"
PHASES = ("prepare", "federate", "align", "evaluate")
MAX_PARAM = 500
"""Characters of a parameter's value that are logged."""


@dataclass(frozen=True)
class FlowRunLink:
    """The Prefect flow run that works on a run.

    Attributes:
        id: its id.
        url: its page in the Prefect UI; None without one.
    """

    id: str
    url: str | None

    def tags(self) -> dict[str, str]:
        """The link as tags of an MLflow run, and as its description until the run is finished."""
        tags = {"prefect.flow_run_id": self.id, "prefect.flow_run_url": self.url or ""}
        if self.url:
            tags["mlflow.note.content"] = f"Not finished. Prefect: [flow run]({self.url})"
        return tags


@task()
def open_run_tracking(run: Run, recipe: Recipe, link: FlowRunLink, parent: str | None = None) -> str:
    """Id of the parent MLflow run of a flow run; created once, and reopened for a resumed run.

    In a benchmark, whose MLflow run is `parent`, the run serves all phases.
    """
    from mlflow.entities import Param

    client = mlflow_client()
    commit = git_commit()
    run.update_metadata(flow_run_id=link.id, flow_run_url=link.url)
    run.record_commit(commit)
    tags = link.tags() | {
        "git.commit": commit,
        "fed_rlhf.run": run.id,
        "fed_rlhf.folder": str(run.folder),
        "recipe": recipe.name,
        "method": recipe.federation.method,
    }
    existing = run.metadata().get("mlflow_run_id")
    if existing is not None and is_known(existing):
        return _reopen(existing, tags)
    if parent is not None:
        tags[PARENT_TAG] = parent
    experiment = find_or_create_experiment(client, recipe.tracking.experiment)
    run_id = str(client.create_run(experiment, run_name=run.id, tags=tags).info.run_id)
    values = flatten(recipe.model_dump(mode="json"))
    client.log_batch(run_id, params=[Param(key, str(value)[:MAX_PARAM]) for key, value in values])
    client.log_artifact(run_id, str(run.folder / "recipe.yaml"))
    phases = dict.fromkeys(PHASES, run_id) if parent is not None else {}
    run.update_metadata(mlflow_run_id=run_id, mlflow_phases=phases)
    return run_id


@task()
def open_benchmark_tracking(run: Run, recipe: Recipe, link: FlowRunLink) -> str:
    """Id of the MLflow run of a benchmark, in its recipe's experiment; created once, then reopened."""
    client = mlflow_client()
    tags = link.tags() | {
        "git.commit": git_commit(),
        "recipe": recipe.name,
        "fed_rlhf.folder": str(run.folder),
    }
    existing = run.metadata().get("mlflow_run_id")
    if existing is not None and is_known(existing):
        return _reopen(existing, tags)
    experiment = find_or_create_experiment(client, recipe.tracking.experiment)
    run_id = str(client.create_run(experiment, run_name=run.id, tags=tags).info.run_id)
    client.log_artifact(run_id, str(run.folder / "benchmark.yaml"))
    run.update_metadata(mlflow_run_id=run_id)
    return run_id


def _reopen(run_id: str, tags: dict[str, str]) -> str:
    client = mlflow_client()
    client.update_run(run_id, status="RUNNING")
    for key, value in tags.items():
        client.set_tag(run_id, key, value)
    return run_id


def is_known(run_id: str) -> bool:
    """Whether the tracking store has a run that is not deleted."""
    from mlflow.exceptions import MlflowException

    try:
        return bool(mlflow_client().get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException:
        return False


@task(name="open phase {phase}")
def open_phase(run: Run, config: TrackingConfig, phase: str) -> str:
    """Id of the child run of a phase, which is created once, and reopened later."""
    client = mlflow_client()
    metadata = run.metadata()
    phases: dict[str, str] = metadata.get("mlflow_phases", {})
    if phase in phases:
        client.update_run(phases[phase], status="RUNNING")
        return phases[phase]
    tags = {PARENT_TAG: metadata["mlflow_run_id"], "phase": phase, "fed_rlhf.run": run.id}
    experiment = find_or_create_experiment(client, config.experiment)
    child = client.create_run(experiment, run_name=f"{run.id}/{phase}", tags=tags)
    run_id = str(child.info.run_id)
    run.update_metadata(mlflow_phases=phases | {phase: run_id})
    return run_id


@task(name="close tracking {status}")
def close_run(run_id: str, status: str = "FINISHED") -> None:
    """End a run as FINISHED, FAILED or KILLED."""
    mlflow_client().set_terminated(run_id, status)


@task(name="close phase {run_id}")
def close_phase(run: Run, run_id: str) -> None:
    """End the run of a phase; in a benchmark the phases share the run of the arm, which stays open."""
    if run_id != run.metadata()["mlflow_run_id"]:
        mlflow_client().set_terminated(run_id, "FINISHED")


@task()
def close_failed(run: Run) -> None:
    """End a run, and those of its phases that are still open, as FAILED."""
    client = mlflow_client()
    metadata = run.metadata()
    parent = metadata["mlflow_run_id"]
    for run_id in {*metadata.get("mlflow_phases", {}).values(), parent}:
        if run_id == parent or client.get_run(run_id).info.status == "RUNNING":
            client.set_terminated(run_id, "FAILED")


@task()
def tag_reused_phases(run_id: str, run: Run) -> None:
    """Tag the parent run with the run of each phase that was not repeated."""
    metadata = run.metadata()
    for phase, earlier_run in metadata.get("reused", {}).items():
        if phase not in metadata["mlflow_phases"]:
            mlflow_client().set_tag(run_id, f"reused.{phase}", earlier_run)
