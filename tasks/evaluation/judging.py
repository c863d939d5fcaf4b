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
from components.evaluation.contests import judge_contest
from components.evaluation.judges.base import Judge, JudgeResources, judge_section
from components.federation.outcome import Outcome, Workspace, load_outcome
from components.io import read_json, write_json
from components.models.selector import Comparison
from components.results import CurvePoint, EvaluationResult, OutcomeRecord
from components.seeding import derive
from tasks.devices import POOL
from tasks.evaluation.answers import ALIGNED, BASE
from tasks.runs import contest_file
from tasks.uncached import task


@dataclass(frozen=True)
class JudgedRun:
    """A run whose answers are judged."""

    recipe: Recipe  # the recipe
    prepared: Path  # the prepared data
    judges: Path  # folder of trained judges, shared by runs

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


@task()
def judge_answers(run: JudgedRun, answers: Path, figures: dict[str, float]) -> EvaluationResult:
    """Judge the policies' answers against each other and against references, in both orders.

    The contests are stored beside the answers, and so are the texts of a judge that writes, as
    judgements.json. The result has no optional evaluations.

    Args:
        run: the judge.
        answers: file of the answers of both policies, see join_answers.
        figures: of the answers themselves.
    """
    from components.evaluation.overlap import rouge

    recipe = run.recipe
    rows = read_json(answers)
    contests = {}
    with POOL.borrow(recipe.runtime) as device:
        judge = run.build_judge(device, log_training=True)
        for name, pairs in policy_pairs(rows, recipe.evaluation.contests).items():
            contest = judge_contest(judge, pairs).write(contest_file(answers.parent, name))
            seed = derive(recipe.seed, "bootstrap", name)
            contests[name] = contest.figures(recipe.evaluation.bootstrap, seed)
        if judge.texts:
            write_json(answers.with_name("judgements.json"), judge.texts)
    references = [row["references"] for row in rows]
    return EvaluationResult(
        answers=figures,
        judge=judge.description,
        judge_figures=judge.figures,
        contests=contests,
        rouge={name: rouge([row[name]["text"] for row in rows], references) for name in (BASE, ALIGNED)},
    )


def policy_pairs(
    rows: Sequence[dict[str, Any]], names: Sequence[str] | None = None
) -> dict[str, dict[str, Comparison]]:
    """The pairs of answers of a run's contests, by contest and answer id.

    Those with references are on the prompts that have one.

    Args:
        rows: answers of both policies to each prompt, see join_answers.
        names: the contests that are judged; None takes all for which there are texts.

    Raises:
        RecipeError: a named contest needs references, and no prompt has one.
    """

    def pairs(policy: str, opponents: Mapping[str, str]) -> dict[str, Comparison]:
        return {
            row["prompt_id"]: Comparison(row["prompt"], row[policy]["text"], opponents[row["prompt_id"]])
            for row in rows
            if row["prompt_id"] in opponents
        }

    contests = {"aligned_vs_base": pairs(ALIGNED, {row["prompt_id"]: row[BASE]["text"] for row in rows})}
    references = {row["prompt_id"]: row["references"][0] for row in rows if row["references"]}
    if references:
        contests["aligned_vs_human"] = pairs(ALIGNED, references)
        contests["base_vs_human"] = pairs(BASE, references)
    for name in names or ():
        if name not in contests:
            raise RecipeError(
                f"evaluation.contests names {name}, but no held-out prompt has a reference: leave it out, or"
                " use a source with references."
            )
    return {name: contest for name, contest in contests.items() if names is None or name in names}


@task()
def draw_reward_hacking_curve(
    run: JudgedRun,
    record: OutcomeRecord,
    workspace: Workspace,
    answers: dict[int, Path],
    base: Path,
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
    """
    contests = checkpoint_pairs(answers, base)
    outcome = load_outcome(record)
    proxies = {
        step: _selector_score(outcome, list(pairs.values()), workspace) for step, pairs in contests.items()
    }
    POOL.release()
    curve = []
    with POOL.borrow(run.recipe.runtime) as device:
        judge = run.build_judge(device)
        for step, pairs in contests.items():
            contest = judge_contest(judge, pairs)
            rate = contest.win_rate()
            parsed = rate.wins + rate.ties + rate.losses
            score = (rate.wins + rate.ties / 2) / parsed if parsed else float("nan")
            prompts = len(set(contest.units))
            curve.append(CurvePoint(step=step, prompts=prompts, proxy=proxies[step], judge=score))
    return curve


def checkpoint_pairs(answers: Mapping[int, Path], base: Path) -> dict[int, dict[str, Comparison]]:
    """Pairs of the policy's answer at each step of DPO and the base policy's, by step and answer id.

    They are on the prompts with all answers.

    Args:
        answers: file of the answers at each step.
        base: file of the base policy's answers.
    """
    texts_by_step = {
        step: {row["prompt_id"]: row["text"] for row in read_json(path)}
        for step, path in sorted(answers.items())
    }
    rows = {
        row["prompt_id"]: row
        for row in read_json(base)
        if all(row["prompt_id"] in texts for texts in texts_by_step.values())
    }
    return {
        step: {name: Comparison(row["prompt"], texts[name], row["text"]) for name, row in rows.items()}
        for step, texts in texts_by_step.items()
    }


def _selector_score(outcome: Outcome, comparisons: Sequence[Comparison], workspace: Workspace) -> float:
    """Share of prompts on which most selectors prefer our answer, in the mean of both orders.

    Equal answers count half.
    """
    orders = [outcome.compare(comparisons, workspace) > 0]
    if workspace.recipe.selector.orders == "single":  # otherwise a selector averages both orders
        swapped = [Comparison(pair.prompt, pair.second, pair.first) for pair in comparisons]
        orders.append(outcome.compare(swapped, workspace) < 0)
    preferred = np.mean([votes.mean(axis=0) > 0.5 for votes in orders], axis=0)
    equal = np.array([pair.first.strip() == pair.second.strip() for pair in comparisons])
    return float(np.where(equal, 0.5, preferred).mean())
