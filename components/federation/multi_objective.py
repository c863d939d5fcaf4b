"""Options and metrics that methods with several objectives share (FIRM and FedCMOO-A)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from typing import Annotated, ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from components.config import FederationConfig, MultiObjective, PpoConfig, Recipe, RecipeError, unknown_name
from components.federation import aggregation
from components.federation.local import Local, SampledRewards
from components.federation.method import AveragingMethod
from components.federation.protocol import Job, Update
from components.federation.server import Server, State
from components.federation.step_answers import Weights
from components.models.rewards.reward_section import RewardSection
from components.models.store import Adapter

Preference = Annotated[float, Field(ge=1e-3, le=1e3)]
ObjectiveName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
Weight = Annotated[float, Field(ge=0)]

DEFAULT_BETA = 0.1
"""Regularization of MGDA where a recipe names none.

The value of FIRM A.1 is missing in the available text.
"""
REWARDS_MEASURE = "rewards"
"""Name of the measured rewards of the server's policies in results."""
RESERVED_NAMES = ("kl", "prompts")
"""Names of other numbers that are measured together with the objectives."""


def weight_series(objective: str) -> str:
    """Name of the series of a client's metrics that has lambda of an objective in each local step."""
    return f"lambda/{objective}"


class MultiObjectiveMethod(AveragingMethod):
    """Options of methods with several objectives; the base of their `Options`."""

    trainer: ClassVar[str] = "multi-objective"
    diagnostics: ClassVar[tuple[str, ...]] = ("objectives",)
    objectives: Annotated[dict[ObjectiveName, Annotated[list[str], Field(min_length=1)]], Field(min_length=1)]
    """By objective, the names of the recipe's rewards that measure it. With several rewards, each
    client uses one, assigned round-robin by the clients' sorted names (FIRM A.2.1), and policies
    are measured by the first."""
    ppo: PpoConfig = Field(default_factory=PpoConfig)
    """PPO of the clients' local steps."""
    reward_prompts: int = Field(32, ge=1)
    """Held-out prompts that the server's policy answers when its rewards are measured."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for name in RESERVED_NAMES:
            if name in self.objectives:
                raise ValueError(
                    f"an objective cannot be named '{name}', which is the name of another measured number:"
                    " use another name"
                )
        for name in self.objectives:
            for ending in ("_min", "_max"):
                if f"{name}{ending}" in self.objectives:
                    raise ValueError(
                        f"an objective cannot be named '{name}{ending}' beside '{name}', whose smallest and"
                        " largest values over the clients have such names: use another name"
                    )
        return self

    def local(self) -> Local:
        """Weights of MGDA in each local step."""
        return Local(self.build_objective(()))

    @property
    def sampling(self) -> SampledRewards:
        return SampledRewards(
            objectives=self.objectives,
            preferences=self.preferences(),
            prompts=self.reward_prompts,
            temperature=self.ppo.temperature,
            kl_estimator=self.ppo.kl_estimator,
        )

    @abstractmethod
    def build_objective(self, server_weights: Sequence[float]) -> MultiObjective:
        """The local objective, with the weights of the objectives that the server sets, if it does."""

    @abstractmethod
    def preferences(self) -> dict[str, float]:
        """By objective, how much it is preferred, for the figures of a front of preferences."""

    def sums(self, state: State, jobs: Sequence[Job], config: FederationConfig) -> Weights | None:
        """None: round_metrics compares the clients' updates."""
        return None

    def round_metrics(self, state: State, updates: Sequence[Update], server: Server) -> dict[str, float]:
        """How far the clients of a round disagree.

        lambda_drift is the mean distance of two clients' lambda in the same local step,
        mean_lambda_drift that of their means over the round, update_drift the mean distance of two
        clients' updates; the others are the means of each lambda.
        """
        objectives = list(self.objectives)
        # lambda of each local step, [clients, objectives, steps of the shortest round]: clients with
        # fewer prompts may take fewer steps.
        series = [[update.metrics.series[weight_series(name)] for name in objectives] for update in updates]
        length = min(len(values) for values in chain.from_iterable(series))
        steps = np.array([[values[:length] for values in client] for client in series])
        weights = steps.mean(axis=2)
        before = server.store.get(
            state.initial if self.adapters_by_client else state.adapters[self.trained_model]
        )
        products = aggregation.inner_products(server.contributions(state).open(), before)
        squares = np.diag(products)
        distances = np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2 * products, 0.0))
        means = zip(objectives, weights.T, strict=True)
        return {
            "lambda_drift": float(np.mean([mean_distance(step) for step in np.moveaxis(steps, 2, 0)])),
            "mean_lambda_drift": mean_distance(weights),
            "update_drift": _mean_over_pairs(distances),
            **{f"lambda/{name}": float(column.mean()) for name, column in means},
        }

    def check(self, recipe: Recipe) -> None:
        """Refuse optimizer settings and rewards that do not fit PPO and the objectives."""
        self.check_averages(recipe)
        self._check_optimizer(recipe)
        self._check_rewards(recipe.rewards)

    def _check_optimizer(self, recipe: Recipe) -> None:
        optimizer = recipe.federation.optimizer
        required: dict[str, tuple[object, object]] = {
            "federation.optimizer.scheduler": (optimizer.scheduler, "constant"),
            "federation.optimizer.warmup_steps": (optimizer.warmup_steps, 0),
            "federation.optimizer.accumulation": (optimizer.accumulation, 1),
            "federation.rate_decay": (recipe.federation.rate_decay, None),
            "policy.lora.dropout": (recipe.policy.lora.dropout, 0.0),
        }
        for key, (value, only) in required.items():
            if value != only:
                raise RecipeError(
                    f"{key} is {value}, which PPO on sampled completions does not use: set it to {only}."
                )
        batch = recipe.federation.batch_size
        samples = self.ppo.estimator.samples
        if batch % samples:
            raise RecipeError(
                f"federation.batch_size is {batch} completions, which are not complete groups of {samples}"
                " per prompt: set it to a multiple of federation.options.ppo.estimator.samples."
            )
        if self.ppo.keep_moments and optimizer.name == "adamw_8bit":
            raise RecipeError(
                "federation.options.ppo.keep_moments is true, but the state of adamw_8bit cannot be kept: set"
                " federation.optimizer.name to adamw, or keep_moments to false."
            )
        if self.ppo.target_kl is not None and self.ppo.horizon <= batch / 5:
            raise RecipeError(
                f"federation.options.ppo.horizon is {self.ppo.horizon}, with which one batch of {batch}"
                " completions (federation.batch_size) could turn the KL penalty negative: set it above a"
                " fifth of the batch, or target_kl to null."
            )

    def _check_rewards(self, rewards: Mapping[str, RewardSection]) -> None:
        used = list(chain.from_iterable(self.objectives.values()))
        for name in used:
            if name not in rewards:
                raise RecipeError(unknown_name("federation.options.objectives: reward", name, rewards))
            if rewards[name].compares_pairs:
                raise RecipeError(
                    f"rewards.{name} is of kind '{rewards[name].kind}', which compares two responses;"
                    " an objective needs the score of one: use kind trained, classifier or function."
                )
        unused = sorted(set(rewards) - set(used))
        if unused:
            raise RecipeError(
                f"rewards names {', '.join(unused)}, which no objective of federation.options.objectives"
                " uses: leave it out, or name it there."
            )


