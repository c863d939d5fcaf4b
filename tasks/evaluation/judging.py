"""The judge's verdicts on answers, the reward-hacking curve over DPO's steps, and AlpacaEval."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from prefect import get_run_logger

from components.config import Recipe, RecipeError
from components.data.templates import load as load_template
from components.evaluation.contests import Contest, judge_contest
from components.evaluation.judges.judge import Judge, JudgeResources
from components.io import read_json, write_json
from components.models.selector import Comparison
from components.results import AlpacaEvalContest, AlpacaEvalResult, CurvePoint, EvaluationResult
from components.seeding import derive
from tasks.devices import POOL, run_on_worker, run_on_workers
from tasks.evaluation.answers import ALIGNED, BASE, answer_prompts, answers_file
from tasks.policies import EvaluatedPolicy, compare_by_selectors
from tasks.runs import Run, contest_file, judges_root
from tasks.uncached import task


def build_judge(run: Run, recipe: Recipe, device: str, log: logging.Logger | None = None) -> Judge:
    """The recipe's judge on a device; outside of a flow, its training is reported to a log."""
    logger = log or get_run_logger()

    def progress(step: int, loss: float) -> None:
        if step % 10 == 9:
            logger.info("judge: training step %d, loss %.3f", step + 1, loss)

    section = recipe.evaluation.judge
    section.check_data(run.prepared)
    template = load_template(recipe.policy.template, "policy")
    return section.build(JudgeResources(run.prepared, judges_root(), recipe.seed, device, template, progress))


@dataclass(frozen=True)
class JudgedContest:
    """A contest, and what the judge has written in it."""

    contest: Contest
    texts: list[dict[str, str]]
    figures: dict[str, float]  # how much those of the judge have grown, such as a count of its inputs


def judge_contests(
    run: Run, recipe: Recipe, contests: Mapping[str, Mapping[str, Comparison]]
) -> dict[str, JudgedContest]:
    """Put the pairs of contests to the recipe's judge, a contest to each worker."""
    common = {"run": run, "recipe": recipe}
    calls = [
        common | {"name": name.replace("_", " "), "pairs": dict(pairs)} for name, pairs in contests.items()
    ]
    judged = run_on_workers(judge_pairs, calls, recipe.runtime, run.folder)
    return dict(zip(contests, judged, strict=True))


def _borrow_judge(run: Run, recipe: Recipe) -> AbstractContextManager[Judge]:
    key = f"judge/{run.folder}/{recipe.fingerprint('evaluation', 'policy')}"
    return POOL.borrow_model(recipe.runtime, key, partial(build_judge, run, recipe))


@task(name="prepare the judge")
def prepare_judge(run: Run, recipe: Recipe) -> tuple[str, dict[str, float]]:
    """Train the judge, if it has to be, and return its description and figures."""
    with _borrow_judge(run, recipe) as judge:
        return judge.description, judge.figures


@task(name="judge {name}")
def judge_pairs(
    run: Run, recipe: Recipe, name: str, pairs: dict[str, Comparison], path: Path | None = None
) -> JudgedContest:
    """Put the pairs of a contest to the judge in both orders, and store the contest if there is a path."""
    with _borrow_judge(run, recipe) as judge:
        written, before = len(judge.texts), dict(judge.figures)
        contest = judge_contest(judge, pairs, recipe.evaluation.style_control)
        if path is not None:
            contest.write(path)
        grown = {key: value - before[key] for key, value in judge.figures.items()}
        return JudgedContest(contest, judge.texts[written:], grown)


def judge_answers(run: Run, recipe: Recipe) -> EvaluationResult:
    """Judge the policies' answers against each other and against references, in both orders.

    The contests are stored beside the answers, and so are the texts of a judge that writes, as
    judgements.json. The result has no optional evaluations.
    """
    from components.evaluation.overlap import rouge

    rows = read_json(run.evaluation / "answers.json")
    POOL.release()  # of a judge that has counted inputs of an earlier attempt
    arguments = {"run": run, "recipe": recipe}
    description, figures = run_on_worker(prepare_judge, recipe.runtime, run.folder, **arguments)
    contests = {}
    texts = []
    judged = judge_contests(run, recipe, policy_pairs(rows, recipe.evaluation.contests))
    for name, own in judged.items():
        contest = own.contest.write(contest_file(run.evaluation, name))
        seed = derive(recipe.seed, "bootstrap", name)
        contests[name] = contest.figures(recipe.evaluation.bootstrap, seed, figures)
        texts += own.texts
        figures = {key: value + own.figures[key] for key, value in figures.items()}
    if texts:
        write_json(run.evaluation / "judgements.json", texts)
    human_answers = [row["references"] for row in rows]
    answers: dict[str, float] = {}
    for name in (ALIGNED, BASE):
        answers[f"{name}_finished_share"] = sum(row[name]["finished"] for row in rows) / len(rows)
        answers[f"{name}_tokens"] = sum(row[name]["tokens"] for row in rows) / len(rows)
    return EvaluationResult(
        answers=answers,
        judge=description,
        judge_figures=figures,
        contests=contests,
        rouge={name: rouge([row[name]["text"] for row in rows], human_answers) for name in (BASE, ALIGNED)},
    )


