"""The judge's verdicts on answers, and the reward-hacking curve over DPO's steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from prefect import get_run_logger

from components.config import Recipe, RecipeError
from components.data.templates import load as load_template
from components.evaluation.judges.base import (
    Contest,
    Judge,
    JudgedPairs,
    JudgeResources,
    judge_pairs,
    judge_section,
)
from components.evaluation.winrate import WinRate
from components.federation.outcome import Outcome, Workspace, load_outcome
from components.io import read_json, write_json
from components.results import ContestResult, CurvePoint, OutcomeRecord, SingleOrderResult
from components.seeding import derive
from tasks.devices import POOL
from tasks.evaluation.answers import ALIGNED, BASE
from tasks.uncached import task


@dataclass(frozen=True)
class JudgedRun:
    """A run whose answers are judged.

    Attributes:
        recipe: the recipe.
        prepared: the prepared data.
        judges: folder of trained judges, shared by runs.
    """

    recipe: Recipe
    prepared: Path
    judges: Path

    def build_judge(self, device: str, log_training: bool = False) -> Judge:
        """The recipe's judge on a device."""
        log = get_run_logger()

        def progress(step: int, loss: float) -> None:
            if step % 10 == 9:
                log.info("judge: training step %d, loss %.3f", step + 1, loss)

        section = judge_section(self.recipe.evaluation.judge)
        section.check_data(self.prepared)
        return section.build(
            JudgeResources(
                self.prepared,
                self.judges,
                self.recipe.seed,
                device,
                load_template(self.recipe.policy.template, "policy"),
                progress if log_training else None,
            )
        )


@dataclass(frozen=True)
class JudgedAnswers:
    """Verdicts on the answers of a run.

    Attributes:
        judge: its description.
        figures: numbers about the judge itself.
        contests, verdicts: by name of the contest, see EvaluationResult.
        rouge: ROUGE by policy.
    """

    judge: str
    figures: dict[str, float]
    contests: dict[str, ContestResult]
    verdicts: dict[str, dict[str, str]]
    rouge: dict[str, dict[str, float]]


@task()
def judge_answers(run: JudgedRun, answers: Path) -> JudgedAnswers:
    """Judge the policies' answers against each other and against references, in both orders.

    The texts of a judge that writes are stored beside the answers as judgements.json.
    """
    from components.evaluation.overlap import rouge

    recipe = run.recipe
    rows = read_json(answers)
    results = {}
    verdicts = {}
    with POOL.borrow(recipe.runtime) as device:
        judge = run.build_judge(device, log_training=True)
        for name, contest in policy_contests(rows, recipe.evaluation.contests).items():
            seed = derive(recipe.seed, "bootstrap", name)
            judged = judge_pairs(judge, contest.texts, recipe.evaluation.bootstrap, seed)
            results[name] = contest_result(judged, contest.texts, recipe.evaluation.bootstrap, seed)
            verdicts[name] = {
                prompt_id: verdict.value
                for prompt_id, verdict in zip(contest.prompt_ids, judged.verdicts, strict=True)
            }
        if judge.texts:
            write_json(answers.with_name("judgements.json"), judge.texts)
    references = [row["references"] for row in rows]
    return JudgedAnswers(
        judge.description,
        judge.figures,
        results,
        verdicts,
        {name: rouge([row[name]["text"] for row in rows], references) for name in (BASE, ALIGNED)},
    )


@dataclass(frozen=True)
class PolicyContest:
    """A contest between two policies' answers, or between answers and references.

    Attributes:
        prompt_ids: ids of the N prompts.
        texts: the prompts and both sides' answers.
    """

    prompt_ids: list[str]
    texts: Contest


def policy_contests(
    rows: Sequence[dict[str, Any]], names: Sequence[str] | None = None
) -> dict[str, PolicyContest]:
    """The contests of a run by name; those with references are on the prompts that have one.

    Args:
        rows: answers of both policies to each prompt, see join_answers.
        names: the contests that are judged; None takes all for which there are texts.

    Raises:
        RecipeError: a named contest needs references, and no prompt has one.
    """
    with_references = [row for row in rows if row["references"]]
    references = [row["references"][0] for row in with_references]
    contests = {"aligned_vs_base": _contest(rows, ALIGNED, [row[BASE]["text"] for row in rows])}
    if with_references:
        contests["aligned_vs_human"] = _contest(with_references, ALIGNED, references)
        contests["base_vs_human"] = _contest(with_references, BASE, references)
    for name in names or ():
        if name not in contests:
            raise RecipeError(
                f"evaluation.contests names {name}, but no held-out prompt has a reference: leave it out, or"
                " use a source with references."
            )
    return {name: contest for name, contest in contests.items() if names is None or name in names}


