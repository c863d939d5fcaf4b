"""FIRM: several objectives, whose conflict each client resolves by itself (FIRM algorithm 1), by PPO with several rewards.

    for r in 0 .. R-1:
        A_r     = A clients sampled uniformly without replacement, who receive phi_r
        phi_m   = K local steps from phi_r, each on sampled completions along sum of lambda_j g_j, lambda by regularised MGDA (components/learning/multi_objective.py)
        phi_r+1 = sum of p_m phi_m / sum of p_m

One adapter goes up and one comes down, however many objectives there are. What a client remembers from round to round (value heads, the moments of its
rewards, the coefficient of its penalty) stays in its own store. The server logs how far the clients disagree: the mean distance of two clients' lambda in the same step of the round, that of
their means over the round, and the mean distance of two clients' updates.

Other ways to the weights: `beta: 0` is MGDA without regularisation, `weights` are fixed ones (linear scalarisation; a single objective with weight 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, model_validator

from components.config import Section
from components.federation import aggregation, fedavg, personal
from components.federation.strategy import ServerState, Update
from components.learning.multi_objective import Coefficients

Preference = Annotated[float, Field(ge=1e-3, le=1e3)]
ObjectiveName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
BETA = 0.1
"""Of MGDA where a recipe says nothing."""
TRAJECTORY = "lambda_steps"
"""Among a client's metrics: lambda of each of its steps, by objective."""


class PpoConfig(Section):
    """Coefficients of PPO on sampled completions (FIRM A.1), see components/learning/multi_objective.py."""

    epochs: int = Field(3, ge=1, description="Passes over the completions of a local step; FIRM A.1: 3.")
    minibatch: int = Field(8, ge=1, description="Completions an optimiser step; FIRM A.1: 8, of batches of 16.")
    temperature: float = Field(1.0, gt=0, description="Of the policy that samples, and at which log-probabilities, gradients and the KL are taken; rewards are measured at it, too.")
    clip: float = Field(0.2, gt=0, lt=1, description="Clip of the ratio, and of the values; Schulman et al. 2017: 0.2.")
    lam: float = Field(0.95, ge=0, le=1, description="Lambda of GAE; rewards are not discounted.")
    kl: float = Field(0.1, ge=0, description="First coefficient of the penalty to the reference, nats to normalised reward.")
    target_kl: float | None = Field(6.0, gt=0, description="What an adaptive controller holds the KL to the reference at (nats a completion); None leaves the coefficient as it is. Ziegler et al. 2019: 6.")
    horizon: int = Field(10_000, ge=1, description="Completions over which the controller corrects an error of a fifth; Ziegler et al. 2019: 10,000.")
    critic_lr: float = Field(1e-3, gt=0, description="Learning rate of the value heads; that of the policy is federation.optimizer.lr.")
    normalise: bool = Field(True, description="Whether a client's rewards are divided by the standard deviation of those it has seen, less their mean, for each objective; FIRM section 5 brings scores to a fixed range instead, which the text that this was written from has lost.")

    @model_validator(mode="after")
    def _can_be_moved(self) -> PpoConfig:
        if not self.kl and self.target_kl is not None:
            raise ValueError("kl is 0, from where the controller cannot move it: set target_kl to null, or give a first coefficient")
        return self


class CommonOptions(fedavg.Options):
    """Options of all methods with several objectives."""

    objectives: Annotated[dict[ObjectiveName, Annotated[list[str], Field(min_length=1)]], Field(min_length=1)] = Field(
        description="By objective, the recipe's rewards that measure it; of several, the clients use one each, in turn by their sorted names (FIRM A.2.1), and the policies are measured by the first.")
    ppo: PpoConfig = Field(default_factory=PpoConfig, description="Of the clients' local steps.")
    reward_prompts: int = Field(32, ge=1, description="Held-out prompts that the server's policy answers when its rewards are measured.")

    @model_validator(mode="after")
    def _named(self) -> CommonOptions:
        for name in ("kl", "prompts"):
            if name in self.objectives:
                raise ValueError(f"an objective cannot be called '{name}', which is the name of something else that is measured: call it something else")
        return self


def check_names(kind: str, given: Sequence[str], objectives: Sequence[str]) -> None:
    """Refuse names of objectives that there are not.

    Raises:
        ValueError: naming the first.
    """
    for name in given:
        if name not in objectives:
            raise ValueError(f"{kind} names '{name}', which is no objective (there are: {', '.join(objectives)})")


