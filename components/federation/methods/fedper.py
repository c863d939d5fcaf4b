"""FedPer: shared base layers and personal layers above them (Arivazhagan et al. 2019), by DPO.

Base and personal layers are trained together, and only the base is sent (algorithm 1 of Federated
Learning with Personalization Layers). Here the base is the LoRA of the first layers; that of later
layers, and an untied copy of the language-model head, stay with the client (FedPDPO D.3.1: the
first 2 layers are shared). The personal layers have the learning rate that the personal modules of
FedPDPO and FedRep have.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from components.config import PersonalModules
from components.config.modules import PersonalRate
from components.federation.local import Local
from components.federation.pair_training import PairTraining
from components.federation.personalization import PersonalizedMethod


class FedPer(PersonalizedMethod, PairTraining):
    """Options of FedPer."""

    shared_layers: int = Field(2, ge=1)
    """The LoRA of the first N layers is shared; FedPDPO D.3.1: 2."""
    personal: PersonalRate = Field(default_factory=PersonalRate)
    """Learning rate of the personal layers."""

    def local(self) -> Local:
        modules = PersonalModules(shared_layers=self.shared_layers)
        return replace(super().local(), own="modules", personal=modules, personal_lr=self.personal.lr)
