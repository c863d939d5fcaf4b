"""The stages of dvc.yaml, each a Prefect flow of its own around the sub-flow of the same name in fed_rlhf.py.

    python -m flows.stages STAGE [--folder data/pipeline]
    python -m flows.stages check_recipe --recipe NAME [key.path=value ...]

DVC decides which stages are done; they share one run folder. check_recipe writes the whole recipe into it, and DVC
compares its sections, stage by stage. Stages that belong together share a parent MLflow run: a new one is opened when
the recipe has changed, or when a stage is done for the second time, and the report names the runs of the stages that
did not have to be repeated.
"""

from __future__ import annotations

if __name__ == "__main__":
    from flows.cli import stage

    raise SystemExit(stage())

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from prefect import flow, get_run_logger, runtime

from components.config import Recipe
from components.environment import quiet
from components.federation.commits import CommitError
from components.federation.private import stores_beside
from components.models.adapters import AdapterStore
from flows.fed_rlhf import align, backbones, evaluate, federate, grow, open_commits, prepare
from flows.runner import task_runner
from tasks import data, reporting, tracking
from tasks.runs import Run


@flow(name="fed-rlhf-stage", flow_run_name="pipeline: {stage}", persist_result=False)
def carry_out(stage: str, folder: str) -> None:
    """One stage of the pipeline in a run folder that holds a recipe."""
    quiet()
    recipe = Run("pipeline", Path(folder)).recipe()
    run = Run(f"{recipe.name.replace('/', '-')}-pipeline", Path(folder))
    get_run_logger().info("stage %s: recipe %s, folder %s", stage, recipe.name, folder)
    if stage == "fetch_backbone":
        data.note_backbones({name: data.fetch_backbone(name) for name in backbones(recipe)}, run.folder / "backbones.json")
        return
    if stage == "grow_trees":
        grow(run, recipe)
        return
    with _tracked(run, recipe, stage) as parent:
        if stage == "report":
            reporting.write_report(run, recipe)
            tracking.log_report(parent, run.report)
            tracking.tag_reused(parent, run)
            reporting.link_artifacts(run, recipe)
            print("\n" + (run.report / "summary.txt").read_text(encoding="utf-8"))
            return
        if stage == "federate":
            _keep_or_start_anew(run, recipe)
        phase = {"prepare": prepare, "federate": federate, "align": align, "evaluate": evaluate}[stage]
        phase.with_options(task_runner=task_runner(recipe))(run, recipe)


@contextlib.contextmanager
def _tracked(run: Run, recipe: Recipe, stage: str) -> Iterator[str]:
    """The parent MLflow run of the pipeline's present state, open while the stage lasts."""
    state = [recipe.fingerprint(*type(recipe).model_fields), tracking.tracking_uri()]
    notes = run.notes()
    if notes.get("state") != state or stage in notes["done"] or not tracking.is_known(notes.get("mlflow_run_id")):
        run.replace_notes(state=state, done=[], reused=notes.get("reused", {}) | notes.get("mlflow_phases", {}))
    parent = tracking.open_tracking(run, recipe, str(runtime.flow_run.id), runtime.flow_run.ui_url)
    reporting.link_artifacts(run, recipe)
    try:
        yield parent
    except BaseException:
        tracking.close_run(parent, "FAILED")
        raise
    tracking.close_run(parent)
    run.note(done=[*run.notes()["done"], stage])


def _keep_or_start_anew(run: Run, recipe: Recipe) -> None:
    """Keep the rounds of an interrupted stage with this recipe and these data; remove everything else.

    DVC leaves the folder in place (persist: true). Where its rounds are complete and DVC still asks for the stage,
    something that they depend on has changed.
    """
    try:
        anew = (run.federation / "result.json").is_file() or open_commits(run, recipe).latest() is None
    except CommitError:
        anew = True
    if anew:  # the clients' own stores, which DVC knows nothing of, begin anew with the rounds
        shutil.rmtree(run.federation, ignore_errors=True)
        shutil.rmtree(stores_beside(AdapterStore(run.federation / "adapters")), ignore_errors=True)
