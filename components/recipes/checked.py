"""Whether a recipe can be run here: its files, data, models and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from components.config import Recipe, RecipeError
from components.recipes.inputs import check_inputs

if TYPE_CHECKING:
    from components.recipes.data_preview import DataPreview


@dataclass(frozen=True)
class Checked:
    """A recipe that can be run here, and what was read to know it."""

    recipe: Recipe  # the recipe
    data: DataPreview  # what its data give
    # names of the models of the hub that cannot be read from here, and were not checked.
    unread: tuple[str, ...]


def check_recipe(recipe: Recipe, with_expectations: bool = False) -> Checked:
    """Refuse a recipe whose files, models, or AlpacaEval package or annotator are missing or do not fit.

    It is called once, before a run starts. load_recipe does not call it, since it also reads recipes of
    finished runs. Data of local files are read, see preview_data.

    Args:
        recipe: the recipe.
        with_expectations: whether the expectations on the data are checked too, see preview_data.

    Raises:
        UserError: in one sentence; of a file, a model, its tokenizer, LoRA's targets, the reference
            adapter of DPO, or a GPU's memory.
    """
    from components.models.lora_targets import check_target_families
    from components.models.peft_folder import check_adapter_folder
    from components.recipes.data_preview import preview_data
    from components.recipes.estimates import check_fit
    from components.recipes.model_checks import check_models

    if recipe.runtime.client_timeout is not None and recipe.runtime.transport == "prefect":
        raise RecipeError(
            "runtime.client_timeout needs runtime.transport 'processes': a job in a thread, or a task of Ray,"
            " cannot be ended."
        )
    if recipe.evaluation.alpaca_eval:
        from components.evaluation.alpaca_inputs import check_alpaca_eval

        check_alpaca_eval(recipe.evaluation.alpaca_eval)
    check_inputs(recipe)
    check_target_families(recipe)
    folder = recipe.alignment.dpo.reference_adapter
    if folder is not None and recipe.aligns_a_policy:
        check_adapter_folder(Path(folder), "alignment.dpo.reference_adapter", recipe.policy.backbone)
    preview = preview_data(recipe, with_expectations)
    unread, warnings = check_models(recipe)
    check_fit(recipe)
    found = (*preview.warnings, *preview.expectations(), *warnings)
    return Checked(recipe, replace(preview, warnings=found), tuple(unread))
