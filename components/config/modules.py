"""Private modules of personalized methods (components/models/personalized.py builds them)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from components.config.section import Section


class BottleneckConfig(Section):
    """The bottleneck adapter between the backbone and the heads (FedPDPO eq. 9, D.2.3)."""

    width: int = Field(256, ge=1, le=1_000_000)
    """Dimension between the two projections; FedPDPO D.2.3: 256."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout after GELU; FedPDPO D.2.3: 0.1."""
    norm: Literal["backbone", "layer"] = "backbone"
    """backbone: before the backbone's last norm, of which the client has its own copy, so that an
    untrained model equals the reference; layer: after it, with a LayerNorm whose gain starts at
    1."""


Pooling = Literal["response", "sequence"]
"""Tokens over which the features of a reward head are averaged, see `RewardHeadConfig.pooling`."""


class RewardHeadConfig(Section):
    """The explicit reward head (FedPDPO eq. 3, D.2.4)."""

    width: int = Field(256, ge=1, le=1_000_000)
    """Hidden dimension; FedPDPO D.2.4: 256."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout before tanh; FedPDPO D.2.4: 0.1."""
    pooling: Pooling = "response"
    """Tokens over which the features are averaged. response: the completion's; sequence: the
    prompt's and the completion's, as FedPDPO D.2.4 can be read. The prompt's part is the same for
    both completions of a pair."""


class PersonalModules(Section):
    """The modules that a client keeps to itself, beside a language-model head of its own.

    Built by a method from its own options.
    """

    bottleneck: BottleneckConfig | None = None
    """The bottleneck adapter; null: the heads read the backbone's features."""
    reward: RewardHeadConfig | None = None
    """The reward head; null: none."""
    shared_layers: int | None = None
    """The LoRA of the first N layers is shared, that of later layers is private; null: all is
    shared."""


class PersonalRate(Section):
    """Learning rate of private modules."""

    lr: float = Field(1e-4, gt=0)
    """Learning rate of the private modules; that of the shared adapter is `lr` of the options.
    FedPDPO D.3.1: 1e-4 and 5e-5."""


class StageLength(PersonalRate):
    """Learning rate of the personal stage, and its part of a round."""

    share: float = Field(0.5, gt=0, lt=1)
    """Share of a round's steps that the personal stage takes; the shared stage takes the others.
    FedPDPO D.3.1: one epoch each, D.3.2: one and three."""

    def divide(self, count: int) -> tuple[int, int]:
        """Divide steps between the personal and the shared stage, of which each has at least one.

        A client with a single step in a round, which only local_epochs can give, takes one of each.
        """
        personal = min(max(1, round(self.share * count)), max(1, count - 1))
        return personal, max(1, count - personal)
