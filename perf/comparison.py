"""Shared by the benchmarks: the data of a recipe, options of a comparison, ratios of paired times."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.config import UserError

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

    from components.config import Recipe
    from components.data.records import PairRow

IDLE_LOAD = 0.5
"""Largest load average of the last minute beside which times are measured."""

Ratios = dict[str, float]
"""Median of paired ratios by name, such as `generation/merged_against_separate`; higher is better."""


@dataclass(frozen=True)
class Comparison:
    """What is compared, and how often.

    Attributes:
        recipe: name or path of the recipe.
        repeats: timed runs of each kind.
    """

    recipe: str
    repeats: int


def prepare_process(name: str) -> tuple[Recipe, str]:
    """A recipe and the first device that it may use, with the recipe's number of threads set."""
    from components.models.backbone import choose_devices
    from components.recipes import load_recipe
    from tasks.devices import set_threads

    recipe = load_recipe(name)
    set_threads(recipe.runtime)
    return recipe, choose_devices(recipe.runtime.devices)[0]


def load_pairs(recipe: Recipe) -> list[PairRow]:
    """The preference pairs of a recipe's source."""
    from components.data.sources import load
    from components.data.tables import pairs_frame

    source = load(recipe.data, recipe.seed)
    pairs: list[PairRow] = pairs_frame(source.pairs, recipe.data.source).to_dict("records")
    return pairs


def gemm_gigaflops(device: str, size: int = 2048, repeats: int = 5) -> float:
    """Rate of a square fp32 matrix product on a device, the best of several (10^9 per second)."""
    import torch

    matrix = torch.randn(size, size, device=device)
    seconds = []
    for _ in range(repeats + 1):  # the first one warms up
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return float(2 * size**3 / min(seconds[1:]) / 1e9)


def flop_counter() -> FlopCounterMode:
    """PyTorch's counter of floating-point operations, which does not know `addmm_` by itself."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    def count(result: Sequence[int], a: Sequence[int], b: Sequence[int], **_: object) -> int:
        return 2 * a[0] * a[1] * b[1]

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: count})


def check_load(limit: float = IDLE_LOAD) -> None:
    """Refuse to measure beside other work.

    Raises:
        UserError: the machine's load average of the last minute is above the limit.
    """
    load = os.getloadavg()[0]
    if load > limit:
        raise UserError(
            f"the load average is {load:.2f}, and times beside other work mislead: wait until it is below"
            f" {limit}, or use --beside-others"
        )


def format_seconds(seconds: Sequence[float], digits: int) -> str:
    """Times as text."""
    return ", ".join(f"{value:.{digits}f}" for value in seconds) + " s"


def paired_ratios(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    """How many times faster each run of the second kind is than its pair of the first."""
    return [numerator / denominator for numerator, denominator in zip(slow, fast, strict=True)]


def median_ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """The median of paired_ratios."""
    return statistics.median(paired_ratios(slow, fast))


def format_speed_up(slow: Sequence[float], fast: Sequence[float]) -> str:
    """The median ratio of paired times, and all of them."""
    ratios = paired_ratios(slow, fast)
    return f"speed-up {statistics.median(ratios):.2f}x (pairs: {', '.join(f'{r:.2f}' for r in ratios)})"
