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

from components.config import FederationConfig
from components.config.optimizer import Betas
from components.federation import aggregation
from components.federation.aggregators import AnyMean, ParticipationMean
from components.federation.pair_training import PairTraining
from components.federation.protocol import Job, Memory, Update
from components.federation.server import Server, State
from components.federation.step_answers import Weights
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

    server_optimizer: Literal["adam", "yogi", "adagrad"] = "adam"
    """How the server averages squared movements."""
    server_lr: float = Field(1e-3, gt=0)
    """Learning rate of the server (eta)."""
    server_betas: Betas = Field([0.9, 0.99])
    """b1 and b2; Reddi et al.: 0.9 and 0.99."""
    tau: float = Field(1e-3, gt=0)
    """Degree of adaptivity; Reddi et al.: 1e-3 for most tasks."""
    aggregator: AnyMean = Field(default_factory=ParticipationMean)
    """Weights w_m of the clients' movements."""

    def sums(self, state: State, jobs: Sequence[Job], config: FederationConfig) -> Weights:
        return {self.trained_model: self.aggregator.client_weights(state.shares(jobs), len(state.clients))}

    def aggregate(self, state: State, updates: Sequence[Update], server: Server) -> State:
        adapter_name = self.trained_model
        before = server.store.get(state.adapters[adapter_name])
        mean, total = server.mean(state, adapter_name, before)
        _, numbers = self.aggregator.finish(before, total)
        scale = numbers["weight_sum"]
        movement = {name: scale * (mean[name] - tensor) for name, tensor in before.items()}
        first, second = self._moments(state, movement, server)
        new = {
            name: tensor + self.server_lr * first[name] / (second[name].sqrt() + self.tau)
            for name, tensor in before.items()
        }
        memory = OptimizerMemory(first_moment=server.store.put(first), second_moment=server.store.put(second))
        metrics = (
            numbers | {"mean_movement": aggregation.norm(movement)} | aggregation.step_metrics(new, before)
        )
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
