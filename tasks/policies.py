"""The selectors, the base policy and the aligned policy of a run, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prefect import get_run_logger

from components.config import Recipe
from components.federation.outcome import (
    AlignedPolicy,
    Outcome,
    OutcomeError,
    SelectorEnsemble,
    load_outcome,
)
from components.federation.protocol import Generation
from components.models.generation import Completion
from components.models.policy import Policy
from components.progress import Work, progress
from components.results import OutcomeRecord
from tasks.devices import POOL
from tasks.runs import Run
from tasks.transport import ask_clients, rounds_contexts
from tasks.uncached import task

if TYPE_CHECKING:
    from components.learning.pair_scores import Array
    from components.models.selector import Comparison

FINAL = "final"
"""Folder of the aligned policy, in the alignment's folder."""

Answers = list[list[list[Completion]]]
"""Completions of each prompt of several generations."""


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A policy that answers prompts and questions."""

    name: str  # for logs and files
    folder: Path | None  # its PEFT folder; None for the base policy
    record: OutcomeRecord | None = None  # of the rounds, where clients have policies of their own

    @cached_property
    def outcome(self) -> Outcome | None:
        return None if self.record is None else load_outcome(self.record)

    @property
    def clients(self) -> list[str]:
        """The clients with policies of their own; empty where all share one."""
        return [] if self.outcome is None else self.outcome.clients

    def open(self, recipe: Recipe, device: str) -> Policy:
        """Load a shared policy on a device."""
        if self.folder is None:
            return open_base_policy(recipe, device)
        return Policy(recipe.policy, device, self.folder)


def open_base_policy(recipe: Recipe, device: str) -> Policy:
    """The policy before the alignment: it samples completions, and is what aligned answers are compared with.

    It is the backbone, with DPO's reference adapter where the recipe has one and the server aligns.
    """
    adapter = recipe.base_adapter
    return Policy(recipe.policy, device, None if adapter is None else Path(adapter))


def aligned_outcome(run: Run) -> Outcome:
    """Whose model answers after the alignment; its record has the policy's folder."""
    result = run.alignment_result()
    if result.labelling is not None:  # otherwise the policy of the rounds was adopted
        return AlignedPolicy(result.policy)
    outcome = run.federation_result().outcome
    return load_outcome(outcome.model_copy(update={"folder": result.policy.folder}))


def generate(
    run: Run,
    recipe: Recipe,
    policy: EvaluatedPolicy,
    generations: Mapping[str, Sequence[Generation]],
    task_name: str,
) -> dict[str, Answers]:
    """Completions by a policy.

    Args:
        generations: by client; under the empty name those of the policy that all clients share.
        task_name: of the task that loads a shared policy.
    """
    if policy.outcome is None or not policy.clients:
        named = generate_on_server.with_options(name=f"{task_name}: {policy.name}")
        return {"": named(recipe, policy, list(generations[""]))}
    answers = ask_clients(run, recipe, policy.outcome.generate_jobs(generations))
    return {client: _parse(cast("list[Any]", texts)) for client, texts in answers.items()}


@task()
def generate_on_server(recipe: Recipe, policy: EvaluatedPolicy, generations: list[Generation]) -> Answers:
    """Completions by a policy that all clients share."""
    log = get_run_logger()

    def log_answers(done: int, total: int) -> None:
        work = Work(f"answers of the {policy.name} policy", done, total)
        log.info("%s policy: %d of %d answers", policy.name, done, total, extra=progress(work))

    with POOL.borrow(recipe.runtime) as device:
        model = policy.open(recipe, device)
        return [generation.answer(model, log_answers) for generation in generations]


def _parse(texts: list[Any]) -> Answers:
    return [
        [
            [Completion(tuple(one["ids"]), one["text"], one["finished"]) for one in samples]
            for samples in answer
        ]
        for answer in texts
    ]


def compare_by_selectors(run: Run, recipe: Recipe, comparisons: Sequence[Comparison]) -> Array:
    """Log-odds that the first completion is better, by each selector of the rounds, [U, N].

    Raises:
        OutcomeError: the rounds did not end with selectors.
    """
    from components.learning.selector_training import compare
    from components.models.selector_model import Selector

    outcome = load_outcome(run.federation_result().outcome)
    if not isinstance(outcome, SelectorEnsemble):
        raise OutcomeError(f"the outcome '{outcome.kind}' has no selectors that compare completions")
    store = rounds_contexts(run).adapters
    with POOL.borrow(recipe.runtime) as device:
        selector = Selector(recipe.selector, device)
        return compare(selector, comparisons, [store.get(digest) for digest in outcome.adapters_of("")])
