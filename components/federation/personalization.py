"""Shared base of personalized methods, whose clients keep private modules (FedPDPO, FedPer, FedRep).

    for r in 0 .. R-1:                           # FedPDPO algorithm 1
        A_r       = A clients sampled uniformly without replacement
        private_m = OPTIM(private_m; phi_r)      # personal step: the modules in the client's store
        phi_m     = OPTIM(phi_r; private_m)      # shared step: the received adapter
        phi_r+1   = combination of the phi_m

FedPer takes both steps at once. private_m are the modules that the papers call personal. They are
in the client's private store, to which the server half, federated averaging of the shared adapter,
has no access.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Self

from pydantic import Field, model_validator

from components.config import FederationConfig, PairPpoObjective, PersonalModules, Section
from components.federation.aggregators.base import AnyAggregator, aggregator_of
from components.federation.aggregators.weighted import ParticipationMean
from components.federation.averaging import FederatedAveraging
from components.federation.postprocessing import postprocessors_of
from components.federation.protocol import Method
from components.models.adapters import AdapterStore


class RateDecay(Section):
    """Decay of a client's learning rates when its loss rises (FedPDPO D.3.1)."""

    factor: float = Field(
        0.8,
        gt=0,
        lt=1,
        description=(
            "Factor of both learning rates after a round in which the client's mean DPO loss was higher than"
            " in its previous one; FedPDPO D.3.1: 0.8."
        ),
    )
    min_lr: float = Field(
        1e-6, gt=0, description="Learning rate below which it does not fall; FedPDPO D.3.1: 1e-6."
    )


class StepLength(Section):
    """Learning rate and length of the personal step."""

    lr: float = Field(
        1e-4,
        gt=0,
        description=(
            "Learning rate; that of the shared step is federation.optimizer.lr. FedPDPO D.3: 1e-4 and 5e-5."
        ),
    )
    steps: int | None = Field(
        None, ge=1, description="Optimizer steps; null: as many as the shared step has, or `epochs`."
    )
    epochs: int | None = Field(
        None,
        ge=1,
        description="Passes over the client's rows, in place of steps; FedPDPO D.3: 1.",
    )

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                "steps and epochs both set the length of the personal step: leave out one of them"
            )
        return self


class PersonalizedMethod(Method):
    """Options of methods whose clients keep private modules; the base of their `Options`."""

    trainer: ClassVar[str] = "personalized"

    aggregator: AnyAggregator = Field(
        default_factory=ParticipationMean,
        description="How the server combines the clients' shared adapters.",
    )
    rate_decay: RateDecay | None = Field(
        None,
        description="Decay of the learning rates when the DPO loss rises; null: constant over the rounds.",
    )

    @property
    @abstractmethod
    def personal_modules(self) -> PersonalModules:
        """The modules that a client keeps to itself."""

    @property
    def personal_step(self) -> StepLength | None:
        """The personal step; None where private and shared modules are trained at once."""
        return None

    @model_validator(mode="after")
    def _check_rate_decay(self) -> Self:
        if self.rate_decay is not None and isinstance(self.local_objective, PairPpoObjective):
            raise ValueError(
                "rate_decay follows the loss of DPO, which objective 'ppo' does not have: leave it out"
            )
        return self

    def build(self, config: FederationConfig, store: AdapterStore) -> FederatedAveraging:
        """Federated averaging of the shared adapter among clients with private state."""
        return FederatedAveraging(
            config,
            store,
            aggregator_of(self.aggregator),
            outcome_kind="personalized-clients",
            stateful=True,
            postprocessors=postprocessors_of(config),
        )
