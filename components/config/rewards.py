"""Reward models, which score responses or compare pairs of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from components.config.models import BackboneConfig, FrozenModel
from components.config.registry import Registry
from components.config.section import Section

if TYPE_CHECKING:
    from components.config.recipe import Recipe


class RewardConfig(Section):
    """A frozen reward model; components.models.rewards.reward_section.RewardSection adds how it scores."""

    compares_pairs: ClassVar[bool] = False  # only: it gives no score of a single response
    uses_judge_pairs: ClassVar[bool] = False  # pairs of owners outside the federation
    recipe_sections: ClassVar[tuple[str, ...]] = ("rewards",)  # those that determine its scores
    artifact_version: ClassVar[int | None] = None  # of what is trained (components/versions.py), if it is

    kind: str
    """Registered kind of reward (components/models/rewards)."""

    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe that the reward cannot serve, by a RecipeError with key, value and remedy."""

    def required_backbones(self) -> list[BackboneConfig]:
        """Backbones that the reward is trained from."""
        return []

    def frozen_models(self, name: str) -> list[FrozenModel]:
        """The models that it loads to score, under a name."""
        return []


REWARDS: Registry[type[RewardConfig]] = Registry(
    "rewards.kind",
    "fed_rlhf.rewards",
    {
        "classifier": "components.models.rewards.classifier:ClassifierReward",
        "function": "components.models.rewards.function:FunctionReward",
        "judge": "components.evaluation.judges.pair_reward:JudgeReward",
        "trained": "components.learning.reward_model:TrainedReward",
    },
    "components.models.rewards.reward_section:RewardSection",
)
