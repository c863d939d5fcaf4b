"""Answers of the aligned and the base policy to held-out prompts, and the implicit reward."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from components.config import Recipe
from components.config.privacy import ClientPrivacy
from components.data.records import DataError, answer_id, choose_prompts, read_clients
from components.evaluation.accuracy import accuracy_report, count_uniformly
from components.federation.outcome import measure_jobs, rows_by_client
from components.federation.protocol import Generation
from components.federation.rounds import ask_clients
from components.io import read_json, stored, write_json
from components.learning.pair_scores import PairFigures
from components.models.adapters import read_adapter
from components.models.policy import assign_round_robin
from components.models.samples import Completion
from components.results import AccuracyReport
from components.seeding import derive, generator
from tasks.policies import EvaluatedPolicy, aligned_outcome, generate
from tasks.prefect_transport import (
    ask_after_rounds,
    exchange_contexts,
    outside_counts,
    outside_transport,
)
from tasks.runs import Run

BASE = "base"
ALIGNED = "aligned"


def evaluated_policies(run: Run) -> list[EvaluatedPolicy]:
    """The aligned and the base policy of a run."""
    aligned = aligned_outcome(run)
    return [EvaluatedPolicy(ALIGNED, run.alignment / aligned.folder, aligned), EvaluatedPolicy(BASE, None)]


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
    prompts = choose_prompts(run.prepared, "test", recipe.evaluation.prompts, recipe.seed)
    if limit is not None and limit < len(prompts):
        order = generator(recipe.seed, "fewer prompts").permutation(len(prompts))
        prompts = [prompts[i] for i in sorted(order[:limit])]
    count = recipe.evaluation.answers_per_prompt
    clients = assign_round_robin(len(prompts), policy.clients or [""])
    by_client = rows_by_client(clients)
    generations = {
        client: [
            Generation(
                prompts=tuple(prompts[n].prompt for n in own),
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
                "prompt_id": answer_id(row.prompt_id, number),
                "text": completion.text,
                "finished": completion.finished,
                "tokens": len(completion.ids),
            }
            rows.append(asdict(row) | ({"client_id": clients[n]} if clients[n] else {}) | own)
    return rows


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
    """Accuracy of the aligned policy on held-out pairs, by its implicit reward and by log-likelihood.

    The implicit reward is that of DPO (Rafailov et al. 2023, section 4). Each client measures its own
    pairs; with policies of their own, only those clients do.
    """

    def measure() -> dict[str, Any]:
        outcome = aligned_outcome(run)
        contexts = exchange_contexts(run, recipe)
        is_outside = isinstance(recipe.federation.privacy, ClientPrivacy)
        counts = {name: splits["test"] for name, splits in read_clients(run.prepared).items()}
        if is_outside:
            counts = outside_counts(run)
        if outcome.clients:
            counts = {name: counts[name] for name in outcome.clients}
        pairs = count_uniformly(counts, recipe.evaluation.preference_pairs, recipe.seed)
        if not pairs:
            raise DataError(
                "evaluation.preference_pairs needs test pairs of the clients whose policies are measured, and"
                " there are none: raise data.test, or set it to 0."
            )
        measured = recipe
        if outcome.is_aligned:
            adapter, lora = read_adapter(run.alignment / outcome.folder)
            digest = contexts.adapters.put(adapter)
            measured = recipe.model_copy(update={"policy": recipe.policy.model_copy(update={"lora": lora})})
            outcome = outcome.model_copy(update={"adapters": {"policy": digest}})
        size = recipe.evaluation.score_batch_size
        jobs = measure_jobs(outcome, "test", pairs, seed=recipe.seed, batch_size=size)
        quorum = recipe.federation.quorum
        if is_outside:
            with outside_transport(run, measured, contexts, jobs[0].trainer) as transport:
                updates, missing = ask_clients(jobs, transport, measured.federation, quorum)
            answers = {update.client: update.output for update in updates}
        else:
            answers, missing = ask_after_rounds(run, measured, jobs, quorum, contexts)
        figures = {
            name: PairFigures.model_validate(answer).model_copy(update={"reward": None})
            for name, answer in answers.items()
        }
        return accuracy_report(figures, missing).model_dump(mode="json")

    return AccuracyReport.model_validate(stored(run.evaluation / "implicit-reward.json", measure))
