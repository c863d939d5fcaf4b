"""The stages of dvc.yaml, each a Prefect flow around the sub-flow of the same name in fed_rlhf.py.

fed-rlhf stage NAME [--folder data/pipeline]

DVC decides which stages are repeated; they share one run folder. The stage check_recipe, which
needs no flow, writes the whole recipe into it, whose sections DVC compares stage by stage. Stages
that belong together share a parent MLflow run: a new one is opened when the recipe has changed, or
when a stage is repeated, and the report names the runs of the stages that were not repeated.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from prefect import flow, get_run_logger

from components.config import Recipe, RecipeError
from components.data.sources.owners import has_owners
from components.environment import configure_libraries
from components.federation.clients.private import private_root
from components.federation.commits import CommitError, OtherClientsError
from components.federation.private_sums import ServerSecrets
from components.io import read_json, write_json
from components.paths import tracking_uri, without_credentials
from components.recipes.inputs import original_names, verify_inputs
from components.recipes.model_checks import required_backbones
from flows.api import pipeline_flow
from flows.fed_rlhf import align, evaluate, federate, grow_trees, prepare, run_phase
from tasks import data, federation
from tasks.devices import choose_workers, task_runner
from tasks.flow_runs import claim_flow_run
from tasks.owner_processes import owners_root
from tasks.report import link_artifacts, write_report
from tasks.run_table import HEADLINE
from tasks.runs import RESULT, Run, lock
from tasks.tracking.client import RunLog
from tasks.tracking.report import log_report
from tasks.tracking.run_tree import ending, is_known, open_run_tracking

PHASES = {phase.name: phase for phase in (prepare, federate, align, evaluate)}


@pipeline_flow("fed-rlhf-stage", run_name="pipeline: {stage}")
def run_stage(stage: str, folder: str) -> None:
    """Run one stage of the pipeline in a run folder that holds a recipe."""
    configure_libraries()
    recipe = choose_workers(Run("pipeline", Path(folder)).recipe())
    verify_inputs(recipe)
    run = Run(f"{recipe.name.replace('/', '-')}-pipeline", Path(folder))
    get_run_logger().info("stage %s: recipe %s, folder %s", stage, recipe.name, folder)
    if has_owners(recipe):
        raise RecipeError(
            "data.source 'owners' is not for `dvc repro`, since DVC cannot see owners' rows change:"
            " use `fed-rlhf run`."
        )
    if stage == "fetch_backbone":
        sources = {name: data.fetch_backbone(name) for name in required_backbones(recipe)}
        data.record_backbones(sources, run.folder / "backbones.json")
        return
    if stage == "grow_trees":
        with original_names(recipe):
            trees = flow(name="trees", persist_result=False)(grow_trees)
            trees.with_options(task_runner=task_runner(recipe.runtime))(run, recipe)
        return
    with lock(run), original_names(recipe), _tracked(run, recipe, stage) as parent:
        if stage == "report":
            _report(run, recipe, parent)
            return
        if stage == "federate" and (change := _remove_finished_rounds(run, recipe)):
            get_run_logger().warning("the rounds begin anew, because of other clients: %s", change)
        run_phase(PHASES[stage], run, recipe)


def _report(run: Run, recipe: Recipe, parent: str) -> None:
    write_report(run, recipe)
    write_headline(run)
    log_report(parent, run)
    metadata = run.metadata()
    reused = metadata.get("reused", {}).items()  # the runs of phases that were not repeated
    tags = {f"reused.{phase}": own for phase, own in reused if phase not in metadata["mlflow_phases"]}
    RunLog.open(parent).set_tags(tags)
    link_artifacts(run, recipe.name)
    print("\n" + (run.report / "summary.txt").read_text(encoding="utf-8"))


def write_headline(run: Run) -> None:
    """Write report/headline.json, the metrics that `dvc metrics show` prints."""
    metrics = read_json(run.report / "metrics.json")
    write_json(run.report / "headline.json", {name: metrics[name] for name in HEADLINE if name in metrics})


@contextlib.contextmanager
def _tracked(run: Run, recipe: Recipe, stage: str) -> Iterator[str]:
    """The parent MLflow run of the pipeline's present state, open while the stage runs."""
    state = [recipe.fingerprint(*type(recipe).model_fields), without_credentials(tracking_uri())]
    link = claim_flow_run(run, is_named=False)
    metadata = run.metadata()
    parent = metadata.get("mlflow_run_id")
    if metadata.get("state") != state or stage in metadata["done"] or parent is None or not is_known(parent):
        reused = metadata.get("reused", {}) | metadata.get("mlflow_phases", {})
        kept = {name: metadata[name] for name in ("flow_run_id", "flow_run_url")}
        run.replace_metadata(**kept, state=state, done=[], reused=reused)
    parent = open_run_tracking(run, recipe, link)
    with ending(run):
        link_artifacts(run, recipe.name)
        yield parent
    run.update_metadata(done=[*run.metadata()["done"], stage])


def _remove_finished_rounds(run: Run, recipe: Recipe) -> str:
    """Remove the rounds of an earlier stage, unless they are incomplete and of this recipe and data.

    DVC leaves the folder in place (persist: true). Where its rounds are complete and DVC repeats
    the stage nevertheless, something that they depend on has changed.

    Returns:
        which clients joined and left since the rounds, in words; empty for the same ones.
    """
    change = ""
    commits = federation.open_commits(run, recipe)
    method = recipe.federation.options
    try:
        committed = commits.latest(method.memory_type)
        finished = (run.federation / RESULT).is_file() or committed is None
        if committed is not None:  # `dvc checkout` takes adapters away, and no commits
            hashes = (committed[0].initial, *committed[0].adapters.values())
            finished |= not all(commits.store.path(digest).is_file() for digest in hashes)
    except CommitError as error:
        finished = True
        if isinstance(error, OtherClientsError):
            change = error.change
    if finished:  # DVC does not know the clients' private stores
        shutil.rmtree(run.federation, ignore_errors=True)
        ServerSecrets(commits.store, None).remove()
        for folder in (private_root(run.federation), owners_root(run.federation)):
            shutil.rmtree(folder, ignore_errors=True)
    return change
