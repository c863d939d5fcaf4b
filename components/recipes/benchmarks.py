"""Benchmarks by name or path: read from flows/benchmarks/, and checked as recipes are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path

from components.config import Recipe, RecipeError, check_section, unknown_name
from components.config.benchmark import OF_CONTESTS, Benchmark
from components.config.loading import Tree, read_yaml
from components.paths import is_file
from components.recipes import load_recipe
from components.recipes.load import RECIPES
from components.reporting.metrics import ALIASES, REWARD_ALIAS
from components.reporting.published import Line

BENCHMARKS = RECIPES.parent / "benchmarks"
NOT_REGISTERED = "tracking.registered_model=null"
"""Of all arms that do not name a model themselves: a benchmark compares many policies."""
ARM_CHARACTERS = 80
"""Of the name of a sweep's arm, which names folders."""


def benchmark_names() -> list[str]:
    """Names of the benchmarks of the package."""
    return sorted(path.stem for path in BENCHMARKS.glob("*.yaml"))


def load_benchmark(name_or_path: str, overrides: Sequence[str] = ()) -> Benchmark:
    """Read a benchmark by name or path, and check the recipe of each of its arms.

    Args:
        name_or_path: of a YAML file.
        overrides: 'key.path=value' settings of all arms on top of the recipe and of the benchmark's
            own settings, such as where the data are; an arm's own settings take precedence.

    Raises:
        RecipeError: there is none, or it or one of its recipes cannot be run.
    """
    benchmark = read_benchmark(name_or_path)
    for override in overrides:
        if override.partition("=")[0] in ("seed", "seeds"):
            own = f"write a file with 'like: {name_or_path}' and 'seeds: [0, 1]', and run it"
            way = own if name_or_path in benchmark_names() else f"set them in {name_or_path}"
            raise RecipeError(f"'{override}': the seeds of a benchmark are set in its file: {way}.")
    if overrides:
        arms = {name: [*overrides, *settings] for name, settings in benchmark.arms.items()}
        content = benchmark.model_dump(mode="json") | {"arms": arms}
        benchmark = check_section(Benchmark, content, name_or_path)
    recipes = {arm: _check_arm(benchmark, arm, name_or_path) for arm in benchmark.arms}
    _check_figures(benchmark, recipes, name_or_path)
    return benchmark


def plan_sweep(recipe: str, settings: Sequence[str]) -> Benchmark:
    """A benchmark of all combinations of the values of settings, an arm each.

    Args:
        recipe: name or path.
        settings: 'key.path=value' settings of all arms, and 'key.path=value,value' ones that are swept, in
            the order in which they are applied; a comma within brackets or quotes separates no values. Those
            of `seed` are the seeds, by default the recipe's own.

    Raises:
        RecipeError: no setting has several values, a key is named twice, or a recipe cannot be run.
    """
    chosen: dict[str, list[str]] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        values = list(dict.fromkeys(_split_values(text)))
        if not equals or not all(values):
            raise RecipeError(f"'{setting}': write it as KEY.PATH=VALUE or KEY.PATH=VALUE,VALUE.")
        if key in chosen:
            raise RecipeError(f"{key} is given twice: give it once, with all its values.")
        chosen[key] = values
    seeds = chosen.pop("seed", None) or [str(load_recipe(recipe).seed)]
    if not all(re.fullmatch("[0-9]+", seed) for seed in seeds):
        raise RecipeError(f"'seed={','.join(seeds)}': seeds are whole numbers, as in seed=0,1,2.")
    swept = [key for key, values in chosen.items() if len(values) > 1]
    if not swept and len(seeds) < 2:
        raise RecipeError(
            "no setting has several values: give one as KEY.PATH=VALUE,VALUE, or use `fed-rlhf run`."
        )
    names = _short_names(swept)
    arms: dict[str, list[str]] = {}
    for combination in product(*chosen.values()):
        values_of = dict(zip(chosen, combination, strict=True))
        words = "_".join(f"{names[key]}-{values_of[key]}" for key in swept)
        arm = name = re.sub(r"[^A-Za-z0-9_-]+", "_", words)[:ARM_CHARACTERS] or "recipe"
        number = 1
        while arm.casefold() in map(str.casefold, arms):
            number += 1
            arm = f"{name}-{number}"
        arms[arm] = [f"{key}={value}" for key, value in values_of.items()]
    where = f"the sweep of {recipe}"
    content = {"recipe": recipe, "seeds": [int(seed) for seed in seeds], "arms": arms}
    plan = check_section(Benchmark, content, where)
    for arm in plan.arms:
        _check_arm(plan, arm, where)
    return plan


