"""The coordinate-wise trimmed mean (Yin et al. 2018, Byzantine-Robust Distributed Learning, definition 2).

For each coordinate, the largest and the smallest values of the clients are removed, and the others
are averaged. A minority of clients that send arbitrary adapters therefore moves no coordinate
beyond the values of honest clients.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from pydantic import Field

from components.federation.aggregators.aggregator import Aggregator, Contributions
from components.models.store import Adapter, iterate_blocks


class TrimmedMean(Aggregator):
    """The mean of the values that remain in each coordinate; all clients count the same."""

    kind: Literal["trimmed"] = "trimmed"
    """Name of the aggregator."""
    share: float = Field(0.1, gt=0, lt=0.5)
    """Share of the clients of a round whose values are removed on each side of a coordinate (beta),
    rounded up. It should be at least the share of clients that may be malicious."""

    def removed_per_side(self, clients: int) -> int:
        """Values removed on each side: share x clients, rounded up; at least one value remains."""
        return min(math.ceil(self.share * clients), (clients - 1) // 2)

    def combine(self, server: Adapter, contributions: Contributions) -> tuple[Adapter, dict[str, float]]:
        """The trimmed mean, and `removed_per_side`, which is 0 if fewer than three clients took part."""
        import torch

        removed = self.removed_per_side(len(contributions))
        combined: Adapter = {}
        adapters = contributions.open()
        for name in sorted(server):
            means = [trimmed_mean(block, removed) for block in iterate_blocks(adapters, [name])]
            values = torch.from_numpy(np.concatenate(means).astype(np.float32))
            combined[name] = values.reshape(server[name].shape)
        return combined, {"removed_per_side": float(removed)}


def trimmed_mean(values: np.ndarray, removed: int) -> np.ndarray:
    """The mean of values [K, n] without the `removed` largest and smallest of each column, [n]."""
    ordered = np.sort(values, axis=0)
    mean: np.ndarray = ordered[removed : len(values) - removed].mean(axis=0)
    return mean
