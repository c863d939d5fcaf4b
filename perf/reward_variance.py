"""The share of the variance of rewards that lies between prompts: `python -m perf.reward_variance`.

The policy of a multi-objective recipe, before any training, answers held-out prompts several times,
and each objective's first reward scores the answers. Scores are a mean of their prompt and a
deviation from it; the two variances are those of the one-way random-effects analysis of variance
(Searle et al. 1992, Variance Components, chapter 3).

Compared with a baseline that is the mean of all scores, the leave-one-out baseline of k samples
removes the variance between prompts, and multiplies that within prompts by k / (k - 1). It thus
reduces the variance of advantages where the share between prompts is above 1 / k.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from components.config import Recipe, RecipeError
from components.data.records import choose_prompts
from components.federation.multi_objective import MultiObjectiveMethod
from components.seeding import derive
from perf.harness import prepare_process

if TYPE_CHECKING:
    from components.models.rewards.reward_section import RewardFunction

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class VarianceComponents:
    """Variances of scores.

    Attributes:
        between: of the prompts' means; an unbiased estimate, which may be negative.
        within: of the scores of a prompt.
        prompts: N.
        samples: k, scores of each prompt.
    """

    between: float
    within: float
    prompts: int
    samples: int

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


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of the variances of each objective's scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recipe", default="multi-objective/demo", help="(default: multi-objective/demo)")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts (default: 32)")
    parser.add_argument("--samples", type=int, default=4, help="answers of each prompt (default: 4)")
    options = parser.parse_args(arguments)
    if options.prompts < 2 or options.samples < 2:
        parser.error("--prompts and --samples must be at least 2, since both variances are estimated")
    recipe, device = prepare_process(options.recipe)
    scores = sample_scores(recipe, device, options.prompts, options.samples)
    print(f"{options.recipe}: {options.prompts} prompts, {options.samples} answers each")
    print(f"  {'objective':<20}{'between':>10}{'within':>10}{'share':>14}{'leave-one-out':>16}")
    for name, values in scores.items():
        parts = variance_components(values)
        share = f"{parts.share:.0%} +- {parts.share_error:.0%}"
        variances = f"{parts.between:>10.4f}{parts.within:>10.4f}"
        print(f"  {name:<20}{variances}{share:>14}{parts.leave_one_out_ratio:>15.2f}x")


if __name__ == "__main__":
    main()
