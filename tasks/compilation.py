"""Whether a run compiles its selector's training step (runtime.compile).

The choice follows from the recipe, the devices and the installed compilers, never from a measurement,
and is stored with the run's recipe, because the last bits of a result depend on it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from components.config import Recipe
from components.models.compiled import missing_tool

log = logging.getLogger(__name__)


def can_compile(recipe: Recipe, devices: Sequence[str]) -> bool:
    """Whether a recipe's selector can be compiled here; if not, the reason is logged.

    Args:
        recipe: the recipe, which asks for it.
        devices: on which its clients train.
    """
    obstacle = _obstacle(recipe, devices)
    if obstacle is not None:
        log.warning("runtime.compile is true, but %s: the run does not compile", obstacle)
    return obstacle is None


def _obstacle(recipe: Recipe, devices: Sequence[str]) -> str | None:
    """Why a recipe's selectors cannot be compiled here; None if they can."""
    if not recipe.federation.options.has_compilable_step:
        return f"federation.method '{recipe.federation.method}' trains no selector"
    if recipe.selector.backbone.quantization != "none":
        return "selector.backbone.quantization is set, whose layers torch cannot compile"
    if len(devices) > 1:
        return (
            f"clients train on {len(devices)} devices at a time, and torch computes otherwise in a thread"
            " beside one that compiles"
        )
    return missing_tool(devices[0])
