"""FedBis: one binary selector by federated averaging (FedBiscuit section 4 and appendix A.1).

step 1: the server broadcasts phi_r to A sampled clients
step 2: phi_m = OPTIM(m, phi_r, K) on the cross-entropy of the binary choice (eq. 7)
step 3: phi_r+1 = (M / A) sum of p_m phi_m (eq. 8, aggregator `paper`), or a normalized mean
"""

from __future__ import annotations

from typing import ClassVar, Literal

from components.config.local_objectives import SelectorObjective
from components.federation.local import Local
from components.federation.method import AveragingMethod


class FedBis(AveragingMethod):
    """Options of FedBis."""

    sums_protect_clients: ClassVar[bool] = True

    trained_model: ClassVar[Literal["selector", "policy"]] = "selector"
    trainer: ClassVar[str] = "selector"

    def local(self) -> Local:
        return Local(SelectorObjective())
