"""The judge `reward`: a reward model scores each response, and the higher score is better."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from components.config import BackboneConfig, FrozenModel, Recipe, RecipeError
from components.config.evaluation import AnyReward
from components.data.records import read_judges_rows
from components.evaluation.judges.judge import Judge, JudgeResources, JudgeSection
from components.evaluation.winrate import Verdict
from components.models.rewards.reward_section import RewardResources, check_scores, response_reward
from components.models.selector import Comparison
from components.progress import Work, report_work

log = logging.getLogger(__name__)
KEY = "evaluation.judge.reward"


class RewardJudgeSection(JudgeSection):
    """A frozen reward model as the judge."""

    kind: Literal["reward"] = Field("reward", description="Kind of the judge.")
    reward: AnyReward = Field(
        description=(
            "A section as under `rewards` of a recipe, or the name of one there. A reward of kind 'trained'"
            " is then trained once, for both."
        )
    )

    def check(self, recipe: Recipe) -> None:
        """Refuse a reward that only compares pairs, or that is not valid itself."""
        if self.reward.compares_pairs:
            raise RecipeError(
                f"{KEY} is of kind '{self.reward.kind}', which is the recipe's judge itself: give a"
                " classifier, a trained reward or a function."
            )
        self.reward.check(recipe)

    def required_backbones(self) -> list[BackboneConfig]:
        return self.reward.required_backbones()

    def frozen_models(self) -> list[FrozenModel]:
        return self.reward.frozen_models("judge")

    def check_data(self, prepared: Path) -> None:
        response_reward(self.reward).check_loading(KEY)
        if self.uses_judge_pairs:
            read_judges_rows(prepared, "a 'reward' judge that is trained here")

    @property
    def uses_judge_pairs(self) -> bool:
        return self.reward.uses_judge_pairs

    def build(self, resources: JudgeResources) -> RewardJudge:
        return RewardJudge(self, resources)


class RewardJudge(Judge):
    """The reward on a device. Its verdict is the same in both orders, so its consistency is 1.

    Its figures are the accuracy of a trained reward on held-out pairs, and the number of pairs.
    """

    def __init__(self, section: RewardJudgeSection, resources: JudgeResources) -> None:
        reward = response_reward(section.reward)
        progress = resources.progress
        prepared = reward.prepare(
            RewardResources(resources.prepared, resources.cache, resources.seed, resources.device, section),
            None if progress is None else lambda step, loss: progress(step - 1, loss),
        )
        self._reward = reward.load(resources.device, prepared.folder)
        self._scores: dict[tuple[str, str], float] = {}
        names = [name for name in ("accuracy", "pairs", "held_out_pairs") if name in prepared.figures]
        figures = {f"judge_{name}": prepared.figures[name] for name in names}
        super().__init__(f"reward model, {reward.description}", figures)

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict]:
        """The completion with the higher score; equal scores are ties."""
        responses: list[tuple[str, str]] = []
        for pair in comparisons:
            responses += [(pair.prompt, pair.first), (pair.prompt, pair.second)]
        # Each response is scored once, although it is compared in both orders.
        new = [pair for pair in dict.fromkeys(responses) if pair not in self._scores]
        if new:
            report_work(log, Work("answers scored by the judge", 0, len(new)))
            scores = check_scores(KEY, self._reward, [prompt for prompt, _ in new], [text for _, text in new])
            self._scores.update(zip(new, scores.tolist(), strict=True))
        return [
            Verdict.of_margin(self._scores[first] - self._scores[second])
            for first, second in zip(responses[::2], responses[1::2], strict=True)
        ]
