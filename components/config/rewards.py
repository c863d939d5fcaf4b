"""Reward models, which score responses or compare pairs of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from components.config.models import BackboneConfig
from components.config.registry import Registry
from components.config.section import Section

if TYPE_CHECKING:
    from components.config.recipe import Recipe


class RewardConfig(Section):
    """A frozen reward model.

    A reward's own file derives its section from components.models.rewards.base.RewardSection, which
    adds how it is prepared and loaded, and registers it in REWARDS or through the entry points of a
    package.

    Attributes:
        compares_pairs: whether it only compares the two responses of a pair, and gives no score of
            one.
        uses_judge_pairs: whether it depends on the pairs of owners outside the federation.
        recipe_sections: sections of the recipe that determine its scores.
        artifact_version: version of what is trained (components/versions.py); None where nothing
            is.
    """

    compares_pairs: ClassVar[bool] = False
    uses_judge_pairs: ClassVar[bool] = False
    recipe_sections: ClassVar[tuple[str, ...]] = ("rewards",)
    artifact_version: ClassVar[int | None] = None

    kind: str = Field(description="Registered kind of reward (components/models/rewards).")

    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe that the reward cannot serve.

        Raises:
            RecipeError: naming the key, its value and the remedy.
        """

    def required_backbones(self) -> list[BackboneConfig]:
        """Backbones that the reward is trained from."""
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
)
"""Rewards by kind: the model of each one's section."""
