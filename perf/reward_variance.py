"""The share of the variance of rewards that lies between prompts: `python -m perf reward-variance`.

The policy of a multi-objective recipe, before any training, answers held-out prompts several times,
and each objective's first reward scores the answers. Scores are a mean of their prompt and a
deviation from it; the two variances are those of the one-way random-effects analysis of variance
(Searle et al. 1992, Variance Components, chapter 3).

Compared with a baseline that is the mean of all scores, the leave-one-out baseline of k samples
removes the variance between prompts, and multiplies that within prompts by k / (k - 1). It thus
reduces the variance of advantages where the share between prompts is above 1 / k.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
import typer

from components.config import Recipe, RecipeError
from components.data.records import choose_prompts
from components.federation.multi_objective import MultiObjectiveMethod
from components.seeding import derive
from perf.harness import prepare_process, show

if TYPE_CHECKING:
    from components.models.rewards.reward_section import RewardFunction

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class VarianceComponents:
    """Variances of scores."""

    between: float  # of the prompts' means; an unbiased estimate, which may be negative
    within: float  # of the scores of a prompt
    prompts: int  # N
    samples: int  # k, scores of each prompt

    @property
    def share(self) -> float:
        """Share of the variance that lies between prompts; 0 if all scores are equal."""
        total = self.between + self.within
        return self.between / total if total else 0.0

    @property
    def share_error(self) -> float:
        """Standard error of the share for normal scores (Fisher 1925, section 39)."""
        rho, k = self.share, self.samples
        spread = (1 - rho) * (1 + (k - 1) * rho)
        return float(spread * np.sqrt(2 / (k * (k - 1) * (self.prompts - 1))))

    @property
    def leave_one_out_ratio(self) -> float:
        """Variance of leave-one-out advantages of k samples over that of deviations from the mean."""
        total = self.between + self.within
        return self.within * self.samples / (self.samples - 1) / total if total else 1.0


def variance_components(scores: Array) -> VarianceComponents:
    """The variances of scores [N, k] of N prompts with k answers each, N and k at least 2."""
    prompts, samples = scores.shape
    means = scores.mean(axis=1)
    within = float(((scores - means[:, None]) ** 2).sum() / (prompts * (samples - 1)))
    return VarianceComponents(float(means.var(ddof=1)) - within / samples, within, prompts, samples)


def sample_scores(recipe: Recipe, device: str, prompts: int, samples: int) -> dict[str, Array]:
    """Scores [N, k] of each objective's first reward, on N held-out prompts with k answers each.

    Raises:
        RecipeError: the recipe's method has no objectives.
    """
    from components.data.prepare import prepare
    from components.models.resident import ResidentPolicy

    options = recipe.federation.options
    if not isinstance(options, MultiObjectiveMethod):
        raise RecipeError(
            f"federation.method is {recipe.federation.method}, which has no objectives: name a recipe of"
            " firm or fedcmoo."
        )
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared"
        prepare(recipe.data, recipe.seed, prepared)
        texts = [row["prompt"] for row in choose_prompts(prepared, "test", prompts, recipe.seed)]
        policy = ResidentPolicy(recipe.policy, device).policy
        answers = policy.generate(
            texts, derive(recipe.seed, "variance"), options.sampling_temperature, count=samples
        )
        responses = [answer.text for group in answers for answer in group]
        repeated = [text for text in texts for _ in range(samples)]
        scores = {}
        for objective, names in options.objectives.items():
            reward = _load_reward(recipe, names[0], prepared, device)
            scores[objective] = np.asarray(reward(repeated, responses), float).reshape(-1, samples)
    return scores


def _load_reward(recipe: Recipe, name: str, prepared: Path, device: str) -> RewardFunction:
    """A reward, trained before if need be."""
    from components.models.rewards.reward_section import RewardResources, response_reward
    from tasks.runs import judges_root

    reward = response_reward(recipe.rewards[name])
    resources = RewardResources(prepared, judges_root(), recipe.seed, device, recipe.evaluation.judge)
    return reward.load(device, reward.prepare(resources).folder)


def show_variances(
    recipe: str = "multi-objective/demo",
    prompts: Annotated[int, typer.Option(min=2, help="Held-out prompts.")] = 32,
    samples: Annotated[int, typer.Option(min=2, help="Answers of each prompt.")] = 4,
) -> None:
    """The share of the variance of rewards that lies between prompts."""
    import pandas as pd

    scores = sample_scores(*prepare_process(recipe), prompts, samples)
    rows = []
    for name, values in scores.items():
        parts = variance_components(values)
        row = (name, parts.between, parts.within, parts.share, parts.share_error, parts.leave_one_out_ratio)
        rows.append(row)
    columns = ["objective", "between", "within", "share", "its standard error", "leave-one-out"]
    title = f"{recipe}: {prompts} prompts, {samples} answers each"
    show(title, pd.DataFrame(rows, columns=columns))
