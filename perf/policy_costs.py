"""Costs of the policy: ways to sample completions."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING
from unittest import mock

from perf.comparison import (
    Comparison,
    Ratios,
    format_seconds,
    format_speed_up,
    load_pairs,
    median_ratio,
    prepare_process,
)

if TYPE_CHECKING:
    from components.config import Recipe
    from components.models.policy import Policy


def compare_generation(comparison: Comparison) -> Ratios:
    """Print the times of a server's completions as the project samples them, and in two slower ways.

    These are batches of transformers' `generate`, and an adapter that is not merged.

    Returns:
        the speed-ups.

    Raises:
        AssertionError: the completions differ.
    """
    recipe, device = prepare_process(comparison.recipe)
    policy = _adapted_policy(recipe, device)
    texts = sorted({pair["prompt"] for pair in load_pairs(recipe)})
    prompts = texts[: 2 * recipe.policy.generation_batch_size]
    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "continuous": nullcontext,
        "batches": lambda: _patched("continuous_batch.supports_continuous_batch", lambda model: False),
        "separate": lambda: _patched("merging.merged_adapter", lambda model: nullcontext()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    answers = {}
    alignment = recipe.alignment
    for number in range(comparison.repeats):
        for name in ways if number % 2 else reversed(ways):
            start = time.perf_counter()
            with ways[name]():
                samples = policy.generate(prompts, recipe.seed, alignment.temperature, alignment.completions)
            seconds[name].append(time.perf_counter() - start)
            answers[name] = [sample.ids for row in samples for sample in row]
    if any(ids != answers["continuous"] for ids in answers.values()):
        raise AssertionError("all ways must give the same completions")
    tokens = sum(map(len, answers["continuous"]))
    print(
        f"\nCompletions ({comparison.recipe}: {len(prompts)} prompts, {alignment.completions} completions of"
        f" each, {tokens} tokens, {device})"
    )
    for name, times in seconds.items():
        print(f"  {name:<11} {format_seconds(times, 2)}, {tokens / min(times):.0f} tokens/s at best")
    for name in ("batches", "separate"):
        print(f"  continuous against {name}: {format_speed_up(seconds[name], seconds['continuous'])}")
    return {
        "generation/continuous_against_batches": median_ratio(seconds["batches"], seconds["continuous"]),
        "generation/merged_against_separate": median_ratio(seconds["separate"], seconds["continuous"]),
    }


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
