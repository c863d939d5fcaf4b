"""Methods whose clients train one shared adapter on preference pairs (FedDPO, FedProx, FFA-LoRA, ...)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from components.config import DpoObjective, FederationConfig, one_of
from components.config.objectives import OfflinePpoObjective
from components.federation.method import AveragingMethod, Method

PairObjective = Annotated[DpoObjective | OfflinePpoObjective, one_of(DpoObjective, OfflinePpoObjective)]
"""Type of an option that takes DPO, or PPO on the same pairs."""


class RatedMethod(Method):
    """A method whose clients train on pairs, with a learning rate of the method's own."""

    decays_rates: ClassVar[bool] = True

    lr: float | None = Field(
        None,
        gt=0,
        description="Learning rate of the clients' shared adapter; null: federation.optimizer.lr.",
    )

    def learning_rate(self, config: FederationConfig) -> float:
        """The method's own learning rate, or the optimizer's."""
        return config.optimizer.lr if self.lr is None else self.lr


class PairTraining(RatedMethod):
    """A method whose clients train by DPO, or by PPO on the same pairs."""

    objective: PairObjective = Field(
        default_factory=DpoObjective, description="Local objective: dpo, or ppo with the recipe's one reward."
    )


class AveragedPairTraining(PairTraining, AveragingMethod):
    """Clients train one shared adapter by DPO or PPO, and an aggregator combines the adapters."""
