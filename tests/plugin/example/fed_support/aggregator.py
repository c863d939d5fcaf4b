"""A mean that the server follows only in part: phi_r+1 = phi_r + lr (mean - phi_r)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from fed_rlhf import Adapter, Sum, SumAggregator


class ServerStep(SumAggregator):
    """A step of the server towards the clients' weighted mean."""

    kind: Literal["server-step"] = Field("server-step", description="Name of the aggregator.")
    lr: float = Field(0.5, gt=0, le=1, description="Learning rate of the server.")

    def client_weights(self, shares: Mapping[str, float], clients: int) -> dict[str, float]:
        """The clients' shares of all training pairs."""
        return dict(shares)

    def finish(self, server: Adapter, total: Sum) -> tuple[Adapter, dict[str, float]]:
        """The server's new adapter, and its metrics."""
        means = {name: tensor / total.weight for name, tensor in total.tensors.items()}
        moved = {name: server[name] + self.lr * (means[name] - server[name]) for name in server}
        return moved, {"weight_sum": 1.0}
