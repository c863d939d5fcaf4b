"""Costs of several objectives: a local step of FIRM, and the solution of MGDA's quadratic program."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from components.config import MultiObjective, RecipeError
from perf.comparison import Comparison, Ratios, load_pairs, median_ratio, prepare_process

if TYPE_CHECKING:
    from components.config import FederationConfig
    from components.learning.loop import Training
    from components.models.resident import ResidentPolicy
    from components.models.rewards.reward_section import RewardFunction

MAX_OBJECTIVES = 3
SOLVED_OBJECTIVES = (2, 3, 5, 8)
SOLUTIONS_PER_REPEAT = 10
BETA = 0.1
"""Regularization of the timed solutions."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a local step: of the rollout of a batch, and of its gradients."""

    rollout: float
    gradients: float


def compare_objectives(comparison: Comparison) -> Ratios:
    """Print the table of a local step by the number of objectives, with rewards that cost nothing.

    Returns:
        for each M above 1, the time of the gradients of one objective over that of M.

    Raises:
        RecipeError: the recipe's method does not train several objectives.
    """
    import torch

    from components.learning.loop import Training
    from components.models.resident import ResidentPolicy

    recipe, device = prepare_process(comparison.recipe)
    config = _multi_objective(recipe.federation)
    resident = ResidentPolicy(recipe.policy, device)
    resident.slot.load(resident.slot.initial_adapter(recipe.seed))
    prompts = list(dict.fromkeys(pair["prompt"] for pair in load_pairs(recipe)))
    prompts = prompts[: recipe.federation.batch_size]
    training = Training(1, len(prompts), recipe.federation.optimizer, recipe.seed)
    times: dict[int, list[StepTimes]] = {count: [] for count in range(1, MAX_OBJECTIVES + 1)}
    tokens = 0
    for repeat in range(comparison.repeats + 1):
        for count, measured in times.items():
            step, tokens = _time_step(resident, prompts, config, training, count)
            if repeat:  # the first one warms up
                measured.append(step)
    print(
        f"\nLocal step with M objectives ({comparison.recipe}: {len(prompts)} completions,"
        f" {tokens} tokens with their prompts, {torch.get_num_threads()} threads, {device}),"
        f" median of {comparison.repeats}"
    )
    print(f"  {'M':<4}{'rollout s':>12}{'gradients s':>13}{'gradients, ratio to M = 1':>28}")
    gradients = {count: [step.gradients for step in measured] for count, measured in times.items()}
    ratios = {}
    for count, measured in times.items():
        ratio = median_ratio(gradients[count], gradients[1])
        rollout = statistics.median(step.rollout for step in measured)
        print(f"  {count:<4}{rollout:>12.2f}{statistics.median(gradients[count]):>13.2f}{ratio:>28.2f}")
        if count > 1:
            ratios[f"objectives/one_against_{count}"] = median_ratio(gradients[1], gradients[count])
    return ratios


def _multi_objective(config: FederationConfig) -> MultiObjective:
    from components.federation.method import method_of

    objective = method_of(config).local_objective
    if not isinstance(objective, MultiObjective):
        raise RecipeError(
            f"federation.method '{config.method}' trains one objective: use a recipe of"
            " several, such as multi-objective/demo."
        )
    return objective


def _time_step(
    resident: ResidentPolicy, prompts: Sequence[str], config: MultiObjective, training: Training, count: int
) -> tuple[StepTimes, int]:
    """Times of a step with so many objectives, and the tokens of its batch."""
    from components.learning.multi_objective_ppo import MultiObjectivePpo

    rewards = {f"objective {index}": _length_reward(index + 3) for index in range(count)}
    ppo = MultiObjectivePpo(resident, rewards, config, training)
    start = time.perf_counter()
    rollout, advantages = ppo.sample(prompts, training.seed)
    middle = time.perf_counter()
    ppo.gradients(rollout, advantages, np.arange(len(rollout.rows)))
    end = time.perf_counter()
    return StepTimes(middle - start, end - middle), int(rollout.lengths.sum())


def _length_reward(modulus: int) -> RewardFunction:
    """A reward by a text's length that costs nothing."""

    def score(prompts: Sequence[str], texts: Sequence[str]) -> Array:
        return np.array([float(len(text) % modulus) for text in texts])

    return score


def compare_solvers(repeats: int) -> Ratios:
    """Print the table of a solution of MGDA on the faces of the simplex, and by cvxpy.

    Returns:
        the speed-up of the faces for each number of objectives, a ratio of medians.
    """
    from components.learning.mgda import solve, solve_with_cvxpy

    count = SOLUTIONS_PER_REPEAT * repeats
    print(f"\nA solution of MGDA, median of {count}")
    print(f"  {'M':<4}{'faces, ms':>12}{'cvxpy, ms':>12}{'largest difference of a weight':>34}")
    ratios = {}
    for objectives in SOLVED_OBJECTIVES:
        vectors = np.random.default_rng(objectives).normal(size=(objectives, 50))
        gram = vectors @ vectors.T
        faces, faces_ms = _time_solver(solve, gram, count)
        cvxpy, cvxpy_ms = _time_solver(solve_with_cvxpy, gram, count)
        difference = np.abs(faces - cvxpy).max()
        print(f"  {objectives:<4}{faces_ms:>12.3f}{cvxpy_ms:>12.3f}{difference:>34.1e}")
        ratios[f"mgda/faces_against_cvxpy_for_{objectives}"] = cvxpy_ms / faces_ms
    return ratios


def _time_solver(solve: Callable[[Array, float], Array], gram: Array, count: int) -> tuple[Array, float]:
    """The weights, and the median time of a solution in milliseconds."""
    weights = solve(gram, BETA)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        solve(gram, BETA)
        times.append(time.perf_counter() - start)
    return weights, 1e3 * statistics.median(times)
