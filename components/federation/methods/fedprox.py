"""FedProx: FedDPO with a proximal term (Li et al. 2020).

Each client minimizes its own loss + mu / 2 |phi - phi_r|^2, where phi_r is the adapter that it
received (Federated Optimization in Heterogeneous Networks, eq. 2). The term is a part of the
clients' loss, so the server averages as in FedDPO.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from components.federation.local import Local, proximal_wrap
from components.federation.pair_training import AveragedPairTraining


class FedProx(AveragedPairTraining):
    """Options of FedProx."""

    sums_protect_clients: ClassVar[bool] = True

    proximal: float = Field(0.01, gt=0)
    """Weight of the proximal term (mu); Li et al. try 0.001, 0.01, 0.1 and 1."""

    def local(self) -> Local:
        return replace(super().local(), wrap=proximal_wrap(self.proximal))