def check_objective_names(
    key: str, names: Mapping[str, float] | None, objectives: Mapping[str, object]
) -> None:
    """Refuse names of objectives that do not exist, by a ValueError."""
    for name in names or {}:
        if name not in objectives:
            raise ValueError(
                f"{key} names '{name}', which is no objective (there are: {', '.join(objectives)})"
            )


def check_preference(
    preference: Mapping[str, float] | None, objectives: Mapping[str, object], regularized: bool
) -> None:
    """Refuse a preference for unknown objectives or without a regularization, by a ValueError."""
    check_objective_names("preference", preference, objectives)
    if preference is not None and not regularized:
        raise ValueError(
            "preference acts through the regularization, and beta is 0: set beta above 0, or leave out"
            " the preference"
        )


def mean_distance(points: npt.NDArray[np.float64]) -> float:
    """Mean Euclidean distance of two of K points, [K, D]; 0 of one."""
    return _mean_over_pairs(np.linalg.norm(points[:, None] - points[None, :], axis=-1))


def _mean_over_pairs(distances: npt.NDArray[np.float64]) -> float:
    pairs = [distances[i, j] for i, j in combinations(range(len(distances)), 2)]
    return float(np.mean(pairs)) if pairs else 0.0


def gradient_name(objective: str, tensor: str) -> str:
    """Name of an objective's gradient of a tensor, in the file that a client sends."""
    return f"{objective}/{tensor}"


def gram_matrix(gradients: Adapter, objectives: Sequence[str]) -> npt.NDArray[np.float64]:
    """Inner products of the M objectives' gradients, [M, M]."""
    prefix = gradient_name(objectives[0], "")
    total = np.zeros((len(objectives), len(objectives)))
    for tensor in sorted(name.removeprefix(prefix) for name in gradients if name.startswith(prefix)):
        rows = [gradients[gradient_name(name, tensor)].double().numpy().ravel() for name in objectives]
        block = np.stack(rows)
        total += block @ block.T
    return total
