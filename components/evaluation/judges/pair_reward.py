"""The reward `judge`: pairs are scored by the log-odds of the recipe's own 'selector' judge."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from components.config import Recipe, RecipeError
from components.data.records import Pair
from components.evaluation.judges.judge import JudgeResources, JudgeSection
from components.evaluation.judges.selector_judge import SelectorJudgeSection
from components.io import write_atomically
from components.models.rewards.reward_section import (
    PairScorer,
    PreparedReward,
    Progress,
    RewardResources,
    RewardSection,
    Scores,
)

ADAPTER = "adapter.safetensors"
"""File of the judge's adapter in the folder of the reward."""


class JudgeReward(RewardSection):
    """The recipe's 'selector' judge as a reward; it only scores pairs."""

    compares_pairs: ClassVar[bool] = True
    uses_judge_pairs: ClassVar[bool] = True
    recipe_sections: ClassVar[tuple[str, ...]] = ("rewards", "evaluation")

    kind: Literal["judge"] = Field("judge", description="Kind of the reward.")

    def check(self, recipe: Recipe) -> None:
        """Refuse a judge that gives no log-odds."""
        if not isinstance(recipe.evaluation.judge, SelectorJudgeSection):
            raise RecipeError(
                "a reward of kind 'judge' needs evaluation.judge.kind 'selector', which gives log-odds, and"
                f" not '{recipe.evaluation.judge.kind}'"
            )

    def prepare(self, resources: RewardResources, progress: Progress | None = None) -> PreparedReward:
        """Train the judge if it is not in the cache; the folder has its adapter."""
        from safetensors.torch import save

        section = _selector_judge(resources.judge)
        section.check_data(resources.prepared)
        judge = section.build(
            JudgeResources(resources.prepared, resources.cache, resources.seed, resources.device)
        )
        data = save(judge.selector.slot.read())
        folder = resources.cache / "rewards" / hashlib.sha256(data).hexdigest()[:16]
        write_atomically(folder / ADAPTER, data)
        return PreparedReward(folder)

    def load_pair_scorer(self, recipe: Recipe, device: str, folder: Path | None) -> PairScorer:
        """Score a pair by half of its log-odds, averaged over both orders, and the negative of it."""
        from safetensors.torch import load_file

        from components.learning.selector_training import score_pairs
        from components.models.selector_model import Selector

        if folder is None:
            raise TypeError("a reward of kind 'judge' is trained before it is loaded")
        selector = Selector(_selector_judge(recipe.evaluation.judge).selector, device)
        selector.slot.load(load_file(folder / ADAPTER))

        def score(rows: Sequence[Pair]) -> Scores:
            half = score_pairs(selector, rows).mean(axis=0) / 2
            return np.stack([half, -half], axis=1)

        return score


def _selector_judge(judge: JudgeSection) -> SelectorJudgeSection:
    if not isinstance(judge, SelectorJudgeSection):
        raise TypeError("a reward of kind 'judge' needs a selector judge")
    return judge
