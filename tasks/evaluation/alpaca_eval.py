"""AlpacaEval on the policies' answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prefect import get_run_logger

from components.config import AlpacaEvalConfig, Recipe
from components.io import read_json, write_json
from components.results import AlpacaEvalContest, AlpacaEvalFigures, AlpacaEvalResult
from components.seeding import derive
from tasks.evaluation.answers import ALIGNED, BASE
from tasks.runs import Run
from tasks.uncached import task

if TYPE_CHECKING:
    from components.evaluation.alpaca import Annotation
    from components.evaluation.alpaca_inputs import ModelOutput


@task()
def annotate_answers(run: Run, recipe: Recipe) -> AlpacaEvalResult:
    """Compare the answers with a reference's or the base policy's, by AlpacaEval's annotator.

    The folder alpaca_eval gets the outputs and the annotations in AlpacaEval's schema. An annotation
    that is in it already is not requested again.
    """
    from components.evaluation import alpaca, alpaca_inputs

    config = recipe.evaluation.alpaca_eval
    if config is None:
        raise ValueError("the recipe has no section evaluation.alpaca_eval")
    alpaca_inputs.check_alpaca_eval(config)
    folder = run.evaluation / "alpaca_eval"
    rows = read_json(run.evaluation / "answers.json")
    prompts = [row["prompt"] for row in rows]
    template = recipe.policy.template
    instructions = alpaca_inputs.annotator_instructions(prompts, template, recipe.data.test_prompts, config)
    alpaca_inputs.check_prompts(config, prompts, instructions)
    outputs = {}
    for name in (ALIGNED, BASE):
        texts = [row[name]["text"] for row in rows]
        outputs[name] = alpaca_inputs.model_outputs(
            instructions, texts, f"{recipe.name} {name}", recipe.data.source
        )
        write_json(folder / f"{name}.model_outputs.json", outputs[name])
    if config.reference_outputs is None:
        answered = instructions
        entries = {"aligned_vs_base": (outputs[ALIGNED], outputs[BASE])}
    else:
        reference_outputs = alpaca_inputs.read_outputs(Path(config.reference_outputs))
        answered = [row["instruction"] for row in reference_outputs]
        baseline = _matched_outputs(
            alpaca_inputs.match_outputs(reference_outputs, prompts, instructions), instructions
        )
        entries = {f"{name}_vs_reference": (own, baseline) for name, own in outputs.items()}
    contests = {}
    for name, (own, baseline) in entries.items():
        annotations = alpaca.annotate(config, baseline, own, folder / "annotated.json", recipe.seed)
        write_json(folder / f"{name}.annotations.json", annotations)
        figures = _compute_figures(recipe, config, name, annotations, answered)
        contests[name] = AlpacaEvalContest(baseline=baseline[0]["generator"], figures=figures)
    return AlpacaEvalResult(
        annotator=config.annotators_config.name,
        contests=contests,
        note=None if config.calibration else alpaca.missing_rate_note(answered),
    )


def _compute_figures(
    recipe: Recipe,
    config: AlpacaEvalConfig,
    contest: str,
    annotations: Sequence[Annotation],
    answered: Sequence[str],
) -> AlpacaEvalFigures:
    """The figures of a contest; the reference has answered the instructions `answered`."""
    from components.evaluation import alpaca

    seed = derive(recipe.seed, "alpaca_eval", contest)
    figures = alpaca.compute_figures(annotations, recipe.evaluation.bootstrap, seed)
    if config.calibration:
        rate = alpaca.package_length_controlled_rate(annotations, answered, Path(config.calibration))
        figures = figures.model_copy(update={"length_controlled_winrate": rate})
    line = "AlpacaEval, %s: win rate %.2f%% (standard error %.2f) on %d prompts"
    numbers = (figures.win_rate, figures.standard_error, figures.n_total)
    get_run_logger().info(line, contest, *numbers)
    return figures


def _matched_outputs(matched: Sequence[ModelOutput | None], instructions: Sequence[str]) -> list[ModelOutput]:
    """The reference's outputs under the instructions that the annotator sees.

    None is missing: alpaca_inputs.check_prompts refuses prompts that the reference has not answered.
    """
    outputs = []
    for row, instruction in zip(matched, instructions, strict=True):
        if row is not None:
            output = row.copy()
            output["instruction"] = instruction
            outputs.append(output)
    return outputs
