"""Per-FedAvg: an adapter that a few steps turn into each client's own (Fallah et al. 2020), by DPO.

Clients take meta-steps (components/learning/meta.py, first order), and the server averages. A
client uses the adapter that a few inner steps on its own pairs reach from the server's; it is
recomputed when it is needed, and never leaves the client.

FedPDPO D.3.1 names inner steps of 0.01 (5 of them), outer steps of 0.001, and AdamW for all
methods. We read this as AdamW for the outer steps and, as in Fallah et al., plain gradient descent
for the inner ones. The budget of a round counts gradients: a meta-step takes one minibatch for each
inner step, and one more. PPO is used without value head, epochs and target KL.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from components.config import DpoObjective, FederationConfig, PairPpoObjective, one_of
from components.federation.aggregators.base import AnyAggregator, aggregator_of
from components.federation.aggregators.weighted import ParticipationMean
from components.federation.averaging import FederatedAveraging
from components.federation.postprocessing import postprocessors_of
from components.federation.protocol import Method
from components.models.adapters import AdapterStore


class Options(Method):
    """Options of Per-FedAvg."""

    trainer: ClassVar[str] = "meta"

    inner_lr: float = Field(
        0.01,
        gt=0,
        description="Learning rate of the adaptation, by plain gradient descent; FedPDPO D.3.1: 0.01.",
    )
    inner_steps: int = Field(
        5,
        ge=1,
        description=(
            "Steps of the adaptation; FedPDPO D.3.1: 5. Each takes a minibatch of the round's local steps."
        ),
    )
    outer_lr: float = Field(
        1e-3,
        gt=0,
        description=(
            "Learning rate of the meta-steps, in place of federation.optimizer.lr; FedPDPO D.3.1: 0.001."
        ),
    )
    objective: Annotated[DpoObjective | PairPpoObjective, one_of(DpoObjective, PairPpoObjective)] = Field(
        default_factory=DpoObjective,
        description=(
            "Local objective: dpo, or ppo with the recipe's one reward, without value head and epochs."
        ),
    )
    aggregator: AnyAggregator = Field(
        default_factory=ParticipationMean, description="How the server combines the clients' adapters."
    )

    @property
    def local_objective(self) -> DpoObjective | PairPpoObjective:
        """DPO or PPO."""
        return self.objective

    def build(self, config: FederationConfig, store: AdapterStore) -> FederatedAveraging:
        """Federated averaging of the policy's adapter, which each client adapts."""
        return FederatedAveraging(
            config,
            store,
            aggregator_of(self.aggregator),
            outcome_kind="personalized-clients",
            stateful=self.keeps_client_state(config),
            postprocessors=postprocessors_of(config),
        )
