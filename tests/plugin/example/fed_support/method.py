"""FedDPO whose server takes partial steps.

phi_m   = OPTIM(m, phi_r, K)   for the sampled clients m, by DPO
phi_r+1 = phi_r + lr (mean of the phi_m - phi_r)
"""

from __future__ import annotations

from pydantic import Field

from fed_rlhf import AnyAggregator, AveragingMethod, DpoObjective, Local
from fed_support.aggregator import ServerStep


class FedDpoStep(AveragingMethod):
    """Options of FedDPO with partial steps."""

    objective: DpoObjective = Field(default_factory=DpoObjective, description="Local objective.")
    aggregator: AnyAggregator = Field(default_factory=ServerStep, description="The server's step.")

    def local(self) -> Local:
        return Local(self.objective)
