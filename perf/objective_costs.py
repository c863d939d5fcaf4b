"""Costs of several objectives: a local step of FIRM, and the solution of MGDA's quadratic program."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from components.config import MultiObjective, RecipeError
from perf.harness import Ratios, alternate, compare, load_pairs, prepare_process, show

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


def compare_objectives(recipe_name: str, repeats: int) -> Ratios:
    """The gradients of a local step of FIRM by the number of objectives, with rewards that cost nothing.

    Returns:
        for each M above 1, the time of the gradients of one objective over that of M.

    Raises:
        RecipeError: the recipe's method does not train several objectives.
    """
    from components.learning.loop import Training
    from components.models.resident import ResidentPolicy

    recipe, device = prepare_process(recipe_name)
    config = _multi_objective(recipe.federation)
    resident = ResidentPolicy(recipe.policy, device)
    resident.slot.load(resident.slot.initial_adapter(recipe.seed))
    prompts = list(dict.fromkeys(pair["prompt"] for pair in load_pairs(recipe)))
    prompts = prompts[: recipe.federation.batch_size]
    training = Training(1, len(prompts), recipe.federation.optimizer, recipe.seed)
    calls = {
        str(count): partial(_time_step, resident, prompts, config, training, count)
        for count in range(1, MAX_OBJECTIVES + 1)
    }
    alternate(calls, 1)  # warms up
    frame = alternate(calls, repeats)
    pairs = {f"objectives/one_against_{count}": (str(1), count) for count in calls if count != "1"}
    return compare(f"Local step ({recipe_name}: {len(prompts)} completions, {device})", frame, pairs)


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
) -> dict[str, float]:
    """Seconds of the gradients of a step with so many objectives, of its rollout, and its tokens."""
    from components.learning.multi_objective_ppo import MultiObjectivePpo

    rewards = {f"objective {index}": _length_reward(index + 3) for index in range(count)}
    ppo = MultiObjectivePpo(resident, rewards, config, training)
    start = time.perf_counter()
    rollout, advantages = ppo.sample(prompts, training.seed)
    middle = time.perf_counter()
    ppo.gradients(rollout, advantages, np.arange(len(rollout.rows)))
    end = time.perf_counter()
    return {"seconds": end - middle, "rollout": middle - start, "tokens": int(rollout.lengths.sum())}


def _length_reward(modulus: int) -> RewardFunction:
    """A reward by a text's length that costs nothing."""

    def score(prompts: Sequence[str], texts: Sequence[str]) -> Array:
        return np.array([float(len(text) % modulus) for text in texts])

    return score


def compare_solvers(_: str, repeats: int) -> Ratios:
    """A solution of MGDA on the faces of the simplex, and by cvxpy.

    Returns:
        the speed-up of the faces for each number of objectives, a ratio of medians.
    """
    import pandas as pd

    from components.learning.mgda import solve, solve_with_cvxpy

    count = SOLUTIONS_PER_REPEAT * repeats
    rows = []
    for objectives in SOLVED_OBJECTIVES:
        vectors = np.random.default_rng(objectives).normal(size=(objectives, 50))
        gram = vectors @ vectors.T
        faces, faces_ms = _time_solver(solve, gram, count)
        cvxpy, cvxpy_ms = _time_solver(solve_with_cvxpy, gram, count)
        difference = float(np.abs(faces - cvxpy).max())
        rows.append((objectives, faces_ms, cvxpy_ms, difference))
    columns = ["M", "faces, ms", "cvxpy, ms", "largest difference of a weight"]
    show(f"A solution of MGDA, median of {count}", pd.DataFrame(rows, columns=columns))
    return {f"mgda/faces_against_cvxpy_for_{count}": [cvxpy / faces] for count, faces, cvxpy, _ in rows}


def _time_solver(solve: Callable[[Array, float], Array], gram: Array, count: int) -> tuple[Array, float]:
    """The weights, and the median time of a solution in milliseconds."""
    weights = solve(gram, BETA)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        solve(gram, BETA)
        times.append(time.perf_counter() - start)
    return weights, 1e3 * statistics.median(times)
