"""FedRep: a shared representation under each client's own head (Collins et al. 2021), by DPO.

In each round a client first trains its head on the representation that it received, then the
representation under its head (algorithm 1 of Exploiting Shared Representations for Personalized
Federated Learning). Here the representation is the backbone with the shared LoRA, and the head an
untied copy of the language-model head. FedPDPO D.3.1 names learning rates of 1e-4 and 5e-5.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from components.config import PersonalModules
from components.config.modules import StageLength
from components.federation.local import Local
from components.federation.pair_training import PairTraining
from components.federation.personalization import PersonalizedMethod


class FedRep(PersonalizedMethod, PairTraining):
    """Options of FedRep."""

    personal: StageLength = Field(default_factory=StageLength)
    """The personal stage."""

    def local(self) -> Local:
        modules = PersonalModules()
        rate = self.personal.lr
        return replace(
            super().local(), own="modules", personal=modules, personal_lr=rate, stage=self.personal
        )
