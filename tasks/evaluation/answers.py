"""Answers of the aligned and the base policy to held-out prompts, and the implicit reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.config import Recipe
from components.data.records import DataError, PromptRow, answer_id, choose_prompts, read_clients
from components.evaluation.accuracy import accuracy_report, sample_pairs
from components.federation.outcome import AlignedPolicy, rows_by_client
from components.federation.protocol import Generation
from components.io import read_json, stored, write_json
from components.learning.pair_scores import PairFigures
from components.models.adapters import read_adapter
from components.models.generation import Completion
from components.models.policy import assign_round_robin
from components.results import AccuracyReport
from components.seeding import derive, generator
from tasks.policies import EvaluatedPolicy, aligned_outcome, generate
from tasks.prefect_transport import ask_after_rounds, exchange_contexts
from tasks.runs import Run

BASE = "base"
ALIGNED = "aligned"


def evaluated_policies(run: Run) -> list[EvaluatedPolicy]:
    """The aligned and the base policy of a run."""
    aligned = aligned_outcome(run)
    folder = run.alignment / aligned.record.folder
    return [EvaluatedPolicy(ALIGNED, folder, aligned.record), EvaluatedPolicy(BASE, None)]


def answer_prompts(run: Run, recipe: Recipe, policy: EvaluatedPolicy, limit: int | None = None) -> None:
    """Write a policy's answers to the held-out prompts, unless they are there: answers-<policy>.json.

    With several answers per prompt, both policies sample from the same random numbers. Clients with
    policies of their own take the prompts round-robin.

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
    count = recipe.evaluation.answers_per_prompt
    clients = assign_round_robin(len(prompts), policy.clients or [""])
    by_client = rows_by_client(clients)
    generations = {
        client: [
            Generation(
                prompts=tuple(prompts[n]["prompt"] for n in own),
                seed=derive(recipe.seed, "answers"),
                temperature=0.0 if count == 1 else recipe.evaluation.answer_temperature,
                count=count,
            )
        ]
        for client, own in by_client.items()
    }
    samples: dict[int, list[Completion]] = {}

    def store(client: str, number: int, completions: list[list[Completion]]) -> None:
        samples.update(zip(by_client[client], completions, strict=True))

    generate(run, recipe, policy, generations, "answer prompts", store)
    rows = []
    for n, row in enumerate(prompts):
        for number, completion in enumerate(samples[n]):
            own = {
                "prompt_id": answer_id(row["prompt_id"], number),
                "text": completion.text,
                "finished": completion.finished,
                "tokens": len(completion.ids),
            }
            rows.append(row | ({"client_id": clients[n]} if clients[n] else {}) | own)
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


def measure_implicit_reward(run: Run, recipe: Recipe) -> AccuracyReport:
    """Accuracy of the aligned policy's implicit reward on held-out pairs.

    The implicit reward is that of DPO (Rafailov et al. 2023, section 4). Each client measures its own
    pairs; with policies of their own, only those clients do.
    """

    def measure() -> dict[str, Any]:
        outcome = aligned_outcome(run)
        contexts = exchange_contexts(run, recipe)
        counts = {name: splits["test"] for name, splits in read_clients(run.prepared).items()}
        if outcome.clients:
            counts = {name: counts[name] for name in outcome.clients}
        positions = sample_pairs(counts, recipe.evaluation.preference_pairs, recipe.seed)
        if not positions:
            raise DataError(
                "evaluation.preference_pairs needs test pairs of the clients whose policies are measured, and"
                " there are none: raise data.test, or set it to 0."
            )
        measured = recipe
        if not outcome.record.adapters:  # the server has aligned it
            adapter, lora = read_adapter(run.alignment / outcome.record.folder)
            digest = contexts.adapters.put(adapter)
            measured = recipe.model_copy(update={"policy": recipe.policy.model_copy(update={"lora": lora})})
            outcome = AlignedPolicy(outcome.record.model_copy(update={"adapters": {"policy": digest}}))
        jobs = outcome.measure_jobs("test", positions, batch_size=recipe.evaluation.score_batch_size)
        figures = {
            name: PairFigures.model_validate(answer).model_copy(update={"reward": None, "by_metric": {}})
            for name, answer in ask_after_rounds(run, measured, jobs, contexts).items()
        }
        return accuracy_report(figures).model_dump(mode="json")

    return AccuracyReport.model_validate(stored(run.evaluation / "implicit-reward.json", measure))
