"""Recipes with other values in a section, for tests that load no recipe of their own."""

from __future__ import annotations

from typing import Any

from components.config import Recipe


def with_section(recipe: Recipe, section: str, **values: Any) -> Recipe:
    """The recipe with other values in a section, which are not validated."""
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})
