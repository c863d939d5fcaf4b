"""Answers of the aligned and the base policy to held-out prompts, and the implicit reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import get_run_logger

from components.alignment.policies import PolicySet, load_policy, open_base_policy
from components.config import Recipe
from components.data.records import PairRow, PromptRow, answer_id, choose_prompts, read_rows
from components.evaluation.accuracy import accuracy_report
from components.io import read_json, stored, write_json
from components.learning.pair_scores import PreferenceScores
from components.models.policy import GREEDY, Sampling
from components.progress import Work, progress
from components.results import AccuracyReport, PolicyRecord
from components.seeding import derive, generator
from tasks.devices import POOL, open_workspace
from tasks.runs import Run
from tasks.uncached import task

BASE = "base"
ALIGNED = "aligned"


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A policy that answers prompts and questions."""

    name: str  # for logs and files
    record: PolicyRecord | None  # None for the base policy

    def open(self, run: Run, recipe: Recipe, device: str) -> PolicySet:
        """Load the policy on a device."""
        if self.record is None:
            return open_base_policy(recipe, device)
        return load_policy(self.record, run.alignment).open(device, open_workspace(run, recipe))


def evaluated_policies(run: Run) -> list[EvaluatedPolicy]:
    """The aligned and the base policy of a run."""
    return [EvaluatedPolicy(ALIGNED, run.alignment_result().policy), EvaluatedPolicy(BASE, None)]


@task(name="answer prompts: {policy.name}")
def answer_prompts(run: Run, recipe: Recipe, policy: EvaluatedPolicy, limit: int | None = None) -> None:
    """Write a policy's answers to the held-out prompts, unless they are there: answers-<policy>.json.

    With several answers per prompt, both policies sample from the same random numbers.

    Args:
        limit: maximum number of the recipe's prompts (a seeded sample); None takes all.
    """
    stored(answers_file(run, policy.name), lambda: _answer_rows(run, recipe, policy, limit))


def answers_file(run: Run, policy: str) -> Path:
    """File of a policy's answers."""
    return run.evaluation / f"answers-{policy.replace(' ', '-')}.json"


def _answer_rows(
    run: Run, recipe: Recipe, policy: EvaluatedPolicy, limit: int | None
) -> list[dict[str, Any]]:
    """The prompts with a policy's answers, and with the answering client where clients have own policies.

    There is a row for each answer; its prompt_id is that of the answer, see answer_id.
    """
    prompts = _evaluation_prompts(run, recipe, limit)
    log = get_run_logger()

    def log_answers(done: int, total: int) -> None:
        work = Work(f"answers of the {policy.name} policy", done, total)
        log.info("%s policy: %d of %d answers", policy.name, done, total, extra=progress(work))

    count = recipe.evaluation.answers_per_prompt
    sampling = GREEDY if count == 1 else Sampling(count, recipe.evaluation.answer_temperature)
    with POOL.borrow(recipe.runtime) as device:
        policies = policy.open(run, recipe, device)
        texts = [row["prompt"] for row in prompts]
        answers = policies.answer(texts, derive(recipe.seed, "answers"), log_answers, sampling)
    rows = []
    for row, samples in zip(prompts, answers, strict=True):
        for number, answer in enumerate(samples):
            completion = answer.completion
            own = {
                "prompt_id": answer_id(row["prompt_id"], number),
                "text": completion.text,
                "finished": completion.finished,
                "tokens": len(completion.ids),
            }
            rows.append(row | ({"client_id": answer.client} if answer.client else {}) | own)
    return rows


def _evaluation_prompts(run: Run, recipe: Recipe, limit: int | None) -> list[PromptRow]:
    """The recipe's held-out prompts, or a seeded sample of them."""
    prompts = choose_prompts(run.prepared, "test", recipe.evaluation.prompts, recipe.seed)
    if limit is None or limit >= len(prompts):
        return prompts
    order = generator(recipe.seed, "fewer prompts").permutation(len(prompts))
    return [prompts[i] for i in sorted(order[:limit])]


def join_answers(run: Run) -> None:
    """Write the answers of both policies to the same prompts side by side, as answers.json.

    Raises:
        ValueError: the policies answered different prompts.
    """
    files = {name: answers_file(run, name) for name in (ALIGNED, BASE)}
    tables = {name: {row["prompt_id"]: row for row in read_json(file)} for name, file in files.items()}
    if tables[ALIGNED].keys() != tables[BASE].keys():
        names = ", ".join(map(str, files.values()))
        raise ValueError(f"{names}: expected answers to the same prompts; delete them and resume the run")
    rows = []
    for prompt_id, row in tables[ALIGNED].items():
        joined = {key: row[key] for key in ("prompt_id", "prompt", "references", "split")}
        for name, table in tables.items():
            answer = table[prompt_id]
            keys = ("text", "finished", "tokens", "client_id")
            joined[name] = {key: answer[key] for key in keys if key in answer}
        rows.append(joined)
    write_json(run.evaluation / "answers.json", rows)


@task()
def measure_implicit_reward(run: Run, recipe: Recipe) -> AccuracyReport:
    """Accuracy of the aligned policy's implicit reward on held-out pairs.

    The implicit reward is that of DPO (Rafailov et al. 2023, section 4).

    Policies of clients' own are measured on their clients' pairs.
    """

    def measure() -> dict[str, Any]:
        policy = load_policy(run.alignment_result().policy, run.alignment)
        pairs = _evaluation_pairs(run, recipe, policy.clients)
        margins = policy.score_margins(pairs, open_workspace(run, recipe))
        return accuracy_report(PreferenceScores(margins[None, :]), pairs).model_dump(mode="json")

    return AccuracyReport.model_validate(stored(run.evaluation / "implicit-reward.json", measure))


def _evaluation_pairs(run: Run, recipe: Recipe, clients: Sequence[str] | None) -> list[PairRow]:
    """The held-out pairs of these clients (None: of all), or a seeded sample of them."""
    pairs = read_rows(run.prepared / "pairs.parquet", split="test")
    if clients is not None:
        pairs = [pair for pair in pairs if pair["client_id"] in clients]
    limit = recipe.evaluation.preference_pairs
    if limit >= len(pairs):
        return pairs
    sample = generator(recipe.seed, "preference pairs").choice(len(pairs), limit, replace=False)
    return [pairs[i] for i in sorted(sample)]
