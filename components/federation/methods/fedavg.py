"""FedAvg (McMahan et al. 2017), as the baseline of that name in FedBiscuit section 7.1.

Each client trains the policy on the completions that it chose, and the server averages the LoRA
adapters:

    phi_m   = OPTIM(m, phi_r, K)   for the sampled clients m
    phi_r+1 = sum of p_m phi_m / sum of p_m, or another aggregator's combination
"""

from __future__ import annotations

from typing import ClassVar

from components.config.local_objectives import SftObjective
from components.federation.local import Local
from components.federation.method import AveragingMethod


class FedAvg(AveragingMethod):
    """Options of FedAvg."""

    sums_protect_clients: ClassVar[bool] = True

    def local(self) -> Local:
        return Local(SftObjective())
