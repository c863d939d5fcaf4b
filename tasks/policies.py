"""The selectors, the base policy and the aligned policy of a run, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from prefect import get_run_logger

from components.config import Recipe, RecipeError
from components.federation.outcome import (
    AlignedPolicy,
    Outcome,
    OutcomeError,
    SelectorEnsemble,
    load_outcome,
)
from components.federation.protocol import Generation
from components.io import DamagedFileError, file_hashes, verify_files
from components.models.generation import Completion
from components.models.policy import Policy
from components.models.store import AdapterHash
from components.progress import Work, progress
from components.results import AlignmentResult, OutcomeRecord
from tasks.devices import POOL, run_on_workers, server_workers
from tasks.prefect_transport import ask_after_rounds, rounds_contexts
from tasks.runs import Run
from tasks.uncached import task

if TYPE_CHECKING:
    from components.learning.pair_scores import Array
    from components.models.selector import Comparison

FINAL = "final"
"""Folder of the aligned policy, in the alignment's folder."""

Store = Callable[[str, int, list[list[Completion]]], None]
"""Called with a client, the number of one of its generations, and the completions of each prompt."""


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A policy that answers prompts and questions."""

    name: str  # for logs and files
    folder: Path | None  # its PEFT folder; None for the base policy
    record: OutcomeRecord | None = None  # None of a policy that all clients share in any case

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


def record_files(run: Run, result: AlignmentResult) -> AlignmentResult:
    """The result with the hashes of the policy's files, and of those of the checkpoints."""
    folders = [run.alignment / name for name in (result.policy.folder, *result.checkpoints)]
    files = {path for folder in folders for path in folder.rglob("*") if path.is_file()}
    return result.model_copy(update={"files": file_hashes(run.alignment, files)})


def aligned_outcome(run: Run) -> Outcome:
    """Whose model answers after the alignment; its record has the policy's folder.

    Raises:
        RecipeError: a file of the policy is missing or damaged.
    """
    result = run.alignment_result()
    try:
        verify_files(run.alignment, result.files)
    except DamagedFileError as error:
        raise RecipeError(
            f"{error}: delete {run.alignment} and, if it is there, {run.folder / 'align.done'}, and go on"
            f" with `{run.resume_command}`."
        ) from None
    if result.labelling is not None:  # otherwise the policy of the rounds was adopted
        return AlignedPolicy(result.policy)
    outcome = run.federation_result().outcome  # files of earlier versions repeat only a part of it
    return load_outcome(outcome.model_copy(update={"folder": result.policy.folder}))


def generate(
    run: Run,
    recipe: Recipe,
    policy: EvaluatedPolicy,
    generations: Mapping[str, Sequence[Generation]],
    task_name: str,
    store: Store,
) -> None:
    """Let a policy complete prompts, and store the completions of each generation.

    Args:
        generations: by client; under the empty name those of the policy that all clients share.
        task_name: of the tasks of a shared policy.
    """
    if policy.outcome is None or not policy.clients:
        for number, generation in enumerate(generations[""]):
            store("", number, generate_on_server(run, recipe, policy, generation, task_name))
        return
    outputs = ask_after_rounds(run, recipe, policy.outcome.generate_jobs(generations))
    for client, output in outputs.items():
        for number, texts in enumerate(cast("list[Any]", output)):
            store(client, number, [[_read(one) for one in samples] for samples in texts])


def generate_on_server(
    run: Run, recipe: Recipe, policy: EvaluatedPolicy, generation: Generation, task_name: str
) -> list[list[Completion]]:
    """Let a policy that all clients share complete prompts, a part of them by each worker."""
    count = len(generation.prompts)
    workers = server_workers(recipe.runtime, run.folder)
    parts = [range(n, count, workers) for n in range(min(workers, count))]
    common = {"recipe": recipe, "policy": policy, "generation": generation, "name": task_name}
    calls = [common | {"part": part} for part in parts]
    completions: list[list[Completion]] = [[] for _ in generation.prompts]
    answers = run_on_workers(generate_part, calls, recipe.runtime, run.folder)
    for part, own in zip(parts, answers, strict=True):
        for n, samples in zip(part, own, strict=True):
            completions[n] = samples
    return completions


@task(name="{name}: {policy.name}")
def generate_part(
    recipe: Recipe, policy: EvaluatedPolicy, generation: Generation, part: range, name: str
) -> list[list[Completion]]:
    """A policy's completions of a part of the prompts."""
    log = get_run_logger()

    def log_prompts(done: int, total: int) -> None:
        work = Work(f"completions of the {policy.name} policy", done, total)
        line = "%s, %s policy: %d of %d completions"
        log.info(line, name, policy.name, done, total, extra=progress(work))

    key = f"policy/{policy.folder}/{recipe.fingerprint('policy', 'alignment')}"
    with POOL.borrow_model(recipe.runtime, key, partial(policy.open, recipe)) as model:
        return generation.complete(model, log_prompts, part)


def _read(completion: dict[str, Any]) -> Completion:
    return Completion(tuple(completion["ids"]), completion["text"], completion["finished"])


def compare_by_selectors(run: Run, recipe: Recipe, comparisons: Sequence[Comparison]) -> Array:
    """Log-odds that the first completion is better, by each selector of the rounds, [U, N].

    Raises:
        OutcomeError: the rounds did not end with selectors.
    """
    outcome = load_outcome(run.federation_result().outcome)
    if not isinstance(outcome, SelectorEnsemble):
        raise OutcomeError(f"the outcome '{outcome.kind}' has no selectors that compare completions")
    workers = server_workers(recipe.runtime, run.folder)
    common = {"run": run, "recipe": recipe, "comparisons": comparisons}
    common["adapters"] = outcome.adapters_of("")
    calls = [common | {"share": (number, workers)} for number in range(workers)]
    shares = run_on_workers(compare_share, calls, recipe.runtime, run.folder)
    margins: Array = np.sum(shares, axis=0)
    return margins


@task(name="compare completions by selectors")
def compare_share(
    run: Run,
    recipe: Recipe,
    comparisons: Sequence[Comparison],
    adapters: Sequence[AdapterHash],
    share: tuple[int, int],
) -> Array:
    """A share of the margins of comparisons, see Selector.margins."""
    from components.learning.selector_training import compare
    from components.models.selector_model import BatchShare, Selector

    store = rounds_contexts(run).adapters
    key = f"selector/{recipe.fingerprint('selector')}"
    with POOL.borrow_model(recipe.runtime, key, partial(Selector, recipe.selector)) as selector:
        return compare(selector, comparisons, [store.get(digest) for digest in adapters], BatchShare(*share))
