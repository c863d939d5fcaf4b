"""Base classes of the recipe's reward sections, which load the rewards that they describe.

A section derives from `RewardSection` if it scores pairs only, and from `ResponseReward` if it
scores single responses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from components.config import RecipeError, RewardConfig, UserError
from components.config.evaluation import JudgeConfig

if TYPE_CHECKING:
    from components.data.records import Pairs
    from components.models.pair_reader import PairReader

Scores = npt.NDArray[np.float64]
# Scores, [N], of N responses to N prompts; larger is better.
RewardFunction = Callable[[Sequence[str], Sequence[str]], Scores]
Progress = Callable[[int, float], None]  # called with (step, loss) during training; steps count from 1


class RewardError(UserError, RuntimeError):
    """A reward function that fails, or returns scores that are not finite."""


@dataclass(frozen=True)
class RewardResources:
    """Data, caches and settings for the preparation of a reward."""

    prepared: Path  # folder of prepared data; a reward may read judge.parquet in it
    cache: Path  # folder of trained judges and rewards, shared by runs
    seed: int  # trained weights are a function of it
    device: str
    judge: JudgeConfig


@dataclass(frozen=True)
class PreparedReward:
    """A reward that can be loaded."""

    folder: Path | None = None  # of a trained reward; None for rewards that are not trained
    figures: dict[str, float] = field(default_factory=dict)  # e.g. its accuracy on held-out pairs


class RewardSection(RewardConfig, ABC):
    """A reward that scores pairs."""

    def pair_reader(self, key: str) -> PairReader | None:
        """How its training reads the pairs of owners outside the federation; None if it has none."""
        return None

    @abstractmethod
    def score_pairs(
        self, rows: Pairs, resources: RewardResources, progress: Progress | None = None
    ) -> tuple[Scores, dict[str, float]]:
        """Scores of the chosen and rejected completion of N pairs [N, 2], and metrics of the reward."""


class ResponseReward(RewardSection):
    """A reward that scores single responses."""

    def check_loading(self, key: str) -> None:
        """Refuse early what would prevent the reward from being loaded, as far as it is cheap to see."""

    def prepare(self, resources: RewardResources, progress: Progress | None = None) -> PreparedReward:
        """Train the reward if its kind requires it and it is not in the cache."""
        return PreparedReward()

    @abstractmethod
    def load(self, device: str, folder: Path | None) -> RewardFunction:
        """Load the reward, from its folder if it is trained (see `PreparedReward`)."""

    def without_tf32(self) -> Self:
        """The reward for a thread beside others that train, with which it shares torch's settings."""
        return self

    @property
    @abstractmethod
    def description(self) -> str:
        """The reward in reports."""

    def score_pairs(
        self, rows: Pairs, resources: RewardResources, progress: Progress | None = None
    ) -> tuple[Scores, dict[str, float]]:
        prepared = self.prepare(resources, progress)
        reward = self.load(resources.device, prepared.folder)
        prompts = [row["prompt"] for row in rows]
        columns = [reward(prompts, [row[side] for row in rows]) for side in ("chosen", "rejected")]
        return np.stack(columns, axis=1), prepared.figures


def response_reward(section: RewardConfig) -> ResponseReward:
    """Require that a section scores single responses rather than pairs alone."""
    if not isinstance(section, ResponseReward):
        raise RecipeError(
            f"a reward of kind '{section.kind}' does not score single responses: use another kind"
        )
    return section


def check_scores(
    name: str, reward: RewardFunction, prompts: Sequence[str], responses: Sequence[str]
) -> Scores:
    """Score N responses, and require one finite number for each; [N] float64."""
    try:
        scores = np.asarray(reward(list(prompts), list(responses)), dtype=np.float64)
    except UserError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise RewardError(
            f"{name} failed on {len(responses)} responses: {type(error).__name__}: {error}"
        ) from error
    if scores.shape != (len(responses),) or not np.isfinite(scores).all():
        raise RewardError(
            f"{name} returned scores of shape {scores.shape} for {len(responses)} responses, "
            f"{int((~np.isfinite(scores)).sum())} of them NaN or infinite: it must return one finite number "
            "for each response"
        )
    return scores
