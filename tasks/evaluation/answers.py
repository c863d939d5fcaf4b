"""Answers of the aligned and the base policy to held-out prompts, and the implicit reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import get_run_logger

from components.alignment.policies import PolicySet, load_policy, open_base_policy
from components.config import EvaluationConfig, Recipe
from components.data.records import PairRow, PromptRow, answer_id, choose_prompts, read_rows
from components.federation.outcome import Workspace
from components.io import read_json, write_json
from components.learning.preference_scores import PreferenceScores
from components.models.policy import GREEDY, Sampling
from components.progress import Work, progress
from components.results import AccuracyReport, PolicyRecord
from components.seeding import derive, generator
from tasks.devices import POOL
from tasks.uncached import task

BASE = "base"
ALIGNED = "aligned"


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A policy that answers prompts and questions.

    Attributes:
        name: for logs and files.
        record: how it is stored; None for the base policy.
        alignment: the alignment's folder, to which the record is relative.
    """

    name: str
    record: PolicyRecord | None
    alignment: Path

    def open(self, device: str, workspace: Workspace) -> PolicySet:
        """Load the policy on a device."""
        if self.record is None:
            return open_base_policy(workspace.recipe, device)
        return load_policy(self.record, self.alignment).open(device, workspace)


@task(name="answer prompts: {policy.name}")
def answer_prompts(
    policy: EvaluatedPolicy, workspace: Workspace, prepared: Path, path: Path, limit: int | None = None
) -> dict[str, float]:
    """Answers of a policy to the held-out prompts, stored as JSON, and read if they are stored.

    With several answers per prompt, both policies sample from the same random numbers.

    Args:
        policy: the policy.
        workspace: the run.
        prepared: the prepared data.
        path: written.
        limit: maximum number of the recipe's prompts (a seeded sample); None takes all.

    Returns:
        share of answers that ended by themselves, and mean length (tokens).
    """
    if not path.is_file():
        prompts = _evaluation_prompts(workspace.recipe, prepared, limit)
        write_json(path, _answer_rows(policy, workspace, prompts))
    rows = read_json(path)
    return {
        f"{policy.name}_finished_share": sum(row["finished"] for row in rows) / len(rows),
        f"{policy.name}_tokens": sum(row["tokens"] for row in rows) / len(rows),
    }


def _evaluation_prompts(recipe: Recipe, prepared: Path, limit: int | None) -> list[PromptRow]:
    """The recipe's held-out prompts, or a seeded sample of them."""
    prompts = choose_prompts(prepared, "test", recipe.evaluation.prompts, recipe.seed)
    if limit is None or limit >= len(prompts):
        return prompts
    order = generator(recipe.seed, "fewer prompts").permutation(len(prompts))
    return [prompts[i] for i in sorted(order[:limit])]


def _answer_rows(
    policy: EvaluatedPolicy, workspace: Workspace, prompts: Sequence[PromptRow]
) -> list[dict[str, Any]]:
    """The prompts with a policy's answers, and with the answering client where clients have own policies.

    There is a row for each answer; its prompt_id is that of the answer, see answer_id.
    """
    recipe = workspace.recipe
    log = get_run_logger()
    with POOL.borrow(recipe.runtime) as device:
        answers = policy.open(device, workspace).answer(
            [row["prompt"] for row in prompts],
            derive(recipe.seed, "answers"),
            lambda done, total: log.info(
                "%s policy: %d of %d answers",
                policy.name,
                done,
                total,
                extra=progress(Work(f"answers of the {policy.name} policy", done, total)),
            ),
            _sampling(recipe.evaluation),
        )
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


def _sampling(evaluation: EvaluationConfig) -> Sampling:
    count = evaluation.answers_per_prompt
    return GREEDY if count == 1 else Sampling(count, evaluation.answer_temperature)


def join_answers(answers: dict[str, Path], path: Path) -> None:
    """Write the answers of several policies to the same prompts side by side.

    Raises:
        ValueError: the policies answered different prompts.
    """
    tables = {name: {row["prompt_id"]: row for row in read_json(file)} for name, file in answers.items()}
    first = next(iter(tables.values()))
    if any(set(table) != set(first) for table in tables.values()):
        files = ", ".join(map(str, answers.values()))
        raise ValueError(f"{files}: expected answers to the same prompts; delete them and resume the run")
    rows = []
    for prompt_id, row in first.items():
        joined = {key: row[key] for key in ("prompt_id", "prompt", "references", "split")}
        for name, table in tables.items():
            answer = table[prompt_id]
            keys = ("text", "finished", "tokens", "client_id")
            joined[name] = {key: answer[key] for key in keys if key in answer}
        rows.append(joined)
    write_json(path, rows)


@task()
def measure_implicit_reward(
    record: PolicyRecord, alignment: Path, workspace: Workspace, path: Path
) -> AccuracyReport:
    """Accuracy of the aligned policy's implicit reward on held-out pairs.

    The implicit reward is that of DPO (Rafailov et al. 2023, section 4).

    Policies of clients' own are measured on their clients' pairs.
    """
    from components.evaluation.accuracy import accuracy_report

    if path.is_file():
        return AccuracyReport.model_validate_json(path.read_bytes())
    policy = load_policy(record, alignment)
    pairs = _evaluation_pairs(workspace, policy.clients)
    margins = policy.score_margins(pairs, workspace)
    report = accuracy_report(PreferenceScores(margins[None, :]), pairs)
    write_json(path, report.model_dump(mode="json"))
    return report


def _evaluation_pairs(workspace: Workspace, clients: list[str] | None) -> list[PairRow]:
    """The held-out pairs of these clients (None: of all), or a seeded sample of them."""
    recipe = workspace.recipe
    pairs = list(read_rows(workspace.contexts.pairs, split="test").to_list())
    if clients is not None:
        pairs = [pair for pair in pairs if pair["client_id"] in clients]
    limit = recipe.evaluation.preference_pairs
    if limit >= len(pairs):
        return pairs
    sample = generator(recipe.seed, "preference pairs").choice(len(pairs), limit, replace=False)
    return [pairs[i] for i in sorted(sample)]
