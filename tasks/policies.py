"""The selectors, the base policy and the aligned policy of a run, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from prefect import get_run_logger

from components.config import Recipe, RecipeError, UserError
from components.federation.method import Method
from components.federation.outcome import generate_jobs
from components.federation.protocol import Generation
from components.io import DamagedFileError, file_hashes, verify_files
from components.models.policy import Policy
from components.models.samples import Completion
from components.models.store import AdapterHash
from components.progress import Work, progress
from components.results import AlignmentResult, Outcome
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
    outcome: Outcome = field(default_factory=Outcome)  # without adapters, of one that all clients share

    @property
    def clients(self) -> list[str]:
        """The clients with policies of their own; empty where all share one."""
        return self.outcome.clients

    def open(self, recipe: Recipe, device: str) -> Policy:
        """Load a shared policy on a device.

        The base policy samples completions, and is what aligned answers are compared with. It is the
        backbone, with DPO's reference adapter where the recipe has one and the server aligns.
        """
        folder = recipe.base_adapter if self.folder is None else self.folder
        return Policy(recipe.policy, device, None if folder is None else Path(folder))


def record_files(run: Run, result: AlignmentResult) -> AlignmentResult:
    """The result with the hashes of the policy's files, and of those of the checkpoints."""
    folders = [run.alignment / name for name in (result.policy.folder, *result.checkpoints)]
    files = {path for folder in folders for path in folder.rglob("*") if path.is_file()}
    return result.model_copy(update={"files": file_hashes(run.alignment, files)})


def aligned_outcome(run: Run) -> Outcome:
    """Whose model answers after the alignment; it has the policy's folder.

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
        return result.policy
    outcome = run.federation_result().outcome  # files of earlier versions repeat only a part of it
    return outcome.model_copy(update={"folder": result.policy.folder})


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
    if not policy.clients:
        for number, generation in enumerate(generations[""]):
            store("", number, generate_on_server(run, recipe, policy, generation, task_name))
        return
    outputs, _ = ask_after_rounds(run, recipe, generate_jobs(policy.outcome, generations), quorum=1)
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


def _read(completion: Mapping[str, Any]) -> Completion:
    return Completion(tuple(completion["ids"]), completion["text"], completion["finished"])


def compare_by_selectors(run: Run, recipe: Recipe, comparisons: Sequence[Comparison]) -> Array:
    """Log-odds that the first completion is better, by each selector of the rounds, [U, N].

    Raises:
        UserError: the rounds did not end with selectors.
    """
    outcome = run.federation_result().outcome
    if not outcome.labels_pairs:
        raise UserError(f"the rounds of run {run.id} did not end with selectors, which compare completions")
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
    name = recipe.federation.options.selector_model
    build: type[Selector] = resolve_name(name)
    sections = ("selector",) if name == Method.selector_model else ("selector", "federation", "policy")
    key = f"selector/{name}/{recipe.fingerprint(*sections)}"
    with POOL.borrow_model(recipe.runtime, key, partial(build.of, recipe)) as selector:
        return compare(selector, comparisons, [store.get(digest) for digest in adapters], BatchShare(*share))
