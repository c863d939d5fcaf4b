"""Costs of a training step of the selector, and of the server's completions, in ways to compute them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING
from unittest import mock

from perf.harness import Ratios, alternate, compare, in_process, load_pairs, peak_mb, prepare_process

if TYPE_CHECKING:
    from components.config import Recipe
    from components.models.policy import Policy

CONCURRENT = "concurrent"
ONE_POSITION = "one-position"
WHOLE_LAYER = "whole-layer"
SEPARATE_LORA = "separate-lora"
ARMS = (CONCURRENT, ONE_POSITION, WHOLE_LAYER, SEPARATE_LORA)
"""Steps in as many parts at a time as a training has, in one, and in one without one of the faster ways to
compute a layer: the last one at one position alone, or LoRA and its layer in one function."""
STEPS = 10
WARM_UP = 2
"""Steps that are not part of the median."""


# --- a step of the selector


def compare_steps(recipe: str, repeats: int) -> Ratios:
    """A training step of the selector against the same step in slower ways; gives the speed-ups.

    Each way runs in a process of its own, so that it has a peak memory of its own.
    """
    frame = alternate({arm: partial(in_process, time_step, recipe, arm) for arm in ARMS}, repeats)
    pairs = ((ONE_POSITION, CONCURRENT), (WHOLE_LAYER, ONE_POSITION), (SEPARATE_LORA, ONE_POSITION))
    named = {f"selector_step/{fast}_against_{slow}".replace("-", "_"): (slow, fast) for slow, fast in pairs}
    return compare(f"Selector step of {recipe}", frame, named)


def time_step(recipe_name: str, arm: str) -> dict[str, float]:
    """The median seconds of a training step of the selector, and memory above the loaded model."""
    import numpy as np
    import torch

    from components.concurrency import concurrent_parts
    from components.learning.loop import Accumulator, Loss, RowLosses, Rows
    from components.learning.objectives import selector_loss
    from components.models.selector import Comparison as SelectorComparison
    from components.models.selector_model import Selector

    recipe, device = prepare_process(recipe_name)
    selector = Selector(recipe.selector, device)
    selector.slot.load(selector.slot.initial_adapter(recipe.seed))
    pairs = load_pairs(recipe)[: recipe.federation.batch_size]
    rows = [selector.encode(SelectorComparison(*pair.texts)) for pair in pairs]
    labels = torch.arange(len(rows), device=device) % 2

    class ArmLoss(Loss):
        def __call__(self, indices: Rows) -> RowLosses:
            own = [rows[i] for i in indices]
            losses = selector_loss(selector.choice_logits(*selector.collate(own)), labels[indices])
            return RowLosses(losses, sum(map(len, own)))

    selector.one_position &= arm != WHOLE_LAYER
    parts = concurrent_parts(torch.device(device)) if arm == CONCURRENT else 1
    accumulator = Accumulator(ArmLoss(), selector.slot.parameters, None, parts)
    separate = _patched("fused_lora._can_fuse", lambda *layer: False)
    before = 0.0 if device.startswith("cuda") else peak_mb()
    seconds, tokens = [], 0
    for _ in range(STEPS):
        start = time.perf_counter()
        with separate if arm == SEPARATE_LORA else nullcontext():
            _, tokens = accumulator.add([np.arange(len(rows))], "of the benchmark")
        for parameter in accumulator.parameters:
            parameter.grad = None
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[WARM_UP:])
    return {
        "seconds": median,
        "rows": len(rows),
        "tokens": tokens,
        "tokens/s": tokens / median,
        "peak MB": peak_mb(device) - before,
        "threads": torch.get_num_threads(),
    }


# --- completions


def compare_generation(recipe_name: str, repeats: int) -> Ratios:
    """A server's completions as the project samples them, and in slower ways; gives the speed-ups.

    These are batches of transformers' `generate`, whose products are by MKL, an adapter that is not
    merged, and where oneDNN is used, products by MKL.

    Raises:
        AssertionError: the completions differ.
    """
    from components.models.onednn import uses_onednn

    recipe, device = prepare_process(recipe_name)
    policy = _adapted_policy(recipe, device)
    texts = sorted({pair.prompt for pair in load_pairs(recipe)})
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


def _patched(name: str, replacement: Callable[..., object]) -> mock._patch[object]:
    """Let models use another function."""
    return mock.patch(f"components.models.{name}", replacement)
