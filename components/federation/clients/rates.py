"""The decay of a client's learning rates when its loss rises (FedPDPO D.3.1), the same for all methods."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from components.config.optimizer import RateDecay

RATE_NUMBERS = ("decay", "dpo")
"""Names of these numbers in a client's private store."""


@dataclass(frozen=True)
class RateMemory:
    """What a client remembers of its learning rates."""

    decay: float = 1.0  # factor of its learning rates
    dpo: float = math.nan  # mean DPO loss of its last round; NaN before the first one

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> RateMemory:
        """The memory from the numbers of a private store."""
        return cls(numbers.get("decay", 1.0), numbers.get("dpo", math.nan))

    def numbers(self) -> dict[str, float]:
        """The numbers as the private store keeps them."""
        numbers = {"decay": self.decay}
        return numbers if math.isnan(self.dpo) else numbers | {"dpo": self.dpo}

    def learning_rate(self, lr: float, config: RateDecay | None) -> float:
        return lr if config is None else config.apply(lr, self.decay)

    def after_round(self, dpo: float, config: RateDecay | None) -> RateMemory:
        if config is not None and dpo > self.dpo:  # false where it is NaN
            return replace(self, decay=self.decay * config.factor, dpo=dpo)
        return replace(self, dpo=dpo)
