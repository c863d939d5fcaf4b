"""Options of methods that average adapters trained on preference pairs (FedDPO, FedProx, FFA-LoRA)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from components.config import DpoObjective, FederationConfig, OfflinePpoObjective, one_of
from components.federation.aggregators.base import AnyAggregator, aggregator_of
from components.federation.aggregators.weighted import ParticipationMean
from components.federation.averaging import FederatedAveraging
from components.federation.postprocessing import postprocessors_of
from components.federation.protocol import RatedMethod
from components.models.store import AdapterStore

PairObjective = Annotated[DpoObjective | OfflinePpoObjective, one_of(DpoObjective, OfflinePpoObjective)]
"""Type of an option that takes DPO, or PPO on the same pairs."""


class AveragedPairTraining(RatedMethod):
    """Clients train one shared adapter by DPO or PPO, and an aggregator combines the adapters."""

    trainer: ClassVar[str] = "policy"

    objective: PairObjective = Field(
        default_factory=DpoObjective, description="Local objective: dpo, or ppo with the recipe's one reward."
    )
    aggregator: AnyAggregator = Field(
        default_factory=ParticipationMean, description="How the server combines the clients' adapters."
    )

    @property
    def local_objective(self) -> DpoObjective | OfflinePpoObjective:
        """DPO or PPO."""
        return self.objective

    def build(self, config: FederationConfig, store: AdapterStore) -> FederatedAveraging:
        """Federated averaging of the policy's adapter."""
        return FederatedAveraging(
            config,
            store,
            aggregator_of(self.aggregator),
            stateful=self.keeps_client_state(config),
            postprocessors=postprocessors_of(config),
        )
