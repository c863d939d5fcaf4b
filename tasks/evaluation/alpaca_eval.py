"""AlpacaEval on the policies' answers."""

from __future__ import annotations

from pathlib import Path

from prefect import get_run_logger

from components.config import Recipe
from components.io import read_json, write_json
from components.results import AlpacaEvalContest, AlpacaEvalResult
from components.seeding import derive
from tasks.evaluation.answers import ALIGNED, BASE
from tasks.runs import Run
from tasks.uncached import task


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
    outputs = {}
    for name in (ALIGNED, BASE):
        texts = [row[name]["text"] for row in rows]
        outputs[name] = alpaca_inputs.model_outputs(
            instructions, texts, f"{recipe.name} {name}", recipe.data.source
        )
        write_json(folder / f"{name}.model_outputs.json", [row.model_dump() for row in outputs[name]])
    baseline = alpaca_inputs.find_baseline(config, prompts, instructions)
    if baseline is None:
        answered = instructions
        entries = {"aligned_vs_base": (outputs[ALIGNED], outputs[BASE])}
    else:
        answered = alpaca_inputs.answered_instructions(config)
        entries = {f"{name}_vs_reference": (own, baseline) for name, own in outputs.items()}
    contests = {}
    for name, (own, opponent) in entries.items():
        annotations = alpaca.annotate(config, opponent, own, folder / "annotated.json", recipe.seed)
        write_json(folder / f"{name}.annotations.json", annotations)
        seed = derive(recipe.seed, "alpaca_eval", name)
        figures = alpaca.compute_figures(annotations, recipe.evaluation.bootstrap, seed)
        if config.calibration:
            rate = alpaca.package_length_controlled_rate(annotations, answered, Path(config.calibration))
            figures = figures.model_copy(update={"length_controlled_winrate": rate})
        contests[name] = AlpacaEvalContest(baseline=opponent[0].generator, figures=figures)
        get_run_logger().info(
            "AlpacaEval, %s: win rate %.2f%% (standard error %.2f) on %d prompts",
            name,
            figures.win_rate,
            figures.standard_error,
            figures.n_total,
        )
    return AlpacaEvalResult(
        annotator=config.annotators_config.name,
        contests=contests,
        note=None if config.calibration else alpaca.missing_rate_note(answered),
    )