def policy_pairs(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str] | None = None
) -> dict[str, dict[str, Comparison]]:
    """The pairs of answers of a run's contests, by contest and answer id.

    Those with references are on the prompts that have one.

    Args:
        rows: answers of both policies to each prompt, see join_answers.
        names: the contests that are judged; None takes all for which there are texts.

    Raises:
        RecipeError: a named contest needs references, and no prompt has one.
    """
    contests = {
        "aligned_vs_base": {
            row["prompt_id"]: Comparison(row["prompt"], row[ALIGNED]["text"], row[BASE]["text"])
            for row in rows
        }
    }
    with_reference = [row for row in rows if row["references"]]
    if with_reference:
        for policy in (ALIGNED, BASE):
            contests[f"{policy}_vs_human"] = {
                row["prompt_id"]: Comparison(row["prompt"], row[policy]["text"], row["references"][0])
                for row in with_reference
            }
    for name in names or ():
        if name not in contests:
            raise RecipeError(
                f"evaluation.contests names {name}, but no held-out prompt has a reference: leave it out, or"
                " use a source with references."
            )
    return {name: contest for name, contest in contests.items() if names is None or name in names}


def answer_at_checkpoints(run: Run, recipe: Recipe) -> list[int]:
    """Steps of DPO at which the policy answers evaluation.curve_prompts prompts; each is a task.

    There are none without such prompts, and where the clients trained the policy.
    """
    limit = recipe.evaluation.curve_prompts
    if not limit:
        return []
    aligned = run.alignment_result()
    if not aligned.checkpoints:
        get_run_logger().info(
            "no reward-hacking curve (evaluation.curve_prompts): federation.method '%s' trains the policy"
            " itself, so that there are no steps of DPO",
            recipe.federation.method,
        )
    folders = {step: folder for folder, step in aligned.checkpoints.items()}
    for step in sorted(folders):
        answer_prompts(run, recipe, EvaluatedPolicy(f"step {step}", run.alignment / folders[step]), limit)
    return sorted(folders)


def draw_reward_hacking_curve(run: Run, recipe: Recipe, steps: Sequence[int]) -> list[CurvePoint]:
    """Selectors' and judge's scores of a policy at steps of DPO, against the base policy.

    The curve shows reward hacking (FedBiscuit section 1). DPO was trained on the selectors'
    majority. Their score is the share of prompts on which the majority prefers the policy's answer.
    Equal answers count half, and so does a tie of the judge.
    """
    contests = checkpoint_pairs(run, steps)
    proxies = _selector_scores(run, recipe, contests)
    judged = judge_contests(run, recipe, {f"step {step}": pairs for step, pairs in contests.items()})
    curve = []
    for step, own in zip(contests, judged.values(), strict=True):
        score = own.contest.win_rate().ties_as_half
        prompts = len(set(own.contest.units))
        curve.append(CurvePoint(step=step, prompts=prompts, proxy=proxies[step], judge=score))
    return curve


def checkpoint_pairs(run: Run, steps: Sequence[int]) -> dict[int, dict[str, Comparison]]:
    """Pairs of the policy's answer at each step of DPO and the base policy's, by step and answer id.

    They are on the prompts with all answers.
    """
    texts_by_step = {
        step: {row["prompt_id"]: row["text"] for row in read_json(answers_file(run, f"step {step}"))}
        for step in steps
    }
    rows = {
        row["prompt_id"]: row
        for row in read_json(answers_file(run, BASE))
        if all(row["prompt_id"] in texts for texts in texts_by_step.values())
    }
    return {
        step: {name: Comparison(row["prompt"], texts[name], row["text"]) for name, row in rows.items()}
        for step, texts in texts_by_step.items()
    }


def _selector_scores(
    run: Run, recipe: Recipe, contests: Mapping[int, Mapping[str, Comparison]]
) -> dict[int, float]:
    """By step, the share of prompts on which most selectors prefer our answer, in the mean of both orders.

    Equal answers count half.
    """
    pairs = [pair for contest in contests.values() for pair in contest.values()]
    # With orders 'both' a selector averages the orders, and the swapped margins are the same.
    swapped = [pair.swapped() for pair in pairs]
    shown, as_second = np.split(compare_by_selectors(run, recipe, [*pairs, *swapped]), 2, axis=1)
    preferred = np.mean([(shown > 0).mean(axis=0) > 0.5, (as_second < 0).mean(axis=0) > 0.5], axis=0)
    equal = np.array([pair.first.strip() == pair.second.strip() for pair in pairs])
    scores = np.split(np.where(equal, 0.5, preferred), np.cumsum([len(c) for c in contests.values()])[:-1])
    return {step: float(part.mean()) for step, part in zip(contests, scores, strict=True)}


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
        figures = alpaca.compute_figures(
            annotations, recipe.evaluation.bootstrap, seed, recipe.evaluation.style_control
        )
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
