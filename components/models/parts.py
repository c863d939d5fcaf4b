"""What a client's personal parts are made of, as a recipe says it; the parts themselves are in components/models/personalized.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from components.config import Section


class BottleneckConfig(Section):
    """The bottleneck adapter between the backbone and the heads (FedPDPO eq. 9, D.2.3)."""

    width: int = Field(256, ge=1, description="Dimension between the projections; FedPDPO D.2.3: 256.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout after GELU; FedPDPO D.2.3: 0.1.")
    norm: Literal["backbone", "layer"] = Field(
        "backbone", description="backbone: before the backbone's last norm, of which the client has its own copy, so that an untrained model is the reference; layer: after it, with a LayerNorm that starts with gain 1.")


class RewardHeadConfig(Section):
    """The explicit reward head (FedPDPO eq. 3, D.2.4)."""

    width: int = Field(256, ge=1, description="Hidden dimension; FedPDPO D.2.4: 256.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout before tanh; FedPDPO D.2.4: 0.1.")


@dataclass(frozen=True)
class PersonalParts:
    """Which parts a client keeps to itself.

    Attributes:
        head: a language-model head of its own.
        bottleneck: see BottleneckConfig; None: the backbone's features go to the heads as they are.
        reward: see RewardHeadConfig; None: no reward head.
        shared_layers: the LoRA of the first so many layers travels, the others' is the client's own; None: all of it travels.
    """

    head: bool = True
    bottleneck: BottleneckConfig | None = None
    reward: RewardHeadConfig | None = None
    shared_layers: int | None = None
