"""Costs of the selector: its training step at the answer slot, and several selectors in one batch."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from components.paths import PACKAGE
from perf.comparison import (
    Comparison,
    Ratios,
    flop_counter,
    format_speed_up,
    gemm_gigaflops,
    load_pairs,
    median_ratio,
    prepare_process,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from components.models.selector_model import Selector

CONCURRENT = "concurrent"
ONE_POSITION = "one-position"
TWO_ROWS = "two-rows"
FULL_LOGITS = "full-logits"
ARMS = (CONCURRENT, ONE_POSITION, TWO_ROWS, FULL_LOGITS)
"""Steps that compute the last layer and two rows of the head at one position, in as many parts at a
time as a training does and in one; the rows of the head alone; and all logits."""
STEPS = 10
WARM_UP = 2
"""Steps that are not part of the median."""


@dataclass(frozen=True)
class StepCost:
    """Cost of a training step.

    Attributes:
        seconds: median.
        peak_mb: peak memory above that of the loaded model (MB).
        rows: rows of the step.
        tokens: tokens of the step.
        gigaflops: 10^9 floating-point operations of the step, of matrix products and attention.
        peak_gigaflops: rate of a large fp32 matrix product in the same process (10^9 per second).
        threads: threads of a CPU operation.
        device: where it ran.
    """

    seconds: float
    peak_mb: float
    rows: int
    tokens: int
    gigaflops: float
    peak_gigaflops: float
    threads: int
    device: str


def compare_steps(comparison: Comparison) -> Ratios:
    """Print the table of the selector's training step against the step with all logits.

    Returns:
        the speed-ups, and the share of the GEMM rate that a training step reaches.
    """
    costs: dict[str, list[StepCost]] = {arm: [] for arm in ARMS}
    for _ in range(comparison.repeats):
        for arm in ARMS:
            costs[arm].append(measure_arm(comparison.recipe, arm))
    shape = costs[ONE_POSITION][0]
    print(
        f"\nSelector training step ({comparison.recipe}: {shape.rows} rows, {shape.tokens} tokens,"
        f" {shape.threads} threads, {shape.device}), median of {comparison.repeats}"
    )
    columns = f"{'s/step':>10}{'tokens/s':>12}{'GFLOP/s':>12}{'of GEMM':>10}"
    print(f"  {'':<14}{columns}{'peak MB above the loaded model':>34}")
    for arm in ARMS:
        seconds = statistics.median(cost.seconds for cost in costs[arm])
        rate = statistics.median(cost.gigaflops / cost.seconds for cost in costs[arm])
        share = _share_of_gemm(costs[arm])
        peak = statistics.median(cost.peak_mb for cost in costs[arm])
        figures = f"{seconds:>10.3f}{shape.tokens / seconds:>12.0f}{rate:>12.0f}{share:>10.0%}"
        print(f"  {arm:<14}{figures}{peak:>34.0f}")
    times = {arm: [cost.seconds for cost in costs[arm]] for arm in ARMS}
    ratios = {"selector_step/share_of_gemm": _share_of_gemm(costs[CONCURRENT])}
    for fast, slow in ((CONCURRENT, ONE_POSITION), (ONE_POSITION, TWO_ROWS), (ONE_POSITION, FULL_LOGITS)):
        print(f"  {fast} against {slow}: {format_speed_up(times[slow], times[fast])}")
        name = f"selector_step/{fast}_against_{slow}".replace("-", "_")
        ratios[name] = median_ratio(times[slow], times[fast])
    return ratios


def _share_of_gemm(costs: Sequence[StepCost]) -> float:
    return statistics.median(cost.gigaflops / cost.seconds / cost.peak_gigaflops for cost in costs)


def measure_arm(recipe: str, arm: str, variables: Mapping[str, str] | None = None) -> StepCost:
    """Run time_step in a process of its own, with more environment variables."""
    done = subprocess.run(
        [sys.executable, "-m", "perf.costs", "--recipe", recipe, "--arm", arm],
        cwd=PACKAGE,
        env=os.environ | (variables or {}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return StepCost(**json.loads(done.stdout.splitlines()[-1]))


def time_step(recipe_name: str, arm: str) -> dict[str, Any]:
    """The fields of a StepCost, measured in this process."""
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
    rows = [selector.encode(SelectorComparison(p["prompt"], p["chosen"], p["rejected"])) for p in pairs]
    labels = torch.arange(len(rows), device=device) % 2
    before = _resident_mb()

    class ArmLoss(Loss):
        def __call__(self, indices: Rows) -> RowLosses:
            own = [rows[i] for i in indices]
            losses = selector_loss(_arm_logits(selector, arm, own), labels[indices])
            return RowLosses(losses, indices, sum(map(len, own)))

    def step(parts: int) -> None:
        accumulator = Accumulator(ArmLoss(), selector.slot.parameters, None, parts)
        accumulator.add([np.arange(len(rows))], f"of {arm}")
        selector.model.zero_grad()
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    parts = concurrent_parts(torch.device(device)) if arm == CONCURRENT else 1
    seconds = [_time(partial(step, parts)) for _ in range(STEPS)]
    if device.startswith("cuda"):
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        peak = _resident_mb() - before
    peak_gigaflops = gemm_gigaflops(device)
    with flop_counter() as counter:  # it counts the operations of its own thread
        step(parts=1)
    cost = StepCost(
        seconds=statistics.median(seconds[WARM_UP:]),
        peak_mb=peak,
        rows=len(rows),
        tokens=sum(map(len, rows)),
        gigaflops=counter.get_total_flops() / 1e9,
        peak_gigaflops=peak_gigaflops,
        threads=torch.get_num_threads(),
        device=device,
    )
    return asdict(cost)


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


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _resident_mb() -> float:
    """Largest resident set of this process so far (MB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
