"""The judge `reward`: a reward model that scores each response by itself; the one with the higher score is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import Field, field_validator

from components.config import JudgeConfig, RewardConfig, RewardTrainingConfig, Section
from components.data.records import read_judges_rows
from components.data.templates import Template
from components.evaluation.winrate import Verdict
from components.models.reward_functions import find_reward_function
from components.models.selector import Comparison

WHERE = "evaluation.judge.options.reward"


class RewardJudge:
    """A frozen reward model used as a judge. It says the same in both orders, so its consistency is 1."""

    class Options(Section):
        """Options of the judge 'reward'."""

        reward: RewardConfig = Field(description="As under `rewards` of a recipe, or the name of one that is there; of kind 'trained' it is trained once then, for both.")

        @field_validator("reward")
        @classmethod
        def _scores_one(cls, reward: RewardConfig) -> RewardConfig:
            if reward.kind == "judge":
                raise ValueError("a reward of kind 'judge' is the recipe's judge itself: give a classifier, a trained one or a function")
            if reward.kind == "function":
                find_reward_function(reward.name)
            return reward

    def __init__(
        self, config: JudgeConfig, prepared: Path, cache: Path, seed: int, device: str, progress: Callable[[int, float], None] | None = None, policy: Template | None = None,
    ) -> None:
        """Load the reward, or train it and put it in the cache.

        Args:
            config: the recipe's judge.
            prepared: folder of prepared data; one that is trained reads judge.parquet of it, and nothing else.
            cache: folder of judges; trained rewards are kept under `rewards` in it.
            seed: of what is trained.
            device: where it runs.
            progress: called with (step, loss) during training, steps from 0.
            policy: not used; a reward has a template of its own.

        Raises:
            BackboneError, RecipeError, DataError: it cannot be had.
        """
        from components.learning.reward import build_reward

        reward = _options(config).reward
        count = None if progress is None else lambda step, loss: progress(step - 1, loss)  # that of rewards begins at 1
        self.score, known = build_reward(reward, prepared, cache / "rewards", seed, device, count)
        self._scores: dict[tuple[str, str], float] = {}
        self.figures: dict[str, float] = {f"judge_{key}": known[key] for key in ("accuracy", "pairs", "held_out_pairs") if key in known}
        self.description = f"reward model, {described(reward)}"

    @staticmethod
    def check(config: JudgeConfig, prepared: Path) -> None:
        """Refuse a function that cannot be found or does not score, a classifier whose configuration cannot be read, and prepared data that a reward could not be trained or measured on.

        Raises:
            RecipeError, TrainingError: of a function.
            BackboneError: of a classifier.
            DataError: there are no pairs to learn from, or none to be measured on.
        """
        from components.learning.multi_objective import checked_scores
        from components.learning.reward import build_reward
        from components.models.reward import read_config

        reward = _options(config).reward
        if reward.kind == "function":
            checked_scores(WHERE, build_reward(reward, prepared, prepared, 0, "cpu")[0], ["a question"], ["an answer"])
        if reward.kind == "classifier":
            read_config(reward)
        if reward.kind == "trained":
            read_judges_rows(prepared, "a 'reward' judge that is trained here")

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict]:
        """The completion with the higher score; equal scores are ties.

        Raises:
            TrainingError: the reward failed, or did not give a finite number for each.
        """
        from components.learning.multi_objective import checked_scores

        asked = [(comparison.prompt, text) for comparison in comparisons for text in (comparison.first, comparison.second)]
        new = [pair for pair in dict.fromkeys(asked) if pair not in self._scores]  # each response once, though it is asked for in both orders
        if new:
            self._scores.update(zip(new, checked_scores(WHERE, self.score, [prompt for prompt, _ in new], [text for _, text in new]), strict=True))
        scores = [self._scores[pair] for pair in asked]
        return [Verdict.FIRST if ours > theirs else Verdict.SECOND if ours < theirs else Verdict.TIE for ours, theirs in zip(scores[::2], scores[1::2], strict=True)]


def described(reward: RewardConfig) -> str:
    """What a reward is, in words."""
    if reward.kind != "trained":
        return f"{reward.kind} {reward.name}"
    backbone = (reward.training or RewardTrainingConfig()).backbone
    return f"{backbone.name}, {f'first {backbone.layers} layers' if backbone.layers else 'all layers'}, trained centrally on owners outside the federation"


def _options(config: JudgeConfig) -> RewardJudge.Options:
    return RewardJudge.Options.model_validate(config.options)
