"""What a method's clients do, as a value that their trainers read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from components.config import FederationConfig, LocalObjective, PairPpoObjective, PersonalModules, Recipe
from components.federation.protocol import ServerState
from components.models.store import AdapterHash

if TYPE_CHECKING:
    from components.config.modules import StageLength
    from components.learning.loop import Loss
    from components.learning.wrapped_losses import LocalTraining

Factor = Literal["A", "B"]
"""A factor of LoRA's product B A."""


class Adaptation(NamedTuple):
    """Steps of plain gradient descent on a client's training pairs, from the server's adapter."""

    steps: int
    lr: float


@dataclass(frozen=True)
class Local:
    """What a client does in a round, and what it makes of the server's adapter when it uses it."""

    objective: LocalObjective  # what is minimized
    trains: bool = True  # whether there are rounds
    lr: float | None = None  # of the shared adapter; None: federation.optimizer.lr
    decays_rates: bool = False  # whether federation.rate_decay can apply
    frozen: tuple[Factor, ...] = ()  # LoRA factors that are not trained
    # The loss of the shared adapter's steps: one around the objective's. Tensors that it sends are declared
    # in `Method.update_template`. The function imports torch, so that a recipe can be read without.
    wrap: Callable[[Loss, LocalTraining], Loss] | None = None
    # What belongs to a client's model beside an adapter, and stays with it: private modules or steps on its
    # pairs, or examples in its prompts.
    own: Literal["", "modules", "examples"] = ""
    personal: PersonalModules | None = None  # the modules that a client keeps to itself
    personal_lr: float = 0.0
    stage: StageLength | None = None  # the personal stage; None: private and shared modules at once
    adaptation: Adaptation | None = None  # how the server's adapter is adapted before it is used
    example_tokens: int = 0  # that examples may take beside the longest input of the trained model

    def learning_rate(self, config: FederationConfig) -> float:
        """Learning rate of the shared adapter."""
        return config.optimizer.lr if self.lr is None else self.lr

    def rounds(self, config: FederationConfig) -> int:
        """Communication rounds."""
        return config.rounds if self.trains else 0

    def gradient_evaluations(self, config: FederationConfig, rows: int) -> int:
        """Gradient evaluations (one minibatch forward and backward) of a client in a round.

        Every method that trains on rows takes exactly as many, however it divides them: among private
        and shared modules (FedPDPO, FedRep), or among inner and outer steps (Per-FedAvg). FedPer's
        gradients are of both kinds of modules at once. PPO on pairs passes over all pairs of the
        client `epochs` times; a target KL may end it earlier.
        """
        if not self.trains:
            return 0
        if isinstance(self.objective, PairPpoObjective):
            return self.objective.epochs * math.ceil(rows / self.objective.minibatch)
        return config.local_steps_for(rows) * config.optimizer.accumulation

    def wrapped(self, loss: Loss, training: LocalTraining) -> Loss:
        """The loss of the shared adapter's steps, around the objective's where the method has one."""
        return loss if self.wrap is None else self.wrap(loss, training)


def proximal_wrap(weight: float) -> Callable[[Loss, LocalTraining], Loss] | None:
    """A loss with a proximal term of this weight to the received adapter; None for the weight 0."""

    def wrap(loss: Loss, local: LocalTraining) -> Loss:
        from components.learning.wrapped_losses import ProximalLoss

        return ProximalLoss(loss, list(local.parameters.values()), weight)

    return wrap if weight else None


@dataclass(frozen=True)
class SampledRewards:
    """Rewards of completions that clients sample in the rounds.

    Without, the recipe's rewards score the clients' pairs before the first round.
    """

    objectives: dict[str, list[str]]  # by objective, the names of the recipe's rewards that measure it
    preferences: dict[str, float]  # by objective, how much it is preferred
    prompts: int  # held-out prompts on which the server's policies are measured between rounds
    temperature: float  # at which the policy is trained and measured
    kl_estimator: str

    def fingerprint(self, recipe: Recipe) -> str:
        """What measures of the base policy depend on beside seed, data and policy."""
        first = {
            name: recipe.rewards[names[0]].model_dump(mode="json") for name, names in self.objectives.items()
        }
        sampling = [self.temperature, self.kl_estimator, self.prompts, recipe.federation.batch_size]
        return json.dumps([first, *sampling], sort_keys=True)


def rewarded_adapters(state: ServerState[Any]) -> dict[str, AdapterHash]:
    """The policies whose sampled rewards the server measures between rounds, on held-out prompts.

    By client; under the empty name where all use the same.
    """
    different = set(state.adapters.values())
    return dict(state.adapters) if len(different) > 1 else {"": different.pop()}
