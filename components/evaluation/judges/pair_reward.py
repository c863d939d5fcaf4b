"""The reward `judge`: pairs are scored by the log-odds of the recipe's own 'selector' judge."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from components.config import Recipe, RecipeError
from components.data.records import Pairs
from components.evaluation.judges.judge import JudgeResources
from components.evaluation.judges.selector_judge import SelectorJudgeSection
from components.models.rewards.reward_section import Progress, RewardResources, RewardSection, Scores


class JudgeReward(RewardSection):
    """The recipe's 'selector' judge as a reward; it only scores pairs."""

    compares_pairs: ClassVar[bool] = True
    uses_judge_pairs: ClassVar[bool] = True
    recipe_sections: ClassVar[tuple[str, ...]] = ("rewards", "evaluation")

    kind: Literal["judge"] = Field("judge", description="Kind of the reward.")

    def check(self, recipe: Recipe) -> None:
        """Refuse a judge that gives no log-odds.

        Raises:
            RecipeError: the recipe's judge is of another kind.
        """
        if not isinstance(recipe.evaluation.judge, SelectorJudgeSection):
            raise RecipeError(
                "a reward of kind 'judge' needs evaluation.judge.kind 'selector', which gives log-odds, and"
                f" not '{recipe.evaluation.judge.kind}'"
            )

    def score_pairs(
        self, rows: Pairs, resources: RewardResources, progress: Progress | None = None
    ) -> tuple[Scores, dict[str, float]]:
        """Score a pair by half of its log-odds, averaged over both orders, and the negative of it."""
        from components.learning.selector_training import score_pairs

        if not isinstance(resources.judge, SelectorJudgeSection):
            raise TypeError("a reward of kind 'judge' needs a selector judge")
        resources.judge.check_data(resources.prepared)
        judge = resources.judge.build(
            JudgeResources(resources.prepared, resources.cache, resources.seed, resources.device)
        )
        half = score_pairs(judge.selector, rows).mean(axis=0) / 2
        return np.stack([half, -half], axis=1), {}
