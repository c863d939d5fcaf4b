"""A mean that the server follows only in part: phi_r+1 = phi_r + lr (mean - phi_r)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from components.federation.aggregators.aggregator import Aggregator, Contributions
from components.federation.aggregators.weighted import ParticipationMean

if TYPE_CHECKING:
    from components.models.store import Adapter


class ServerStep(Aggregator):
    """A step of the server towards the clients' weighted mean."""

    kind: Literal["server-step"] = Field("server-step", description="Name of the aggregator.")
    lr: float = Field(0.5, gt=0, le=1, description="Learning rate of the server.")

    def combine(self, server: Adapter, contributions: Contributions) -> tuple[Adapter, dict[str, float]]:
        """The server's new adapter, and its metrics."""
        mean, metrics = ParticipationMean().combine(server, contributions)
        moved = {name: server[name] + self.lr * (mean[name] - server[name]) for name in server}
        return moved, metrics
