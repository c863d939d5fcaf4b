"""FedDPO whose server takes partial steps.

phi_m   = OPTIM(m, phi_r, K)   for the sampled clients m, by DPO
phi_r+1 = phi_r + lr (mean of the phi_m - phi_r)
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from components.config import DpoObjective, FederationConfig
from components.federation.aggregators.base import AnyAggregator, aggregator_of
from components.federation.averaging import FederatedAveraging
from components.federation.postprocessing import postprocessors_of
from components.federation.protocol import Method
from components.models.store import AdapterStore
from fed_support.aggregator import ServerStep


class Options(Method):
    """Options of FedDPO with partial steps."""

    trainer: ClassVar[str] = "policy"

    objective: DpoObjective = Field(default_factory=DpoObjective, description="Local objective.")
    aggregator: AnyAggregator = Field(default_factory=ServerStep, description="The server's step.")

    @property
    def local_objective(self) -> DpoObjective:
        """DPO."""
        return self.objective

    def build(self, config: FederationConfig, store: AdapterStore) -> FederatedAveraging:
        """Federated averaging with the server's step."""
        return FederatedAveraging(
            config, store, aggregator_of(self.aggregator), postprocessors=postprocessors_of(config)
        )