def _split_values(text: str) -> list[str]:
    """The values of a setting, which commas outside of brackets and quotes separate."""
    values, start, depth, quote = [], 0, 0, ""
    for n, character in enumerate(text):
        before = text[start:n].rstrip()
        if quote:
            quote = "" if character == quote else quote  # '' within quotes ends them, and begins them again
        elif character in "\"'" and (not before or before[-1] in "[{,:" or before[-1] == character):
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth = max(depth - 1, 0)
        elif character == "," and depth == 0:
            values.append(before.strip())
            start = n + 1
    return [*values, text[start:].strip()]


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last parts of keys, as few as tell them apart."""
    names = {}
    for key in keys:
        parts = key.split(".")
        count = next(n for n in range(1, len(parts) + 1) if _has_own_end(parts[-n:], key, keys))
        names[key] = "-".join(parts[-count:])
    return names


def _has_own_end(end: Sequence[str], key: str, keys: Sequence[str]) -> bool:
    others = [other.split(".") for other in keys if other != key]
    return len(end) == len(key.split(".")) or not any(other[-len(end) :] == list(end) for other in others)


def arm_recipe(benchmark: Benchmark, arm: str, seed: int) -> Recipe:
    """The recipe of an arm and a seed.

    Raises:
        RecipeError: see load_recipe.
    """
    settings = [NOT_REGISTERED, *benchmark.settings, *benchmark.arms[arm], f"seed={seed}"]
    return load_recipe(benchmark.recipe, settings)


def _check_figures(benchmark: Benchmark, recipes: dict[str, Recipe], where: str) -> None:
    """Refuse unknown aliases (paths name metrics), and objectives that arms of a front or a claim lack."""
    for figure in (*(choice.figure for choice in benchmark.choices.values()), *benchmark.regressions):
        _check_figure(figure, tuple(ALIASES), where)
    sampling = {arm: recipe.federation.options.sampling for arm, recipe in recipes.items()}
    objectives = {arm: set(rewards.objectives) if rewards else set() for arm, rewards in sampling.items()}
    for name, arms in benchmark.fronts.items():
        if any(objectives[arm] != objectives[arms[0]] or not objectives[arm] for arm in arms):
            raise RecipeError(
                f"{where}: front '{name}' has arms without the same objectives"
                " (federation.options.objectives)."
            )
    for claim in benchmark.claims:
        if not claim.figure.startswith(REWARD_ALIAS):
            _check_figure(claim.figure, (*ALIASES, *OF_CONTESTS), where)
            continue
        objective = claim.figure.removeprefix(REWARD_ALIAS)
        for arm in (claim.arm, *claim.against):
            own = objectives.get(arm, set())
            if objective not in own:
                known = ", ".join(sorted(own)) or "none"
                raise RecipeError(
                    f"{where}: claim on {claim.figure} of {claim.arm}: '{arm}' has no such objective (it"
                    f" has: {known})."
                )


def _check_figure(name: str, known: Sequence[str], where: str) -> None:
    if "/" not in name and name not in known:
        raise RecipeError(f"{where}: {unknown_name('figure', name, known)}")


def _check_arm(benchmark: Benchmark, arm: str, where: str) -> Recipe:
    """The recipe of an arm; arms do not set seeds, so one seed is enough."""
    try:
        return arm_recipe(benchmark, arm, benchmark.seeds[0])
    except RecipeError as error:
        source = "settings" if _shared_settings_fail(benchmark, error) else f"arm {arm}"
        raise RecipeError(f"{where}: {source}: {error}") from None


def _shared_settings_fail(benchmark: Benchmark, error: RecipeError) -> bool:
    """Whether the settings of all arms are refused for the same reason as an arm."""
    try:
        load_recipe(benchmark.recipe, [NOT_REGISTERED, *benchmark.settings])
    except RecipeError as alone:
        return bool(benchmark.settings) and str(alone) == str(error)
    return False


def read_benchmark(name_or_path: str) -> Benchmark:
    """Read a benchmark without checking its recipes; those of a started one are in its folder.

    Raises:
        RecipeError: as load_benchmark.
    """
    candidates = (BENCHMARKS / f"{name_or_path}.yaml", Path(name_or_path))
    path = next((candidate for candidate in candidates if is_file(candidate)), None)
    if path is None:
        known = unknown_name("benchmark", name_or_path, benchmark_names())
        raise RecipeError(f"{known} A path to a YAML file works too.")
    tree = _read_tree(path)
    if "like" in tree:
        name = tree.pop("like")
        if name not in benchmark_names():
            raise RecipeError(f"{path}: {unknown_name('like', str(name), benchmark_names())}")
        base = _read_tree(BENCHMARKS / f"{name}.yaml")
        if "like" in base:
            raise RecipeError(f"{path}: like '{name}', which is itself like '{base['like']}': name that one")
        tree = base | tree
    if isinstance(tree.get("arms"), dict):  # YAML reads a bare number as a number
        tree["arms"] = {str(name): settings for name, settings in tree["arms"].items()}
    return check_section(Benchmark, tree, str(path))


def _read_tree(path: Path) -> Tree:
    keys = ", ".join(("like", *Benchmark.model_fields))
    return read_yaml(path, f"a benchmark is a mapping with the keys {keys}")


def settings_of(benchmark: Benchmark, arm: str) -> list[str]:
    """The settings of an arm's runs."""
    return [*benchmark.settings, *benchmark.arms[arm]]


def settings_of_contests(benchmark: Benchmark) -> dict[str, list[str]]:
    """The settings of the arms that are compared in contests."""
    return {arm: settings_of(benchmark, arm) for pair in benchmark.contests for arm in pair}


def select_lines(lines: Iterable[Line], benchmark: Benchmark) -> list[Line]:
    """The published lines of a benchmark's arms and seeds, without those of runs with other settings.

    components/reporting/published.py says what a line is.
    Settings that give the same recipe in another way are the same.
    """
    own_settings = {arm: settings_of(benchmark, arm) for arm in benchmark.arms}
    settings = own_settings | {"": settings_of_contests(benchmark)}  # contests between arms are of no arm

    @cache
    def is_same(arm: str, own: str) -> bool:
        """Whether settings, as JSON, are those of an arm."""
        if json.loads(own) == settings[arm]:
            return True
        if not arm:
            return False
        theirs = benchmark.model_copy(update={"settings": [], "arms": {arm: json.loads(own)}})
        try:
            return arm_recipe(theirs, arm, 0) == arm_recipe(benchmark, arm, 0)
        except RecipeError:  # of keys that a recipe does not have any more
            return False

    return [
        line
        for line in lines
        if line["seed"] in benchmark.seeds
        and line["arm"] in settings
        and is_same(line["arm"], json.dumps(line.get("settings", settings[line["arm"]])))
    ]
