"""Training steps of the selector and of DPO, in ways to compute them and in ways that threads wait.

Each way runs in a process of its own, so that it has a peak memory of its own. The share of the GEMM
rate is that of the step's matrix products and attention, against one large product in the same process.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from components.environment import SPIN
from perf.harness import (
    Ratios,
    alternate,
    compare,
    flop_counter,
    gemm_gigaflops,
    in_process,
    load_pairs,
    peak_mb,
    prepare_process,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from components.learning.loop import Accumulator
    from components.models.selector_model import Selector

CONCURRENT = "concurrent"
ONE_POSITION = "one-position"
TWO_ROWS = "two-rows"
FULL_LOGITS = "full-logits"
ONE_PART = "one-part"
ARMS = (CONCURRENT, ONE_POSITION, TWO_ROWS, FULL_LOGITS)
"""Steps that compute the last layer and two rows of the head at one position, in as many parts at a
time as a training does and in one; the rows of the head alone; and all logits."""
STEPS = 10
WARM_UP = 2
"""Steps that are not part of the median."""
WAITING = {
    "asleep": {"OMP_WAIT_POLICY": "PASSIVE"},
    "short-spin": SPIN,
    "long-spin": {"GOMP_SPINCOUNT": "300000"},
}
"""Threads that sleep at once, spin as the project sets, and spin as long as by libgomp's default."""


def compare_steps(recipe: str, repeats: int) -> Ratios:
    """A training step of the selector against the same step with all logits.

    Returns:
        the speed-ups, and the share of the GEMM rate that a training step reaches.
    """
    frame = alternate({arm: partial(in_process, time_step, recipe, arm) for arm in ARMS}, repeats)
    pairs = ((ONE_POSITION, CONCURRENT), (TWO_ROWS, ONE_POSITION), (FULL_LOGITS, ONE_POSITION))
    named = {f"selector_step/{fast}_against_{slow}".replace("-", "_"): (slow, fast) for slow, fast in pairs}
    share = frame[frame["name"] == CONCURRENT]["share of GEMM"].tolist()
    return {"selector_step/share_of_gemm": share} | compare(f"Selector step of {recipe}", frame, named)


def compare_dpo_steps(recipe: str, repeats: int) -> Ratios:
    """A step of DPO on the server: the parts of a micro-batch concurrently, and at once.

    Returns:
        the speed-up, and the share of the GEMM rate that a training step reaches.
    """
    arms = (CONCURRENT, ONE_PART)
    frame = alternate({arm: partial(in_process, time_dpo_step, recipe, arm) for arm in arms}, repeats)
    pairs = {"dpo_step/concurrent_against_one_part": (ONE_PART, CONCURRENT)}
    share = frame[frame["name"] == CONCURRENT]["share of GEMM"].tolist()
    return {"dpo_step/share_of_gemm": share} | compare(f"DPO step of {recipe}", frame, pairs)


def compare_waiting(recipe: str, repeats: int) -> Ratios:
    """A selector step by how threads wait for each other, alone and beside a busy process.

    A step in one part waits after every operation. A step in concurrent parts has one thread for
    each, and does not wait on two cores.

    Returns:
        how many times faster the project's setting is than each other one.
    """
    measured: Ratios = {}
    for arm in (ONE_POSITION, CONCURRENT):
        calls = {
            name: partial(in_process, time_step, recipe, arm, variables=variables)
            for name, variables in WAITING.items()
        }
        for place, load in (("alone", nullcontext), ("beside-a-busy-process", busy_process)):
            with load():
                frame = alternate(calls, repeats)
            names = {
                f"waiting/{arm}/{place}/short_spin_against_{name}": (name, "short-spin")
                for name in ("asleep", "long-spin")
            }
            measured |= compare(f"Selector step ({arm}) of {recipe}, {place}", frame, names)
    return measured


@contextmanager
def busy_process() -> Iterator[None]:
    """A process that uses one core."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def time_step(recipe_name: str, arm: str) -> dict[str, float]:
    """The cost of a training step of the selector; see step_cost."""
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
    rows = [selector.encode(SelectorComparison(p["prompt"], p["chosen"], p["rejected"])) for p in pairs]
    labels = torch.arange(len(rows), device=device) % 2

    class ArmLoss(Loss):
        def __call__(self, indices: Rows) -> RowLosses:
            own = [rows[i] for i in indices]
            losses = selector_loss(_arm_logits(selector, arm, own), labels[indices])
            return RowLosses(losses, indices, sum(map(len, own)))

    parts = concurrent_parts(torch.device(device)) if arm == CONCURRENT else 1
    return step_cost(Accumulator(ArmLoss(), selector.slot.parameters, None, parts), len(rows), device)


def time_dpo_step(recipe_name: str, arm: str) -> dict[str, float]:
    """The cost of a step of DPO on pairs of the recipe's source, without dropout; see step_cost."""
    import torch

    from components.alignment.dpo import TokenDpoLoss, prepare_model
    from components.concurrency import concurrent_parts
    from components.learning.loop import Accumulator
    from components.models.policy import Policy

    recipe, device = prepare_process(recipe_name)
    config = recipe.alignment.dpo.model_copy(update={"reference": "base"})
    policy = Policy(recipe.policy, device)
    model = prepare_model(policy, config, recipe.seed)
    pairs = load_pairs(recipe)[: config.batch_size]
    rows = [policy.encode_trained(pair["prompt"], pair["chosen"], pair["rejected"]) for pair in pairs]
    rows.sort(key=lambda row: sum(map(len, row)))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = TokenDpoLoss(policy, model, rows, config)
    parts = concurrent_parts(torch.device(device)) if arm == CONCURRENT else 1
    return step_cost(Accumulator(loss, parameters, config.micro_batch_size, parts), len(rows), device)


def step_cost(accumulator: Accumulator, rows: int, device: str) -> dict[str, float]:
    """The median seconds of a step on so many rows, its operations, and memory above the loaded model."""
    import numpy as np
    import torch

    def step(own: Accumulator) -> tuple[float, int]:
        start = time.perf_counter()
        _, tokens = own.add([np.arange(rows)], "of the benchmark")
        for parameter in own.parameters:
            parameter.grad = None
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - start, tokens

    before = 0.0 if device.startswith("cuda") else peak_mb()
    measured = [step(accumulator) for _ in range(STEPS)]
    peak = peak_mb(device) - before
    best = gemm_gigaflops(device)
    with flop_counter() as counter:  # it counts the operations of its own thread
        step(replace(accumulator, parts=1))
    gigaflops = counter.get_total_flops() / 1e9
    tokens = measured[0][1]
    median = statistics.median(seconds for seconds, _ in measured[WARM_UP:])
    return {
        "seconds": median,
        "rows": rows,
        "tokens": tokens,
        "tokens/s": tokens / median,
        "GFLOP": gigaflops,
        "share of GEMM": gigaflops / median / best,
        "peak MB": peak,
        "threads": torch.get_num_threads(),
    }


def _arm_logits(selector: Selector, arm: str, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits [N, 2] of the choices, computed as an arm does."""
    import torch

    from components.models.selector_model import choice_logits

    if arm in (CONCURRENT, ONE_POSITION):
        return selector.choice_logits(*selector.collate(rows))
    ids, last = selector.collate(rows)
    if arm == FULL_LOGITS:
        logits = selector.model(input_ids=ids, use_cache=False).logits
        return cast("torch.Tensor", logits[torch.arange(len(last)), last][:, list(selector.choices)])
    base = cast("PreTrainedModel", selector.model.get_base_model())
    return choice_logits(base, ids, last, selector.choices)
