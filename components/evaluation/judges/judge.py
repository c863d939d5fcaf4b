"""The base of judges, and their section of a recipe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.config.evaluation import JudgeConfig
from components.data.records import DataError
from components.data.templates import Template
from components.evaluation.winrate import Verdict
from components.models.pair_reader import PairReader
from components.models.selector import Comparison

Progress = Callable[[int, float], None]
"""Called with (step, loss) while a judge is trained; steps count from 0."""


class JudgeError(DataError):
    """A judge that cannot be loaded, or does not answer."""


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


class JudgeSection(JudgeConfig, ABC):
    """A judge, as the section of a recipe that describes it."""

    def check_data(self, prepared: Path) -> None:
        """Refuse early what would prevent the judge from being built at the end of a run.

        Raises:
            UserError: data, a model, a key or a library is missing.
        """

    def pair_reader(self) -> PairReader | None:
        """How its training reads the pairs of owners outside the federation; None if it has none."""
        return None

    @abstractmethod
    def build(self, resources: JudgeResources) -> Judge:
        """Build the judge; one that is trained here is trained first, unless it is in the cache.

        Raises:
            UserError: it cannot be built.
        """
