"""The adapters of a run that can be exported: its aligned policy, and those of its federation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from components.config import BackboneConfig, PolicyConfig, RecipeError, SelectorConfig
from components.federation.outcome import exported_model
from components.io import file_hash
from components.models.export import check_export_folder, export_model
from components.recipes.inputs import verify_inputs
from tasks.policies import aligned_outcome
from tasks.run_table import run_state
from tasks.runs import RESULT, Run


def export_run(run: Run, folder: Path, adapter: str | None = None, merge: bool = False) -> None:
    """Write the aligned policy of a run, or an adapter of its federation, for use elsewhere.

    Args:
        run: the run.
        folder: new or empty.
        adapter: name of an adapter of the federation; None: the aligned policy.
        merge: see `export_model`.

    Raises:
        RecipeError: the phase is not finished, there is no such adapter, it cannot be merged, or each client
            has a policy of its own and none is named.
        UserError: see `export_model`.
    """
    check_export_folder(folder)
    model: PolicyConfig | SelectorConfig
    if adapter is None:
        source, model, is_complete = single_policy(run), run.recipe().policy, True
    else:
        _require_phase(run, run.federation)
        result = run.federation_result()
        if adapter not in result.adapters:
            raise RecipeError(
                f"run {run.id} has no adapter '{adapter}': there are {_listed(result.adapters)}."
            )
        source = run.federation / result.adapters[adapter].folder
        model, is_complete = exported_model(result.outcome, run.recipe()), not result.outcome.own
    if merge and not is_complete:
        raise RecipeError(
            f"'{adapter}' of run {run.id} cannot be merged into a model, since each client's model also has"
            " private modules or steps, which stay with the client: leave out --merge to export the shared"
            " adapter."
        )
    verify_inputs(model)
    training = training_of(run, model.backbone, is_aligned=adapter is None)
    export_model(source, model, folder, merge, training, is_complete)


def single_policy(run: Run) -> Path:
    """PEFT folder of the aligned policy that all clients share.

    Raises:
        RecipeError: the alignment is not finished, or each client has a policy of its own.
    """
    _require_phase(run, run.alignment)
    outcome = aligned_outcome(run)
    if outcome.clients:
        raise RecipeError(
            f"run {run.id} has no single policy, since its clients have their own: `fed-rlhf export {run.id}"
            f" FOLDER --adapter NAME` writes one of them ({_listed(run.federation_result().adapters)})."
        )
    return run.alignment / outcome.folder


def _require_phase(run: Run, folder: Path) -> None:
    if not (folder / RESULT).is_file():
        raise RecipeError(
            f"run {run.id} is not finished, it is {run_state(run)}: finish it with `{run.resume_command}`."
        )


def training_of(run: Run, backbone: BackboneConfig, is_aligned: bool) -> str:
    """How a run was trained, and its figures once it is finished, in Markdown."""
    from components.reporting.run_page import training_card
    from tasks.report import answers_author, read_results

    if not run.is_done("evaluate"):
        return "## Training\n\nThe run was exported before its evaluation, and has no figures yet.\n"
    origin = {"run": run.id, "commits": ", ".join(run.metadata().get("commits", []))}
    recipe = run.recipe()
    for name in ("pairs", "prompts"):
        if name == "prompts" or recipe.federation.privacy is None:  # a hash would confirm guesses of pairs
            origin[f"sha256 of {name}.parquet"] = file_hash(run.prepared / f"{name}.parquet")
    results = replace(read_results(run, recipe), answers_author=answers_author(run))
    return training_card(results, backbone, origin, is_aligned)


def _listed(names: Iterable[str]) -> str:
    known = sorted(names)
    return ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
