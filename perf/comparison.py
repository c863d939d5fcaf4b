"""Shared by the benchmarks: the data of a recipe, options of a comparison, ratios of paired times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from components.config import Recipe
    from components.data.records import PairRow


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

    pairs: list[PairRow] = load(recipe.data, recipe.seed).pairs.to_list()
    return pairs


def format_seconds(seconds: Sequence[float], digits: int) -> str:
    """Times as text."""
    return ", ".join(f"{value:.{digits}f}" for value in seconds) + " s"


def format_speed_up(slow: Sequence[float], fast: Sequence[float]) -> str:
    """The median ratio of paired times, and all of them."""
    ratios = [numerator / denominator for numerator, denominator in zip(slow, fast, strict=True)]
    return f"speed-up {statistics.median(ratios):.2f}x (pairs: {', '.join(f'{r:.2f}' for r in ratios)})"