class Options(CommonOptions):
    """Options of FIRM."""

    beta: float | None = Field(None, ge=0, description="Regularisation of MGDA over the Gram matrix divided by its trace (eq. 9); 0: none; None: 0.1, and with weights there is none. The value of FIRM A.1 is lost in the text that this was written from.")
    preference: dict[str, Preference] | None = Field(None, description="p of eq. 3 by objective, 1 where one is not named; larger weighs more.")
    weights: dict[str, Annotated[float, Field(ge=0)]] | None = Field(None, description="Fixed weights by objective in place of MGDA's, 0 where one is not named; they are divided by their sum.")

    @model_validator(mode="after")
    def _consistent(self) -> Options:
        check_names("preference", list(self.preference or {}), list(self.objectives))
        check_names("weights", list(self.weights or {}), list(self.objectives))
        if self.preference is not None and self.beta == 0:
            raise ValueError("preference works through the regularisation, and beta is 0: give a beta above 0, or leave out the preference")
        if self.weights is not None:
            if not sum(self.weights.values()):
                raise ValueError("weights are all 0: give one objective a weight")
            if self.preference is not None or self.beta is not None:
                raise ValueError("weights take the place of MGDA's, to which beta and preference belong: leave out one or the other (federation.options.beta=null)")
        return self

    def coefficients(self, weights: Sequence[float] = ()) -> Coefficients:
        """Of a client's local steps; `weights` are those that the server asks for, by objective."""
        fixed = dict(zip(self.objectives, weights, strict=True)) if weights else self.weights
        whole = sum(fixed.values()) if fixed else 1.0
        return Coefficients(
            temperature=self.ppo.temperature, clip=self.ppo.clip, lam=self.ppo.lam, epochs=self.ppo.epochs, minibatch=self.ppo.minibatch, target_kl=self.ppo.target_kl, horizon=self.ppo.horizon, normalise=self.ppo.normalise,
            beta=BETA if self.beta is None else self.beta, preference=self.preference, weights=fixed and {name: value / whole for name, value in fixed.items()})


class Firm(personal.Remembering):
    """The strategy; see the module's docstring."""

    trains: ClassVar[str] = "rewards"
    options: CommonOptions

    def aggregate(self, state: ServerState, updates: Sequence[Update]) -> ServerState:
        """As FedAvg's, with the clients' disagreement in the log."""
        new = super().aggregate(state, updates)
        return replace(new, log=new.log | self._disagreement(state, updates))

    def _disagreement(self, state: ServerState, updates: Sequence[Update]) -> dict[str, float]:
        answered = sorted(updates, key=lambda update: update.job.client)
        steps = np.array([[update.metrics[TRAJECTORY][name] for name in self.options.objectives] for update in _as_long(answered)])  # [clients, M, steps]
        weights = steps.mean(axis=2)
        with self.store.opened([*(update.adapter for update in answered), state.adapters[self.slot]]) as (*trained, before):
            products = aggregation.inner_products(trained, before)
        squares = np.diag(products)
        apart = np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2 * products, 0.0))
        return {"lambda_drift": float(np.mean([mean_distance(now) for now in np.moveaxis(steps, 2, 0)])), "mean_lambda_drift": mean_distance(weights), "update_drift": _mean_of_pairs(apart)} | {
            f"lambda/{name}": float(column.mean()) for name, column in zip(self.options.objectives, weights.T, strict=True)}


def _as_long(updates: Sequence[Update]) -> list[Update]:
    """Updates with as many steps of lambda as the shortest has: clients with fewer prompts may take fewer."""
    least = min(len(values) for update in updates for values in update.metrics[TRAJECTORY].values())
    return [replace(update, metrics=update.metrics | {TRAJECTORY: {name: values[:least] for name, values in update.metrics[TRAJECTORY].items()}}) for update in updates]


def mean_distance(points: np.ndarray) -> float:
    """Mean Euclidean distance of two of K points, [K, D]; 0 of one."""
    return _mean_of_pairs(np.linalg.norm(points[:, None] - points[None, :], axis=-1))


def _mean_of_pairs(distances: np.ndarray) -> float:
    pairs = [distances[i, j] for i, j in combinations(range(len(distances)), 2)]
    return float(np.mean(pairs)) if pairs else 0.0


build = Firm.build
