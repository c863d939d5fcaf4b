"""Costs of the policy: DPO by the packed trainer and by TRL's, and answers with a merged adapter."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from components.config import UserError
from perf.comparison import Comparison, format_seconds, format_speed_up, load_pairs, prepare_process

if TYPE_CHECKING:
    from components.alignment.dpo_model import DpoPair
    from components.config import Recipe
    from components.models.policy import Policy


def compare_dpo_trainers(comparison: Comparison) -> None:
    """Print the times of a DPO step of both trainers, on the same pairs and at the same size."""
    from components.alignment.dpo import TRAINERS

    recipe, device = prepare_process(comparison.recipe)
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


def compare_generation(comparison: Comparison) -> None:
    """Print the times of a batch of answers with a merged and with a separate adapter.

    Raises:
        AssertionError: the answers differ.
    """
    recipe, device = prepare_process(comparison.recipe)
    policy = _adapted_policy(recipe, device)
    prompts = [pair["prompt"] for pair in load_pairs(recipe)[: recipe.policy.generation_batch_size]]
    seconds: dict[str, list[float]] = {"merged": [], "separate": []}
    answers = {}
    for number in range(comparison.repeats + 1):
        for name in seconds if number % 2 else reversed(seconds):
            start = time.perf_counter()
            with nullcontext() if name == "merged" else _separate_adapter():
                completions = policy.generate(prompts, recipe.seed, recipe.alignment.temperature)
            if number:  # the first time warms up
                seconds[name].append(time.perf_counter() - start)
            answers[name] = [completion.ids for (completion,) in completions]
    if answers["merged"] != answers["separate"]:
        raise AssertionError("both adapters must give the same answers")
    tokens = sum(map(len, answers["merged"]))
    print(f"\nAnswers ({comparison.recipe}: {len(prompts)} prompts, {tokens} tokens, {device})")
    for name, times in seconds.items():
        print(f"  {name:<10} {format_seconds(times, 2)}, {tokens / min(times):.0f} tokens/s at best")
    print(f"  merged against separate: {format_speed_up(seconds['separate'], seconds['merged'])}")


def _adapted_policy(recipe: Recipe, device: str) -> Policy:
    """A policy whose adapter differs from the backbone in all its layers."""
    from components.models.adapters import AdapterSlot
    from components.models.policy import Policy

    policy = Policy(recipe.policy, device)
    slot = AdapterSlot(policy.attach_lora(recipe.policy.lora))
    slot.load({name: tensor + 0.001 for name, tensor in slot.initial_adapter(recipe.seed).items()})
    policy.model.eval()
    return policy


def _separate_adapter() -> mock._patch[object]:
    """Let generation use the adapter beside the backbone's weights."""
    return mock.patch("components.models.policy.merged_adapter", lambda model: nullcontext())
