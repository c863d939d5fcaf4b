"""Recipes by name or path, with 'key.path=value' overrides, checked down to the last option.

`components.config` has the models of the sections, components/recipes/checks.py what concerns several.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from components.config import (
    Recipe,
    RecipeError,
    check_section,
    unknown_name,
)
from components.config.loading import Tree, apply_overrides, dump_yaml, leaves, merge, origin_of, read_yaml
from components.config.section import describe_type, section_model
from components.data.records import DataError
from components.paths import PACKAGE, is_file
from components.recipes.checks import check_sections

RECIPES = PACKAGE / "flows" / "recipes"
STORED = re.compile(r"name: (.*)\n(?s:.*?)\nfederation:\n  method: (.*)\n")
"""The name and the method in what dump_recipe writes."""


def recipe_names() -> list[str]:
    """Names of the recipes of the package, e.g. 'summarization/demo'."""
    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))


def load_recipe(name_or_path: str, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe, apply overrides, and check it.

    Args:
        name_or_path: name of a recipe of the package, or path of a YAML file.
        overrides: 'key.path=value' settings.

    Raises:
        RecipeError: one line for each error, with key, value, what is allowed, and the nearest
            valid key.
    """
    return load_with_origins(name_or_path, overrides)[0]


def load_with_origins(name_or_path: str, overrides: Iterable[str] = ()) -> tuple[Recipe, dict[str, str]]:
    """A recipe as `load_recipe` gives it, and where its values come from.

    Returns:
        the recipe, and by dotted key the file or the override that sets it; all others are defaults.

    Raises:
        RecipeError: see load_recipe; a line on a value names the file or the override that sets it.
    """
    path = find_recipe(name_or_path)
    tree, origins = _read_tree(path)
    overrides = list(overrides)
    apply_overrides(tree, overrides)
    for key in (override.partition("=")[0] for override in overrides):
        origins = {name: of for name, of in origins.items() if not name.startswith(f"{key}.")}
        origins[key] = f"override '{key}'"
    try:
        return parse_recipe(tree, str(path)), origins
    except RecipeError as error:
        lines = [_with_origin(line, str(path), origins) for line in str(error).splitlines()]
        raise RecipeError("\n".join(lines)) from None


def _read_tree(path: Path, extending: Sequence[Path] = ()) -> tuple[Tree, dict[str, str]]:
    """The values of a recipe's file and of those that it extends, and the file of each by dotted key."""
    sections = ", ".join(Recipe.model_fields)
    tree = read_yaml(path, f"a recipe is a mapping of sections ({sections})")
    base = tree.pop("extends", None)
    origins = {key: str(path) for key, _ in leaves(tree)}
    if base is None:
        return tree, origins
    chain = [*extending, path.resolve()]
    if not isinstance(base, str):
        raise RecipeError(f"{path}: extends is {describe_type(base)}, but names one recipe, or its file.")
    beside = path.parent / base
    found = beside if is_file(beside) else find_recipe(base)
    if found.resolve() in chain:
        names = " extends ".join(str(one) for one in [*chain, found.resolve()])
        raise RecipeError(f"{path}: a recipe extends itself ({names}): leave out one 'extends'.")
    base_tree, base_origins = _read_tree(found, chain)
    merged = merge(base_tree, tree)
    kept = {key for key, _ in leaves(merged)}
    return merged, {key: of for key, of in (base_origins | origins).items() if key in kept}


def _with_origin(line: str, path: str, origins: Mapping[str, str]) -> str:
    """A line of an error, which begins with the file or the override that sets its key."""
    sentence = line.removeprefix(f"{path}: ")
    named = re.match(r"(?:unknown )?key '([^']+)'|([a-z_]+(?:[.\[][\w\]-]+)+)", sentence)
    origin = named and origin_of(named[1] or named[2], origins)
    return f"{origin}: {sentence}" if origin and sentence != line else line


def read_settings(name_or_path: str, *keys: str) -> list[Any]:
    """Values of a valid recipe by their dotted keys, without its check, which imports what it names."""
    tree, _ = _read_tree(find_recipe(name_or_path))
    return [_setting(tree, key) for key in keys]


def _setting(tree: Mapping[str, Any], key: str) -> Any:
    """A value of a tree, or its default."""
    *sections, last = key.split(".")
    model: type[BaseModel] | None = Recipe
    for section in sections:
        tree = tree.get(section) or {}
        model = model and section_model(model.model_fields[section].annotation)
    return tree[last] if last in tree else model and model.model_fields[last].default


def find_recipe(name_or_path: str) -> Path:
    """The file of a recipe.

    Raises:
        RecipeError: there is none; names the nearest.
    """
    for candidate in (RECIPES / f"{name_or_path}.yaml", Path(name_or_path)):
        if is_file(candidate):
            return candidate
    raise RecipeError(
        f"{unknown_name('recipe', name_or_path, recipe_names())} A path to a YAML file works too."
    )


def parse_recipe(tree: Mapping[str, Any], where: str) -> Recipe:
    """Check a recipe that has been read already.

    Args:
        tree: its sections.
        where: the file that it comes from, for messages.

    Raises:
        RecipeError: as load_recipe.
    """
    recipe = check_section(Recipe, _resolve_judge_reward(tree, where), where)
    if recipe.data.pooled:  # the only client takes the steps of all clients of a round
        config = recipe.federation
        update = {"clients_per_round": 1, "local_steps": config.clients_per_round * config.local_steps}
        recipe = recipe.model_copy(update={"federation": config.model_copy(update=update)})
    try:
        check_sections(recipe)
    except (RecipeError, DataError) as error:
        message = "\n".join(
            line if line.startswith(f"{where}: ") else f"{where}: {line}" for line in str(error).splitlines()
        )
        raise RecipeError(message) from None
    return recipe


def _resolve_judge_reward(tree: Mapping[str, Any], where: str) -> Tree:
    """The sections with the named reward in place of its name in evaluation.judge.reward."""
    evaluation = tree.get("evaluation")
    judge = evaluation.get("judge") if isinstance(evaluation, Mapping) else None
    if (
        not isinstance(judge, Mapping)
        or judge.get("kind") != "reward"
        or not isinstance(judge.get("reward"), str)
    ):
        return dict(tree)
    name = judge["reward"]
    rewards = tree.get("rewards") or {}
    if name not in rewards:
        known = unknown_name("evaluation.judge.reward", name, rewards)
        raise RecipeError(f"{where}: {known} A section such as those under rewards works too.")
    resolved = {**judge, "reward": rewards[name]}
    return {**tree, "evaluation": {**dict(evaluation or {}), "judge": resolved}}


def dump_recipe(recipe: Recipe) -> str:
    """The whole recipe as YAML, with defaults."""
    return dump_yaml(recipe.model_dump(mode="json"))


def name_and_method(path: Path) -> tuple[str, str]:
    """The name and the method of a recipe that dump_recipe wrote, of another version too, without its check.

    Raises:
        RecipeError: the file has none.
    """
    try:
        stored = STORED.match(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from None
    if stored is None:
        raise RecipeError(f"{path} is no recipe of a run: it names no method.")
    name, method = (re.sub(r"^'(.*)'$", r"\1", text).replace("''", "'") for text in stored.groups())
    return name, method
