"""The base of judges, and their section of a recipe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.config import BackboneConfig, FrozenModel, Recipe
from components.config.section import KindSection
from components.data.templates import Template
from components.evaluation.winrate import Verdict
from components.models.selector import Comparison

Progress = Callable[[int, float], None]
"""Called with (step, loss) while a judge is trained; steps count from 0."""


class Judge(ABC):
    """Compares two responses to a prompt."""

    def __init__(self, description: str, figures: dict[str, float] | None = None) -> None:
        self.description = description  # its name in reports
        self.figures = figures or {}  # about the judge itself, e.g. its accuracy on held-out pairs
        self.texts: list[dict[str, str]] = []  # judgments so far; empty for judges that do not write

    @abstractmethod
    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict]:
        """A verdict on each comparison, in its own order only.

        Raises:
            UserError: the judge fails.
        """


@dataclass(frozen=True)
class JudgeResources:
    """Inputs of a judge."""

    prepared: Path  # folder of prepared data; a judge may read judge.parquet of it, and nothing else
    cache: Path  # folder of judges that were trained before
    seed: int  # of what is trained
    device: str
    # Template of the policy, whose instruction is shown to judges that read one; None: they see the
    # prompt alone.
    policy: Template | None = None
    progress: Progress | None = None  # called while the judge is trained


class JudgeSection(KindSection, ABC):
    """A judge, as the section of a recipe that describes it."""

    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe that the judge cannot serve, by a RecipeError with key, value and remedy."""

    def required_backbones(self) -> list[BackboneConfig]:
        """Backbones that the judge needs."""
        return []

    def frozen_models(self) -> list[FrozenModel]:
        """The models that it loads to judge, except one that it trains."""
        return []

    def with_chat_date(self, day: str) -> JudgeSection:
        """The section with the day (ISO) that its chat template prints; itself if it prints none."""
        return self

    def eight_bit_settings(self) -> dict[str, str]:
        """Its keys that may ask for 8 bits, and their values."""
        return {}

    def check_data(self, prepared: Path) -> None:
        """Refuse early what would prevent the judge from being built at the end of a run.

        Raises:
            UserError: data, a model, a key or a library is missing.
        """

    @property
    def uses_judge_pairs(self) -> bool:
        """Whether it is trained on the pairs of owners outside the federation."""
        return False

    @abstractmethod
    def build(self, resources: JudgeResources) -> Judge:
        """Build the judge; one that is trained here is trained first, unless it is in the cache.

        Raises:
            UserError: it cannot be built.
        """