def _contest(rows: Sequence[dict[str, Any]], policy: str, opponents: list[str]) -> PolicyContest:
    prompts = [row["prompt"] for row in rows]
    answers = [row[policy]["text"] for row in rows]
    return PolicyContest([row["prompt_id"] for row in rows], Contest(prompts, answers, opponents))


def contest_result(judged: JudgedPairs, contest: Contest, resamples: int, seed: int) -> ContestResult:
    """A contest as a result: its win rate, and the rate at equal length."""
    from components.evaluation.length_control import length_controlled_rate

    rate = judged.rate
    controlled = length_controlled_rate(
        judged.verdicts, contest.ours, contest.theirs, resamples, seed, contest.prompts
    )
    return ContestResult(
        win_rate=rate.rate,
        low=rate.low,
        high=rate.high,
        wins=rate.wins,
        ties=rate.ties,
        losses=rate.losses,
        unparsable=rate.unparsable,
        consistency=judged.consistency,
        ties_half=controlled.uncontrolled,
        length_controlled=controlled.rate,
        length_controlled_low=controlled.low,
        length_controlled_high=controlled.high,
        length_effect=controlled.effect,
        single_order=_single_order(judged.single_order_rate),
    )


def _single_order(rate: WinRate) -> SingleOrderResult:
    return SingleOrderResult(
        win_rate=rate.rate,
        low=rate.low,
        high=rate.high,
        wins=rate.wins,
        ties=rate.ties,
        losses=rate.losses,
        unparsable=rate.unparsable,
    )


@task()
def draw_reward_hacking_curve(
    run: JudgedRun,
    record: OutcomeRecord,
    workspace: Workspace,
    answers: dict[int, Path],
    base: Path,
    plot: Path,
) -> list[CurvePoint]:
    """Selectors' and judge's scores of a policy over DPO's steps, against the base policy.

    The curve shows reward hacking (FedBiscuit section 1). DPO was trained on the selectors'
    majority. Their score is the share of prompts on which the majority prefers the policy's answer.
    Equal answers count half, and so does a tie of the judge.

    Args:
        run: the judge.
        record: the selectors.
        workspace: the run.
        answers: file of the answers at each step.
        base: file of the base policy's answers.
        plot: PNG to write.
    """
    from components.evaluation.hacking_curve import plot_hacking_curve

    contests = checkpoint_contests(answers, base)
    outcome = load_outcome(record)
    proxies = {step: _selector_score(outcome, contest, workspace) for step, contest in contests.items()}
    POOL.release()
    recipe = run.recipe
    seed = derive(recipe.seed, "bootstrap", "curve")
    curve = []
    with POOL.borrow(recipe.runtime) as device:
        judge = run.build_judge(device)
        for step, contest in contests.items():
            rate = judge_pairs(judge, contest, recipe.evaluation.bootstrap, seed).rate
            parsed = rate.wins + rate.ties + rate.losses
            score = (rate.wins + rate.ties / 2) / parsed if parsed else float("nan")
            prompts = len(set(contest.prompts))
            point = CurvePoint(step=step, prompts=prompts, proxy=proxies[step], judge=score)
            curve.append(point)
    plot_hacking_curve(curve, plot)
    return curve


def checkpoint_contests(answers: Mapping[int, Path], base: Path) -> dict[int, Contest]:
    """Contests of the policy at each step of DPO with the base policy, on prompts with all answers.

    Args:
        answers: file of the answers at each step.
        base: file of the base policy's answers.
    """
    texts_by_step = {
        step: {row["prompt_id"]: row["text"] for row in read_json(path)}
        for step, path in sorted(answers.items())
    }
    rows = [
        row for row in read_json(base) if all(row["prompt_id"] in texts for texts in texts_by_step.values())
    ]
    prompts = [row["prompt"] for row in rows]
    base_texts = [row["text"] for row in rows]
    return {
        step: Contest(prompts, [texts[row["prompt_id"]] for row in rows], base_texts)
        for step, texts in texts_by_step.items()
    }


def _selector_score(outcome: Outcome, contest: Contest, workspace: Workspace) -> float:
    """Share of prompts on which most selectors prefer our answer, in the mean of both orders.

    Equal answers count half.
    """
    from components.models.selector import Comparison

    comparisons = [
        Comparison(prompt, ours, theirs)
        for prompt, ours, theirs in zip(contest.prompts, contest.ours, contest.theirs, strict=True)
    ]
    orders = [outcome.compare(comparisons, workspace) > 0]
    if workspace.recipe.selector.orders == "single":  # otherwise a selector averages both orders
        swapped = [Comparison(pair.prompt, pair.second, pair.first) for pair in comparisons]
        orders.append(outcome.compare(swapped, workspace) < 0)
    preferred = np.mean([votes.mean(axis=0) > 0.5 for votes in orders], axis=0)
    equal = np.array([pair.first.strip() == pair.second.strip() for pair in comparisons])
    return float(np.where(equal, 0.5, preferred).mean())
