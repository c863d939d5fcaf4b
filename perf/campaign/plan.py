"""What a campaign runs: its list of families, most wanted first, and the runs of each.

A family is a benchmark of the project, with seeds and settings of its own:

    summarization-decisive:
      benchmark: summarization-decisive     # by name, or a path relative to the list
      seeds: [0, 1, 2, 3, 4]
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from components.benchmarks import arm_recipe, load_benchmark
from components.config import Recipe, RecipeError, check_section
from components.config.benchmark import Benchmark, Seed
from components.config.loading import read_yaml
from components.config.section import Section

LIST = Path(__file__).with_name("families.yaml")
NOT_RESULTS = frozenset({"runtime", "tracking"})
"""Sections of a recipe that say how it is run and logged."""
HOME = "{home}"
"""Stands for the campaign's folder in the settings and preparations of a family."""


class Family(Section):
    """A benchmark of the campaign."""

    benchmark: str = Field(min_length=1, description="Name, or path relative to the list.")
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field(description="Seeds of each arm.")
    settings: list[str] = Field(
        default_factory=list, description="'key.path=value' settings of all arms on top of the benchmark's."
    )
    prepare: list[str] = Field(
        default_factory=list,
        description="Module with its arguments, which runs once, before the family's first run.",
    )
    measure: str = Field(
        "", description="Function 'module:name' that maps the folder of a finished run to further figures."
    )
    chosen_from: str | None = Field(
        None,
        description=(
            "An earlier family whose benchmark has choices. Arms with the name of a choice take the settings"
            " of the chosen arm."
        ),
    )
    based_on: dict[str, str] = Field(
        default_factory=dict,
        description="By arm, the choice whose settings precede the arm's own, for ablations.",
    )
    minutes: float = Field(
        math.nan, description="Of a run on two cores: an estimate until runs of its arm are finished."
    )
    disabled: str = Field("", description="Why the family is not run; empty: it is.")

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        if self.based_on and self.chosen_from is None:
            raise ValueError("based_on names choices: set chosen_from, the family that makes them")
        return self


@dataclass(frozen=True)
class Item:
    """A run of a campaign.

    Attributes:
        family, arm, seed: what is run.
    """

    family: str
    arm: str
    seed: int

    def __str__(self) -> str:
        return f"{self.family}: {self.arm}, seed {self.seed}"


@dataclass(frozen=True)
class Campaign:
    """A list of families.

    Attributes:
        families: by name, most wanted first.
        path: the file.
        home: folder of the campaign.
    """

    families: Mapping[str, Family]
    path: Path
    home: Path

    def benchmark(self, name: str, chosen: Mapping[str, str] | None = None) -> Benchmark:
        """The benchmark of a family, with the family's seeds and settings.

        Args:
            name: of the family.
            chosen: by choice, the chosen arm of the family `chosen_from`; None: the benchmark's own
                settings stay.

        Raises:
            RecipeError: the benchmark, or the recipe of an arm, is wrong.
        """
        family = self.families[name]
        settings = [self.expand(setting) for setting in family.settings]
        benchmark = load_benchmark(self._benchmark_path(family), settings)
        changes = {"seeds": family.seeds}
        if family.chosen_from is None or chosen is None:
            return benchmark.model_copy(update=changes)
        candidates = self.benchmark(family.chosen_from).arms
        arms = dict(benchmark.arms)
        for choice, arm in chosen.items():
            if choice in arms:
                arms[choice] = [*settings, *candidates[arm]]
        for arm, choice in family.based_on.items():
            arms[arm] = [*arms[choice], *benchmark.arms[arm]]
        return benchmark.model_copy(update={**changes, "arms": arms})

    def expand(self, text: str) -> str:
        """A setting or an argument with the campaign's folder in it."""
        return text.replace(HOME, str(self.home))

    def _benchmark_path(self, family: Family) -> str:
        path = self.path.parent / family.benchmark
        return str(path) if path.is_file() else family.benchmark


def read_campaign(path: Path, home: Path) -> Campaign:
    """Read a list of families.

    Args:
        path: of the YAML file.
        home: folder of the campaign.

    Raises:
        RecipeError: the file is no list of families, or one of them is wrong.
    """
    tree = read_yaml(path, "a campaign is a mapping of families")
    families = {
        str(name): check_section(Family, values, f"{path}, family {name}") for name, values in tree.items()
    }
    names = list(families)
    for name, family in families.items():
        source = family.chosen_from
        if source is not None and source not in names[: names.index(name)]:
            raise RecipeError(
                f"{path}: family {name} takes its settings from '{source}': name a family above it"
            )
    return Campaign(families, path, home)


def items(name: str, benchmark: Benchmark) -> list[Item]:
    """The runs of a family: all arms of the first seed, then those of the next one."""
    runs: list[Item] = []
    for seed in benchmark.seeds:
        runs += [Item(name, arm, seed) for arm in benchmark.arms]
    return runs


def recipe_hash(recipe: Recipe) -> str:
    """Hash of all that a run's results depend on in its recipe."""
    content = recipe.model_dump(mode="json", exclude=set(NOT_RESULTS))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def check_campaign(campaign: Campaign) -> dict[str, int]:
    """Check the recipe of every arm of every family that is not disabled; gives their numbers of runs.

    Raises:
        RecipeError: naming the family.
    """
    counts = {}
    for name, family in campaign.families.items():
        if family.disabled:
            continue
        benchmark = campaign.benchmark(name)
        _check_choices(campaign, name, benchmark)
        for item in items(name, benchmark):
            arm_recipe(benchmark, item.arm, item.seed)
        counts[name] = len(items(name, benchmark))
    return counts


def _check_choices(campaign: Campaign, name: str, benchmark: Benchmark) -> None:
    """Refuse choices and arms that do not exist."""
    family = campaign.families[name]
    if family.chosen_from is None:
        return
    choices = campaign.benchmark(family.chosen_from).choices
    missing: Sequence[str] = [choice for choice in family.based_on.values() if choice not in choices]
    missing = [*missing, *(arm for arm in family.based_on if arm not in benchmark.arms)]
    missing = [*missing, *(choice for choice in choices if choice not in benchmark.arms)]
    if missing:
        raise RecipeError(
            f"{campaign.path}: family {name}: {', '.join(missing)}: expected the name of an arm, and of a"
            f" choice of {family.chosen_from}"
        )
    campaign.benchmark(name, {choice: each.among[0] for choice, each in choices.items()})
