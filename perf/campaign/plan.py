"""What a campaign runs: its list of families, most wanted first, and the runs of each.

A family is a benchmark of the project, with seeds and settings of its own:

    summarization-decisive:
      benchmark: summarization-decisive     # by name, or a path relative to the list
      seeds: [0, 1, 2, 3, 4]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from components.benchmarks import load_benchmark
from components.config import RecipeError, check_section
from components.config.benchmark import Benchmark, Seed
from components.config.loading import read_yaml
from components.config.section import Section

LIST = Path(__file__).with_name("families.yaml")
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

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        if self.based_on and self.chosen_from is None:
            raise ValueError("based_on names choices: set chosen_from, the family that makes them")
        return self


@dataclass(frozen=True)
class Campaign:
    """A list of families."""

    families: Mapping[str, Family]  # by name, most wanted first
    path: Path
    home: Path  # where it runs

    def folder(self, name: str) -> Path:
        """Folder of a family's benchmark."""
        return self.home / "runs" / name

    def benchmark(self, name: str, chosen: Mapping[str, str] | None = None) -> Benchmark:
        """The benchmark of a family, with the family's seeds and settings.

        Args:
            name: of the family.
            chosen: by choice, the chosen arm of the family `chosen_from`; None: the benchmark's own
                settings stay.

        Raises:
            RecipeError: the benchmark, or the recipe of an arm, is wrong, or a choice is of no arm.
        """
        family = self.families[name]
        settings = [self.expand(setting) for setting in family.settings]
        path = self.path.parent / family.benchmark
        benchmark = load_benchmark(str(path) if path.is_file() else family.benchmark, settings)
        arms = dict(benchmark.arms)
        if family.chosen_from is not None:
            source = self.benchmark(family.chosen_from)
            self._check_choices(name, benchmark, source)
            for choice, arm in (chosen or {}).items():
                arms[choice] = [*settings, *source.arms[arm]]
            if chosen is not None:
                arms |= {arm: [*arms[of], *arms[arm]] for arm, of in family.based_on.items()}
        return benchmark.model_copy(update={"seeds": family.seeds, "arms": arms})

    def _check_choices(self, name: str, benchmark: Benchmark, source: Benchmark) -> None:
        """Refuse choices and arms that do not exist."""
        based_on = self.families[name].based_on
        wrong = [choice for choice in based_on.values() if choice not in source.choices]
        wrong += [arm for arm in (*based_on, *source.choices) if arm not in benchmark.arms]
        if wrong:
            raise RecipeError(
                f"{self.path}: family {name}: {', '.join(wrong)}: expected the name of an arm, and of a"
                f" choice of {self.families[name].chosen_from}"
            )

    def expand(self, text: str) -> str:
        """A setting or an argument with the campaign's folder in it."""
        return text.replace(HOME, str(self.home))


def read_campaign(path: Path, home: Path) -> Campaign:
    """Read a list of families, and the benchmark of each.

    Args:
        path: of the YAML file.
        home: folder of the campaign.

    Raises:
        RecipeError: the file is no list of families, or a family, its benchmark or a recipe is wrong.
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
    campaign = Campaign(families, path, home)
    for name in families:
        campaign.benchmark(name)
    return campaign


def runs_of(benchmark: Benchmark) -> list[tuple[str, int]]:
    """Arm and seed of the runs: all arms of the first seed, then those of the next one."""
    return [(arm, seed) for seed in benchmark.seeds for arm in benchmark.arms]
