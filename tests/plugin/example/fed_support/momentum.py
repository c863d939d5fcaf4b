"""FedDPO with momentum at the server (FedAvgM, Hsu et al. 2019).

v_r+1   = beta v_r + (mean of the phi_m - phi_r),   v_0 = 0
phi_r+1 = phi_r + v_r+1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from fed_rlhf import (
    DpoObjective,
    FederationConfig,
    Job,
    Local,
    Memory,
    Method,
    Server,
    State,
    Update,
    Weights,
    step_metrics,
)


class VelocityMemory(Memory):
    """What the server remembers."""

    velocity: str | None = None  # hash of v in the store; None before the first round, where it is 0


class FedDpoMomentum(Method):
    """Options of FedDPO with momentum."""

    memory_type: ClassVar[type[Memory]] = VelocityMemory

    objective: DpoObjective = Field(default_factory=DpoObjective, description="Local objective.")
    beta: float = Field(0.9, ge=0, lt=1, description="Share of v that is kept in each round.")

    def local(self) -> Local:
        return Local(self.objective)

    def sums(self, state: State, jobs: Sequence[Job], config: FederationConfig) -> Weights:
        return {self.trained_model: state.shares(jobs)}

    def aggregate(self, state: State, updates: Sequence[Update], server: Server) -> State:
        before = server.store.get(state.adapters[self.trained_model])
        mean, _ = server.mean(state, self.trained_model, before)
        velocity = {name: mean[name] - before[name] for name in before}
        if state.memory.velocity is not None:
            previous = server.store.get(state.memory.velocity)
            velocity = {name: self.beta * previous[name] + velocity[name] for name in before}
        new = {name: before[name] + velocity[name] for name in before}
        metrics = step_metrics(new, before)
        memory = VelocityMemory(velocity=server.store.put(velocity))
        return state.end_round({self.trained_model: server.store.put(new)}, metrics, memory)
