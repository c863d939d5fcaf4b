"""Costs of the policy: ways to sample completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING
from unittest import mock

from perf.harness import Ratios, alternate, compare, load_pairs, prepare_process

if TYPE_CHECKING:
    from components.config import Recipe
    from components.models.policy import Policy


def compare_generation(recipe_name: str, repeats: int) -> Ratios:
    """A server's completions as the project samples them, and in slower ways.

    These are batches of transformers' `generate`, whose products are by MKL, an adapter that is not
    merged, and where oneDNN is used, products by MKL.

    Returns:
        the speed-ups.

    Raises:
        AssertionError: the completions differ.
    """
    from components.models.onednn import uses_onednn

    recipe, device = prepare_process(recipe_name)
    policy = _adapted_policy(recipe, device)
    texts = sorted({pair["prompt"] for pair in load_pairs(recipe)})
    prompts = texts[: recipe.policy.generation_batch_size]
    alignment = recipe.alignment
    answers: list[list[tuple[int, ...]]] = []

    def sample(patches: Sequence[AbstractContextManager[object]]) -> None:
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            samples = policy.generate(prompts, recipe.seed, alignment.temperature, alignment.completions)
        answers.append([sample.ids for row in samples for sample in row])

    batches = _patched("continuous_batch.supports_continuous_batch", lambda model: False)
    separate = _patched("merging.merged_adapter", lambda model: nullcontext())
    mkl = _patched("onednn.uses_onednn", lambda weight: False)
    ways: dict[str, list[AbstractContextManager[object]]] = {
        "continuous": [],
        "batches": [batches, mkl],
        "separate": [separate],
    }
    if uses_onednn(next(policy.model.parameters())):
        ways["mkl"] = [mkl]
    frame = alternate({name: partial(sample, patches) for name, patches in ways.items()}, repeats)
    if any(ids != answers[0] for ids in answers):
        raise AssertionError("all ways must give the same completions")
    frame["tokens/s"] = sum(map(len, answers[0])) / frame["seconds"]
    names = {
        "batches": "continuous_against_batches",
        "separate": "merged_against_separate",
        "mkl": "onednn_against_mkl",
    }
    pairs = {f"generation/{name}": (way, "continuous") for way, name in names.items() if way in ways}
    size = f"{len(prompts)} prompts, {alignment.completions} completions of each, {device}"
    return compare(f"Completions ({recipe_name}: {size})", frame, pairs)


def _adapted_policy(recipe: Recipe, device: str) -> Policy:
    """A policy whose adapter differs from the backbone in all its layers."""
    from components.models.adapters import AdapterSlot
    from components.models.policy import Policy

    policy = Policy(recipe.policy, device)
    slot = AdapterSlot(policy.attach_lora(recipe.policy.lora))
    slot.load({name: tensor + 0.001 for name, tensor in slot.initial_adapter(recipe.seed).items()})
    policy.model.eval()
    return policy


def _patched(name: str, replacement: Callable[[object], object]) -> mock._patch[object]:
    """Let generation use another function."""
    return mock.patch(f"components.models.{name}", replacement)
