"""FedAvg (McMahan et al. 2017), as the baseline of that name in FedBiscuit section 7.1.

Each client trains the policy on the completions that it chose, and the server averages the LoRA
adapters:

    phi_m   = OPTIM(m, phi_r, K)   for the sampled clients m
    phi_r+1 = sum of p_m phi_m / sum of p_m, or another aggregator's combination
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from components.config import FederationConfig, SftObjective
from components.federation.aggregators.base import AnyAggregator, aggregator_of
from components.federation.aggregators.weighted import ParticipationMean
from components.federation.averaging import FederatedAveraging
from components.federation.postprocessing import postprocessors_of
from components.federation.protocol import Method
from components.models.store import AdapterStore


class Options(Method):
    """Options of FedAvg."""

    trainer: ClassVar[str] = "policy"

    aggregator: AnyAggregator = Field(
        default_factory=ParticipationMean, description="How the server combines the clients' adapters."
    )

    @property
    def local_objective(self) -> SftObjective:
        """The chosen completions' negative log-likelihood."""
        return SftObjective()

    def build(self, config: FederationConfig, store: AdapterStore) -> FederatedAveraging:
        """Federated averaging of the policy's adapter."""
        return FederatedAveraging(
            config, store, aggregator_of(self.aggregator), postprocessors=postprocessors_of(config)
        )
