"""The adapters of a run that can be exported: its aligned policy, and those of its federation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from components.config import BackboneConfig, PolicyConfig, RecipeError, SelectorConfig
from components.federation.outcome import load_outcome
from components.inputs import verify_inputs
from components.io import file_hash
from components.models.export import check_export_folder, export_model
from tasks.policies import aligned_outcome
from tasks.run_table import run_state
from tasks.runs import RESULT, Run

ExportSource = tuple[Path, PolicyConfig | SelectorConfig, bool]
"""A PEFT folder, the section of its model, and whether nothing of a client's own belongs to the model."""


def export_run(run: Run, folder: Path, adapter: str | None = None, merge: bool = False) -> None:
    """Write the aligned policy of a run, or an adapter of its federation, for use elsewhere.

    Args:
        run: the run.
        folder: new or empty.
        adapter: name of an adapter of the federation; None: the aligned policy.
        merge: see `export_model`.

    Raises:
        RecipeError: the phase is not finished, there is no such adapter, or it cannot be merged.
        UserError: see `export_model`.
    """
    check_export_folder(folder)
    source, model, is_complete = aligned_policy(run) if adapter is None else federation_adapter(run, adapter)
    if merge and not is_complete:
        raise RecipeError(
            f"'{adapter}' of run {run.id} cannot be merged into a model, since each client's model also has"
            " private modules or steps, which stay with the client: leave out --merge to export the shared"
            " adapter."
        )
    verify_inputs(model)
    training = training_of(run, model.backbone, is_aligned=adapter is None)
    export_model(source, model, folder, merge, training, is_complete)


def training_of(run: Run, backbone: BackboneConfig, is_aligned: bool) -> str:
    """How a run was trained, and its figures once it is finished, in Markdown."""
    from components.reporting.card import training_card
    from tasks.report import answers_author, read_results

    if not run.is_done("evaluate"):
        return "## Training\n\nThe run was exported before its evaluation, and has no figures yet.\n"
    origin = {"run": run.id, "commits": ", ".join(run.metadata().get("commits", []))}
    for name in ("pairs", "prompts"):
        origin[f"sha256 of {name}.parquet"] = file_hash(run.prepared / f"{name}.parquet")
    results = read_results(run, run.recipe())
    return training_card(results, answers_author(run), backbone, origin, is_aligned)


def aligned_policy(run: Run) -> ExportSource:
    """The aligned policy.

    Raises:
        RecipeError: the run has none yet, or one for each client.
    """
    _require(run, run.alignment / RESULT)
    outcome = aligned_outcome(run)
    if outcome.clients:
        raise RecipeError(
            f"run {run.id} has no single policy, since its clients have their own: name an adapter with"
            f" --adapter ({_listed(run.federation_result().adapters)})."
        )
    return run.alignment / outcome.record.folder, run.recipe().policy, True


def federation_adapter(run: Run, name: str) -> ExportSource:
    """An adapter that the rounds ended with.

    Raises:
        RecipeError: there is none of this name, or the rounds are not finished.
    """
    _require(run, run.federation / RESULT)
    result = run.federation_result()
    if name not in result.adapters:
        raise RecipeError(f"run {run.id} has no adapter '{name}': there are {_listed(result.adapters)}.")
    outcome = load_outcome(result.outcome)
    folder = run.federation / result.adapters[name].folder
    return folder, outcome.exported_model(run.recipe()), not outcome.keeps_modules


def _require(run: Run, result: Path) -> None:
    if not result.is_file():
        raise RecipeError(
            f"run {run.id} is not finished, it is {run_state(run)}: finish it with `{run.resume_command}`."
        )


def _listed(names: Iterable[str]) -> str:
    known = sorted(names)
    return ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
