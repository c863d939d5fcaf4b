"""Benchmarks by name or path: read from flows/benchmarks/, and checked as recipes are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.config import Recipe, RecipeError, check_section, unknown_name
from components.config.benchmark import WINS, Benchmark
from components.config.loading import read_yaml
from components.federation.method import method_of
from components.paths import is_file
from components.recipes import RECIPES, load_recipe
from components.reporting.metrics import ALIASES, REWARD_ALIAS

BENCHMARKS = RECIPES.parent / "benchmarks"
NOT_REGISTERED = "tracking.registered_model=null"
"""Of all arms that do not name a model themselves: a benchmark compares many policies."""


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
    if overrides:
        arms = {name: [*overrides, *settings] for name, settings in benchmark.arms.items()}
        content = benchmark.model_dump(mode="json") | {"arms": arms}
        benchmark = check_section(Benchmark, content, name_or_path)
    recipes = {arm: _check_arm(benchmark, arm, name_or_path) for arm in benchmark.arms}
    _check_figures(benchmark, name_or_path)
    _check_objectives(benchmark, recipes, name_or_path)
    return benchmark


def arm_recipe(benchmark: Benchmark, arm: str, seed: int) -> Recipe:
    """The recipe of an arm and a seed.

    Raises:
        RecipeError: see load_recipe.
    """
    settings = [NOT_REGISTERED, *benchmark.settings, *benchmark.arms[arm], f"seed={seed}"]
    return load_recipe(benchmark.recipe, settings)


def _check_figures(benchmark: Benchmark, where: str) -> None:
    """Refuse claims on, choices by and regressions of aliases that do not exist; paths name metrics."""
    for figure in (*(choice.figure for choice in benchmark.choices.values()), *benchmark.regressions):
        _check_figure(figure, tuple(ALIASES), where)
    for claim in benchmark.claims:
        if not claim.figure.startswith(REWARD_ALIAS):
            _check_figure(claim.figure, (*ALIASES, WINS), where)


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


def _check_objectives(benchmark: Benchmark, recipes: dict[str, Recipe], where: str) -> None:
    """Refuse fronts of different objectives, and claims on objectives that an arm lacks."""
    objectives = {arm: set(method_of(recipe.federation).preferences()) for arm, recipe in recipes.items()}
    for name, arms in benchmark.fronts.items():
        if any(objectives[arm] != objectives[arms[0]] or not objectives[arm] for arm in arms):
            raise RecipeError(
                f"{where}: front '{name}' has arms without the same objectives"
                " (federation.options.objectives)."
            )
    for claim in benchmark.claims:
        if not claim.figure.startswith(REWARD_ALIAS):
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
        tree = _read_like(tree.pop("like"), path) | tree
    if isinstance(tree.get("arms"), dict):  # YAML reads a bare number as a number
        tree["arms"] = {str(name): settings for name, settings in tree["arms"].items()}
    return check_section(Benchmark, tree, str(path))


def _read_tree(path: Path) -> dict[str, Any]:
    keys = ", ".join(("like", *Benchmark.model_fields))
    return read_yaml(path, f"a benchmark is a mapping with the keys {keys}")


def _read_like(name: Any, path: Path) -> dict[str, Any]:
    """The keys of the benchmark that another takes what it leaves out from.

    Raises:
        RecipeError: it is no benchmark of the package, or is itself like another.
    """
    if name not in benchmark_names():
        raise RecipeError(f"{path}: {unknown_name('like', str(name), benchmark_names())}")
    tree = _read_tree(BENCHMARKS / f"{name}.yaml")
    if "like" in tree:
        raise RecipeError(f"{path}: like '{name}', which is itself like '{tree['like']}': name that one")
    return tree
