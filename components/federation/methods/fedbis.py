"""FedBis: one binary selector by federated averaging (FedBiscuit section 4 and appendix A.1).

step 1: the server broadcasts phi_r to A sampled clients
step 2: phi_m = OPTIM(m, phi_r, K) on the cross-entropy of the binary choice (eq. 7)
step 3: phi_r+1 = (M / A) sum of p_m phi_m (eq. 8, aggregator `paper`), or a normalized mean
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from components.config import FederationConfig, SelectorObjective
from components.federation.aggregators.base import AnyAggregator, aggregator_of
from components.federation.aggregators.weighted import ParticipationMean
from components.federation.averaging import FederatedAveraging
from components.federation.postprocessing import postprocessors_of
from components.federation.protocol import Method
from components.models.store import AdapterStore


class Options(Method):
    """Options of FedBis."""

    trained_model: ClassVar[Literal["selector", "policy"]] = "selector"
    trainer: ClassVar[str] = "selector"

    aggregator: AnyAggregator = Field(
        default_factory=ParticipationMean, description="How the server combines the clients' adapters."
    )

    @property
    def local_objective(self) -> SelectorObjective:
        """Cross-entropy of the binary choice."""
        return SelectorObjective()

    def build(self, config: FederationConfig, store: AdapterStore) -> FederatedAveraging:
        """Federated averaging of one selector."""
        return FederatedAveraging(
            config,
            store,
            aggregator_of(self.aggregator),
            slot="selector",
            outcome_kind="selector-ensemble",
            postprocessors=postprocessors_of(config),
        )
