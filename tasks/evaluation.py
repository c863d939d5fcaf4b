"""Tasks of evaluation: the judge, the answers, and the win rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import get_run_logger

from components.config import Recipe
from components.seeding import derive
from tasks.alignment import choose_prompts
from tasks.devices import POOL
from tasks.runs import read_json, write_json
from tasks.uncached import task


@task()
def answer_prompts(recipe: Recipe, prepared: Path, adapter: Path, path: Path) -> dict[str, float]:
    """Let the raw and the aligned policy answer the held-out prompts greedily; stored as JSON."""
    from components.models.policy import Policy

    log = get_run_logger()
    prompts = choose_prompts(prepared, "test", recipe.evaluation.prompts, recipe.seed)
    answers: dict[str, list] = {}
    with POOL.borrow(recipe) as device:
        policy = Policy(recipe.policy, device, adapter)

        def write(name: str) -> None:
            generated = policy.generate(
                [row["prompt"] for row in prompts], derive(recipe.seed, "answers"),
                progress=lambda done, total: log.info("%s policy: %d of %d answers", name, done, total))
            answers[name] = [completions[0] for completions in generated]

        write("aligned")
        with policy.model.disable_adapter():
            write("raw")
    write_json(path, [
        row | {name: {"text": answers[name][i].text, "finished": answers[name][i].finished, "tokens": len(answers[name][i].ids)} for name in answers}
        for i, row in enumerate(prompts)])
    return {
        f"{name}_{what}": value for name, given in answers.items() for what, value in (
            ("finished_share", sum(c.finished for c in given) / len(given)), ("tokens", sum(len(c.ids) for c in given) / len(given)))}


@task()
def judge_answers(recipe: Recipe, prepared: Path, judges: Path, answers: Path) -> dict[str, Any]:
    """Judge the aligned policy's answers against the raw policy's and against the human ones, in both orders.

    What a judge wrote, if it writes, is kept beside the answers as judgements.json.
    """
    from components.evaluation.judges import build_judge, judge_pairs
    from components.evaluation.length_control import control_length
    from components.evaluation.overlap import rouge

    log = get_run_logger()
    rows = read_json(answers)
    with POOL.borrow(recipe) as device:
        judge = build_judge(
            recipe.evaluation.judge, prepared, judges, recipe.seed, device,
            progress=lambda step, loss: log.info("judge: training step %d of %d, loss %.3f", step + 1, recipe.evaluation.judge.steps, loss) if step % 10 == 9 else None)
        human = [row for row in rows if row["references"]]
        contests = {
            "aligned_vs_raw": (rows, "aligned", lambda row: row["raw"]["text"]),
            "aligned_vs_human": (human, "aligned", lambda row: row["references"][0]),
            "raw_vs_human": (human, "raw", lambda row: row["references"][0])}
        result: dict[str, Any] = {"judge": judge.description, "contests": {}, "verdicts": {}}
        for name, (asked, ours, theirs) in contests.items():
            if not asked:
                continue
            texts, drawn = ([row[ours]["text"] for row in asked], [theirs(row) for row in asked]), (recipe.evaluation.bootstrap, derive(recipe.seed, "bootstrap", name))
            judged = judge_pairs(judge, [row["prompt"] for row in asked], *texts, *drawn)
            rate, even = judged.rate, control_length(judged.verdicts, *texts, *drawn)
            result["contests"][name] = {
                "win_rate": rate.rate, "low": rate.low, "high": rate.high, "wins": rate.wins, "ties": rate.ties, "losses": rate.losses,
                "unparsable": rate.unparsable, "consistency": judged.consistency, "ties_half": even.uncontrolled,
                "length_controlled": even.rate, "length_controlled_low": even.low, "length_controlled_high": even.high, "length_effect": even.effect}
            result["verdicts"][name] = {row["prompt_id"]: verdict.value for row, verdict in zip(asked, judged.verdicts, strict=True)}
        result["judge_figures"] = getattr(judge, "figures", {})
        texts = getattr(judge, "texts", [])
    if texts:
        write_json(answers.with_name("judgements.json"), texts)
    references = [row["references"] for row in rows]
    result["rouge"] = {name: rouge([row[name]["text"] for row in rows], references) for name in ("raw", "aligned")}
    return result


@task()
def annotate_answers(recipe: Recipe, answers: Path, folder: Path) -> dict[str, Any]:
    """Let AlpacaEval's annotator compare the answers with the reference's outputs, or with the raw policy's where there are none.

    The folder gets the outputs and the annotations in AlpacaEval's schema, and what was paid for already is not asked again.
    """
    from components.evaluation import alpaca

    log, config, rows = get_run_logger(), recipe.evaluation.alpaca_eval, read_json(answers)
    alpaca.check_alpaca_eval(config)
    prompts = [row["prompt"] for row in rows]
    written = {name: alpaca.model_outputs(prompts, [row[name]["text"] for row in rows], f"{recipe.name} {name}", recipe.data.source) for name in ("aligned", "raw")}
    for name, outputs in written.items():
        write_json(folder / f"{name}.model_outputs.json", outputs)
    if config.reference_outputs is None:
        instructions, contests = prompts, {"aligned_vs_raw": ("aligned", written["raw"])}
    else:
        reference = alpaca.read_outputs(Path(config.reference_outputs))
        instructions, answered = [row["instruction"] for row in reference], {row["instruction"]: row for row in reference}
        contests = {f"{name}_vs_reference": (name, [answered[prompt] for prompt in prompts]) for name in written}
    result: dict[str, Any] = {"annotator": config.annotators_config, "contests": {}, "missing": None if config.calibration else alpaca.without_calibration(instructions)}
    for name, (ours, theirs) in contests.items():
        annotations = alpaca.annotate(config, theirs, written[ours], folder / "annotated.json", recipe.seed)
        write_json(folder / f"{name}.annotations.json", annotations)
        measured = alpaca.figures(annotations, recipe.evaluation.bootstrap, derive(recipe.seed, "alpaca_eval", name))
        if config.calibration:
            measured["length_controlled_winrate"] = alpaca.length_controlled_winrate(annotations, instructions, Path(config.calibration))
        result["contests"][name] = measured | {"baseline": theirs[0]["generator"]}
        log.info("AlpacaEval, %s: win rate %.2f%% (standard error %.2f) on %d prompts", name, measured["win_rate"], measured["standard_error"], measured["n_total"])
    return result
