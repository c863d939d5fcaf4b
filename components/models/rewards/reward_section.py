"""Base classes of the recipe's reward sections, which load the rewards that they describe.

A section derives from `RewardSection` if it scores pairs only, and from `ResponseReward` if it
scores single responses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import numpy.typing as npt

from components.config import BackboneConfig, FrozenModel, Recipe, RecipeError, UserError
from components.config.section import KindSection

if TYPE_CHECKING:
    from components.data.records import Pair
    from components.evaluation.judges.judge import JudgeSection

Scores = npt.NDArray[np.float64]
# Scores, [N], of N responses to N prompts; larger is better.
RewardFunction = Callable[[Sequence[str], Sequence[str]], Scores]
PairScorer = Callable[[Sequence["Pair"]], Scores]
"""Scores of the chosen and the rejected completion of N pairs, [N, 2]."""
Progress = Callable[[int, float], None]  # called with (step, loss) during training; steps count from 1


@dataclass(frozen=True)
class RewardResources:
    """Data, caches and settings for the preparation of a reward."""

    prepared: Path  # folder of prepared data; a reward may read judge.parquet in it
    cache: Path  # folder of trained judges and rewards, shared by runs
    seed: int  # trained weights are a function of it
    device: str
    judge: JudgeSection


@dataclass(frozen=True)
class PreparedReward:
    """A reward that can be loaded."""

    folder: Path | None = None  # of a trained reward; None for rewards that are not trained
    figures: dict[str, float] = field(default_factory=dict)  # e.g. its accuracy on held-out pairs


class RewardSection(KindSection, ABC):
    """A reward that scores pairs."""

    compares_pairs: ClassVar[bool] = False  # only: it gives no score of a single response
    uses_judge_pairs: ClassVar[bool] = False  # pairs of owners outside the federation
    recipe_sections: ClassVar[tuple[str, ...]] = ("rewards",)  # those that determine its scores
    artifact_version: ClassVar[int | None] = None  # of what is trained (components/versions.py), if it is

    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe that the reward cannot serve, by a RecipeError with key, value and remedy."""

    def required_backbones(self) -> list[BackboneConfig]:
        """Backbones that the reward is trained from."""
        return []

    def frozen_models(self, name: str) -> list[FrozenModel]:
        """The models that it loads to score, under a name."""
        return []

    def prepare(self, resources: RewardResources, progress: Progress | None = None) -> PreparedReward:
        """Train the reward if its kind requires it and it is not in the cache."""
        return PreparedReward()

    @abstractmethod
    def load_pair_scorer(self, recipe: Recipe, device: str, folder: Path | None) -> PairScorer:
        """Load what scores pairs, from the reward's folder if it is trained (see `PreparedReward`)."""


class ResponseReward(RewardSection):
    """A reward that scores single responses."""

    def check_loading(self, key: str) -> None:
        """Refuse early what would prevent the reward from being loaded, as far as it is cheap to see."""

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

    def load_pair_scorer(self, recipe: Recipe, device: str, folder: Path | None) -> PairScorer:
        reward = self.load(device, folder)

        def score(rows: Sequence[Pair]) -> Scores:
            prompts = [row.prompt for row in rows]
            chosen = reward(prompts, [row.chosen for row in rows])
            return np.stack([chosen, reward(prompts, [row.rejected for row in rows])], axis=1)

        return score


def response_reward(section: RewardSection) -> ResponseReward:
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
        raise UserError(
            f"{name} failed on {len(responses)} responses: {type(error).__name__}: {error}"
        ) from error
    if scores.shape != (len(responses),) or not np.isfinite(scores).all():
        raise UserError(
            f"{name} returned scores of shape {scores.shape} for {len(responses)} responses, "
            f"{int((~np.isfinite(scores)).sum())} of them NaN or infinite: it must return one finite number "
            "for each response"
        )
    return scores
