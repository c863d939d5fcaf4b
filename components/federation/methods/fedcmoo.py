"""FedCMOO-A: the server weights several objectives for all clients (FIRM section 5).

    for r in 0 .. R-1:
        g_mj    = gradient of objective j at phi_r on one batch of completions, for the sampled m
        lambda  = MGDA of the sums over m of p_m g_mj / sum of p_m
        phi_m   = K local steps from phi_r along sum of lambda_j g_j
        phi_r+1 = sum of p_m phi_m / sum of p_m

All clients use the same lambda, computed once per round. M gradients of the size of an adapter are
sent, and the adapter. Askin et al. 2024 (Federated Communication-Efficient Multi-Objective
Optimization) also compress the gradients, which is not implemented.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

from pydantic import Field, model_validator

from components.config import FederationConfig, MultiObjective
from components.federation.multi_objective import (
    MultiObjectiveMethod,
    Preference,
    check_preference,
    gradient_name,
    gram_matrix,
)
from components.federation.protocol import Federation, GradientJob, Job, Memory, Update
from components.federation.server import Server, State
from components.federation.step_answers import Weights
from components.learning import mgda
from components.models.store import Adapter
from components.seeding import derive

GRADIENTS = "gradients"
"""Name of the phase in which clients send gradients."""


class WeightsMemory(Memory):
    """The weights of the objectives."""

    weights: list[float] = Field(default_factory=list)  # lambda of the last round; empty before the first


class FedCmoo(MultiObjectiveMethod):
    """Options of FedCMOO-A."""

    memory_type: ClassVar[type[Memory]] = WeightsMemory
    averages_apart: ClassVar[bool] = False

    beta: float | None = Field(None, ge=0)
    """Regularization of the server's MGDA; null: 0, as Askin et al. have none."""
    preference: dict[str, Preference] | None = None
    """p of FIRM's eq. 3 by objective, where beta is above 0."""

    @model_validator(mode="after")
    def _check_preference(self) -> Self:
        check_preference(self.preference, self.objectives, bool(self.beta))
        return self

    def build_objective(self, server_weights: Sequence[float]) -> MultiObjective:
        """The weights that the server sends with training jobs; gradient jobs need none."""
        weights = dict(zip(self.objectives, server_weights, strict=True)) if server_weights else None
        total = sum(weights.values()) if weights else 1.0
        return MultiObjective(
            objectives=self.objectives,
            ppo=self.ppo,
            beta=self.beta or 0.0,
            weights=weights and {name: value / total for name, value in weights.items()},
        )

    def preferences(self) -> dict[str, float]:
        return {name: (self.preference or {}).get(name, 1.0) for name in self.objectives}

    def start(self, federation: Federation, seed: int) -> State:
        return super().start(federation, seed).model_copy(update={"phase": GRADIENTS})

    def plan(self, state: State, server: Server) -> Sequence[Job]:
        """Gradient jobs, or training jobs with lambda, for the same sampled clients."""
        jobs = server.train_jobs(state, lambda client: self.sent(state, client))
        if state.phase != GRADIENTS:
            weights = tuple(state.memory.weights)
            return [job.model_copy(update={"objective_weights": weights}) for job in jobs]
        return [
            GradientJob(
                client=job.client,
                round=job.round,
                seed=derive(state.seed, "gradients", state.round, job.client),
                adapter_name=job.adapter_name,
                adapters=job.adapters,
                previous_job_key=job.previous_job_key,
            )
            for job in jobs
        ]

    def update_template(self, state: State, adapter: Adapter) -> Adapter:
        """An adapter, or one tensor for each objective and each tensor of the adapter."""
        if state.phase != GRADIENTS:
            return adapter
        template: Adapter = {}
        for objective in self.objectives:
            template |= {gradient_name(objective, name): tensor for name, tensor in adapter.items()}
        return template

    def sums(self, state: State, jobs: Sequence[Job], config: FederationConfig) -> Weights | None:
        """The sum of the clients' gradients; single updates after the training."""
        if state.phase != GRADIENTS:
            return super().sums(state, jobs, config)
        return {GRADIENTS: state.shares(jobs)}

    def aggregate(self, state: State, updates: Sequence[Update], server: Server) -> State:
        """lambda after the gradients; the combination of the clients' adapters after the training."""
        if state.phase != GRADIENTS:
            ended = super().aggregate(state, updates, server)
            return ended.model_copy(update={"phase": GRADIENTS})
        mean, _ = server.mean(state, GRADIENTS, {})
        objectives = list(self.objectives)
        preference = list(self.preferences().values())
        weights = mgda.solve(gram_matrix(mean, objectives), self.beta or 0.0, preference)
        metrics = {f"lambda/{name}": float(share) for name, share in zip(objectives, weights, strict=True)}
        memory = WeightsMemory(weights=weights.tolist())
        return state.within_round("train", metrics, memory, logged_at=state.round + 1)
