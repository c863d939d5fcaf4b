"""Costs of the policy: DPO by the packed trainer and by TRL's, and ways to sample completions."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from components.config import UserError
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
    from components.alignment.dpo_model import DpoPair
    from components.config import Recipe
    from components.models.policy import Policy


def compare_dpo_trainers(comparison: Comparison, micro_batches: int | None = None) -> Ratios:
    """Print the times of a DPO step of both trainers, on the same pairs and at the same size.

    Args:
        comparison: recipe and repeats.
        micro_batches: of a step; None takes the recipe's batch size.

    Returns:
        the speed-up of the packed trainer.
    """
    from components.alignment.dpo import TRAINERS

    recipe, device = prepare_process(comparison.recipe)
    if micro_batches is not None:
        recipe = _with_batch_size(recipe, micro_batches * recipe.alignment.dpo.micro_batch_size)
    pairs = _dpo_pairs(recipe, 3 * recipe.alignment.dpo.batch_size)
    seconds: dict[str, list[float]] = {name: [] for name in TRAINERS}
    for number in range(comparison.repeats):
        for name in TRAINERS if number % 2 else reversed(TRAINERS):
            seconds[name].append(_time_dpo_step(recipe, device, name, pairs))
    dpo = recipe.alignment.dpo
    print(
        f"\nDPO step on the server ({comparison.recipe}: {dpo.batch_size} pairs in micro-batches of"
        f" {dpo.micro_batch_size}, {device})"
    )
    for name, times in seconds.items():
        print(f"  {name:<8} {format_seconds(times, 2)}")
    print(f"  packed against trl: {format_speed_up(seconds['trl'], seconds['packed'])}")
    return {"dpo_step/packed_against_trl": median_ratio(seconds["trl"], seconds["packed"])}


def _with_batch_size(recipe: Recipe, pairs: int) -> Recipe:
    """The recipe with so many pairs per DPO step."""
    dpo = recipe.alignment.dpo.model_copy(update={"batch_size": pairs})
    return recipe.model_copy(update={"alignment": recipe.alignment.model_copy(update={"dpo": dpo})})


def _time_dpo_step(recipe: Recipe, device: str, trainer: str, pairs: list[DpoPair]) -> float:
    """Seconds of the second optimizer step of three."""
    from components.alignment.dpo import TRAINERS
    from components.models.policy import Policy

    ends: list[float] = []

    def progress(step: int, steps: int, metrics: Mapping[str, float]) -> None:
        ends.append(time.perf_counter())

    config = recipe.alignment.dpo.model_copy(update={"epochs": 1, "reference": "base"})
    with tempfile.TemporaryDirectory() as folder:
        TRAINERS[trainer](Policy(recipe.policy, device), pairs, config, Path(folder), recipe.seed, progress)
    return ends[1] - ends[0]  # the last step ends with a checkpoint


def _dpo_pairs(recipe: Recipe, count: int) -> list[DpoPair]:
    """Pairs of the recipe's source as a server has them: tokens of the recipe's longest answers.

    Raises:
        UserError: the source has fewer pairs.
    """
    from components.models.backbone import load_tokenizer

    tokenizer = load_tokenizer(recipe.policy.backbone)
    limit = recipe.policy.max_new_tokens

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids[:limit]

    pairs = load_pairs(recipe)[:count]
    if len(pairs) < count:
        raise UserError(
            f"data.source '{recipe.data.source}' has {len(pairs)} pairs: three DPO steps need {count}"
        )
    return [
        {
            "prompt": pair["prompt"],
            "chosen_ids": encode(pair["chosen"]),
            "rejected_ids": encode(pair["rejected"]),
        }
        for pair in pairs
    ]


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
        "batches": lambda: _patched("supports_slots", lambda model: False),
        "separate": lambda: _patched("merged_adapter", lambda model: nullcontext()),
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
    return mock.patch(f"components.models.generation.{name}", replacement)
