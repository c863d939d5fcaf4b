"""FedOPT: FedDPO with an adaptive optimizer at the server (Reddi et al. 2021).

The server takes the clients' mean movement for a gradient (Adaptive Federated Optimization,
algorithm 2):

    Delta = sum of w_m (phi_m - phi_r)
    m     = b1 m + (1 - b1) Delta
    v     = b2 v + (1 - b2) Delta^2                     adam
            v - (1 - b2) Delta^2 sign(v - Delta^2)      yogi
            v + Delta^2                                 adagrad
    phi   = phi_r + eta m / (sqrt(v) + tau)

m starts at 0 and v at tau^2, without bias correction, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from components.config.optimizer import Betas
from components.federation import aggregation
from components.federation.aggregators.weighted import AnyLinearAggregator, ParticipationMean
from components.federation.method import Server, State
from components.federation.pair_training import PairTraining
from components.federation.protocol import Memory, Update
from components.models.store import Adapter

if TYPE_CHECKING:
    import torch


class OptimizerMemory(Memory):
    """Hashes of the server optimizer's moments in the store; None before the first round."""

    first_moment: str | None = None
    second_moment: str | None = None


class FedOpt(PairTraining):
    """Options of FedOPT."""

    memory_type: ClassVar[type[Memory]] = OptimizerMemory
    needs: ClassVar[Literal["sums", "updates"]] = "sums"

    server_optimizer: Literal["adam", "yogi", "adagrad"] = "adam"
    """How the server averages squared movements."""
    server_lr: float = Field(1e-3, gt=0)
    """Learning rate of the server (eta)."""
    server_betas: Betas = Field([0.9, 0.99])
    """b1 and b2; Reddi et al.: 0.9 and 0.99."""
    tau: float = Field(1e-3, gt=0)
    """Degree of adaptivity; Reddi et al.: 1e-3 for most tasks."""
    aggregator: AnyLinearAggregator = Field(default_factory=ParticipationMean)
    """Weights w_m of the clients' movements."""

    def aggregate(self, state: State, updates: Sequence[Update], server: Server) -> State:
        adapter_name = self.trained_model
        before = server.store.get(state.adapters[adapter_name])
        contributions = server.contributions(state)
        weights = self.aggregator.client_weights(contributions)
        total, weight_sum = aggregation.weighted_sum(zip(contributions.adapters(), weights, strict=True))
        if server.postprocessors:
            mean = {name: tensor / weight_sum for name, tensor in total.items()}
            mean = server.process(state, mean, before, adapter_name, contributions.names)
            total = {name: weight_sum * tensor for name, tensor in mean.items()}
        origin = {name: weight_sum * tensor for name, tensor in before.items()}
        movement = {name: total[name] - origin[name] for name in before}
        first, second = self._moments(state, movement, server)
        new = {
            name: tensor + self.server_lr * first[name] / (second[name].sqrt() + self.tau)
            for name, tensor in before.items()
        }
        memory = OptimizerMemory(first_moment=server.store.put(first), second_moment=server.store.put(second))
        metrics = {"weight_sum": 1.0, "mean_movement": aggregation.distance(total, origin)}
        metrics |= aggregation.step_metrics(new, before)
        return state.end_round({adapter_name: server.store.put(new)}, metrics, memory)

    def _moments(self, state: State, movement: Adapter, server: Server) -> tuple[Adapter, Adapter]:
        first, second = (
            None if digest is None else server.store.get(digest)
            for digest in (state.memory.first_moment, state.memory.second_moment)
        )
        beta = self.server_betas[0]
        new_first = {}
        new_second = {}
        for name, delta in movement.items():
            new_first[name] = (1 - beta) * delta + (beta * first[name] if first is not None else 0)
            new_second[name] = self._second_moment(delta, None if second is None else second[name])
        return new_first, new_second

    def _second_moment(self, delta: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        import torch

        if previous is None:
            previous = torch.full_like(delta, self.tau**2)
        beta = self.server_betas[1]
        square = delta.square()
        if self.server_optimizer == "adam":
            return beta * previous + (1 - beta) * square
        if self.server_optimizer == "yogi":
            return previous - (1 - beta) * square * torch.sign(previous - square)
        return previous + square
