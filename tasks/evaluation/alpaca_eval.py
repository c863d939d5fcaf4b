"""AlpacaEval on the policies' answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import get_run_logger

from components.config import AlpacaEvalConfig, EvaluationConfig, Recipe
from components.io import read_json, write_json
from components.results import AlpacaEvalContest, AlpacaEvalResult
from components.seeding import derive
from tasks.evaluation.answers import ALIGNED, BASE
from tasks.uncached import task

if TYPE_CHECKING:
    from components.evaluation.alpaca import ModelOutput

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """A model against a baseline, with outputs to the same instructions, row by row.

    Attributes:
        name: name of the contest.
        outputs: outputs of the model.
        baseline: outputs of the baseline.
    """

    name: str
    outputs: list[ModelOutput]
    baseline: list[ModelOutput]


@task()
def annotate_answers(recipe: Recipe, answers: Path, folder: Path) -> AlpacaEvalResult:
    """Compare the answers with a reference's or the base policy's, by AlpacaEval's annotator.

    The folder gets the outputs and the annotations in AlpacaEval's schema. An annotation that is in
    the folder already is not requested again.
    """
    from components.evaluation import alpaca

    config = _section(recipe.evaluation)
    alpaca.check_alpaca_eval(config)
    rows = read_json(answers)
    prompts = [row["prompt"] for row in rows]
    instructions = alpaca.annotator_instructions(
        prompts, recipe.policy.template, recipe.data.test_prompts, config
    )
    alpaca.check_prompts(config, prompts, instructions)
    outputs = _write_outputs(recipe, rows, instructions, folder)
    if config.reference_outputs is None:
        all_instructions = instructions
        entries = [Entry("aligned_vs_base", outputs[ALIGNED], outputs[BASE])]
    else:
        reference = alpaca.read_outputs(Path(config.reference_outputs))
        all_instructions = [row["instruction"] for row in reference]
        matched = _matched_outputs(alpaca.match_reference(reference, prompts, instructions), instructions)
        entries = [Entry(f"{name}_vs_reference", own, matched) for name, own in outputs.items()]
    return AlpacaEvalResult(
        annotator=config.annotators_config.name,
        contests={entry.name: _annotate(recipe, entry, all_instructions, folder) for entry in entries},
        note=None if config.calibration else alpaca.missing_rate_note(all_instructions),
    )


def _section(config: EvaluationConfig) -> AlpacaEvalConfig:
    if config.alpaca_eval is None:
        raise ValueError("the recipe has no section evaluation.alpaca_eval")
    return config.alpaca_eval


def _write_outputs(
    recipe: Recipe, rows: Rows, instructions: Sequence[str], folder: Path
) -> dict[str, list[ModelOutput]]:
    """The outputs of both policies in AlpacaEval's schema, which are written to the folder too."""
    from components.evaluation import alpaca

    outputs = {}
    for name in (ALIGNED, BASE):
        texts = [row[name]["text"] for row in rows]
        outputs[name] = alpaca.model_outputs(instructions, texts, f"{recipe.name} {name}", recipe.data.source)
        write_json(folder / f"{name}.model_outputs.json", outputs[name])
    return outputs


def _annotate(
    recipe: Recipe, entry: Entry, all_instructions: Sequence[str], folder: Path
) -> AlpacaEvalContest:
    """Annotate a contest, and compute its figures.

    Args:
        recipe: the recipe.
        entry: the model and the baseline.
        all_instructions: the instructions that the reference answered.
        folder: where annotations are written.
    """
    from components.evaluation import alpaca

    config = _section(recipe.evaluation)
    annotations = alpaca.annotate(
        config, entry.baseline, entry.outputs, folder / "annotated.json", recipe.seed
    )
    write_json(folder / f"{entry.name}.annotations.json", annotations)
    seed = derive(recipe.seed, "alpaca_eval", entry.name)
    figures = alpaca.compute_figures(annotations, recipe.evaluation.bootstrap, seed)
    if config.calibration:
        rate = alpaca.package_length_controlled_rate(annotations, all_instructions, Path(config.calibration))
        figures = figures.model_copy(update={"length_controlled_winrate": rate})
    get_run_logger().info(
        "AlpacaEval, %s: win rate %.2f%% (standard error %.2f) on %d prompts",
        entry.name,
        figures.win_rate,
        figures.standard_error,
        figures.n_total,
    )
    return AlpacaEvalContest(baseline=entry.baseline[0]["generator"], figures=figures)


def _matched_outputs(matched: Sequence[ModelOutput | None], instructions: Sequence[str]) -> list[ModelOutput]:
    """The reference's outputs under the instructions that the annotator sees.

    Raises:
        ValueError: the reference has not answered a prompt; alpaca.check_prompts refuses such
            prompts before the run.
    """
    outputs: list[ModelOutput] = []
    for row, instruction in zip(matched, instructions, strict=True):
        if row is None:
            raise ValueError(f"the reference has no output for the instruction {instruction[:80]!r}")
        output = row.copy()
        output["instruction"] = instruction
        outputs.append(output)
    return outputs
