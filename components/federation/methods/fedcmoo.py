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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from components.config import FederationConfig, MultiObjective
from components.federation import aggregation
from components.federation.aggregators.base import Contributions, aggregator_of
from components.federation.averaging import FederatedAveraging, plan_training
from components.federation.multi_objective import (
    MultiObjectiveMethod,
    Preference,
    check_objective_names,
    disagreement,
    gradient_name,
    gram_matrix,
    measure_rewards,
)
from components.federation.postprocessing import postprocessors_of
from components.federation.protocol import (
    Federation,
    GradientJob,
    Job,
    MeasureJob,
    Memory,
    ServerState,
    Strategy,
    Update,
    accepted_job_keys,
)
from components.learning import mgda
from components.models.store import AdapterStore
from components.results import Metrics, OutcomeRecord
from components.seeding import derive

if TYPE_CHECKING:
    from components.models.store import Adapter

GRADIENTS = "gradients"
"""Name of the phase in which clients send gradients."""


class Options(MultiObjectiveMethod):
    """Options of FedCMOO-A."""

    beta: float | None = Field(
        None,
        ge=0,
        description="Regularization of the server's MGDA; null: 0, as Askin et al. have none.",
    )
    preference: dict[str, Preference] | None = Field(
        None, description="p of FIRM's eq. 3 by objective, where beta is above 0."
    )

    @model_validator(mode="after")
    def _check_preference(self) -> Self:
        check_objective_names("preference", self.preference, self.objectives)
        if self.preference is not None and not self.beta:
            raise ValueError(
                "preference acts through the regularization, and beta is 0: set beta above 0, or leave out"
                " the preference"
            )
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
        """The preference."""
        return {name: (self.preference or {}).get(name, 1.0) for name in self.objectives}

    def build(self, config: FederationConfig, store: AdapterStore) -> FedCMOO:
        """The strategy."""
        averaging = FederatedAveraging(
            config,
            store,
            aggregator_of(self.aggregator),
            stateful=True,
            postprocessors=postprocessors_of(config),
        )
        return FedCMOO(averaging, self)


class WeightsMemory(Memory):
    """What the server remembers.

    Attributes:
        weights: lambda of the round, in the order of the objectives.
    """

    weights: list[float] = Field(default_factory=list)


@dataclass(frozen=True)
class FedCMOO(Strategy[WeightsMemory]):
    """The strategy; see the module's docstring.

    Attributes:
        averaging: the rounds, apart from the gradients.
        options: the method's options.
    """

    averaging: FederatedAveraging
    options: Options

    memory_type = WeightsMemory

    def init(self, federation: Federation, seed: int) -> ServerState[WeightsMemory]:
        """All clients start from the same adapter, and send gradients first."""
        adapters = {self.averaging.slot: federation.initial}
        return ServerState.start(federation, seed, adapters, WeightsMemory(), phase=GRADIENTS)

    def warnings(self, federation: Federation, seed: int) -> Sequence[str]:
        """Weights that shrink or inflate the policy over the rounds."""
        return self.averaging.warnings(federation, seed)

    def plan(self, state: ServerState[WeightsMemory]) -> Sequence[Job]:
        """Gradient jobs, then training jobs, for the same sampled clients."""
        jobs = plan_training(self.averaging.config, state, self.averaging.slot)
        if state.phase != GRADIENTS:
            return [job.model_copy(update={"objective_weights": tuple(state.memory.weights)}) for job in jobs]
        return [
            GradientJob(
                client=job.client,
                round=job.round,
                seed=derive(state.seed, "gradients", state.round, job.client),
                slot=job.slot,
                adapter=job.adapter,
                previous_job_key=job.previous_job_key,
            )
            for job in jobs
        ]

    def update_template(self, state: ServerState[WeightsMemory], adapter: Adapter) -> Adapter:
        """An adapter, or one tensor for each objective and each tensor of the adapter."""
        if state.phase != GRADIENTS:
            return adapter
        template: Adapter = {}
        for objective in self.options.objectives:
            template |= {gradient_name(objective, name): tensor for name, tensor in adapter.items()}
        return template

    def aggregate(
        self, state: ServerState[WeightsMemory], updates: Sequence[Update]
    ) -> ServerState[WeightsMemory]:
        """lambda after the gradients.

        The combination of the clients' adapters after the training.
        """
        if state.phase == GRADIENTS:
            return self._combine_gradients(state, updates)
        averaging = self.averaging
        adapter, scalars = averaging.combine(state, updates)
        scalars |= disagreement(
            averaging.store, state, averaging.slot, updates, list(self.options.objectives)
        )
        job_keys = accepted_job_keys(state.memory, updates, stateful=True)
        memory = WeightsMemory(job_keys=job_keys, weights=state.memory.weights)
        return state.end_round({averaging.slot: adapter}, memory, Metrics(scalars=scalars), phase=GRADIENTS)

    def _combine_gradients(
        self, state: ServerState[WeightsMemory], updates: Sequence[Update]
    ) -> ServerState[WeightsMemory]:
        contributions = Contributions.of_step(state, updates, self.averaging.store)
        mean = aggregation.weighted_average(zip(contributions.adapters(), contributions.weights, strict=True))
        objectives = list(self.options.objectives)
        preference = self.options.preference
        weights = mgda.solve(
            gram_matrix(mean, objectives),
            self.options.beta or 0.0,
            None if preference is None else [preference.get(name, 1.0) for name in objectives],
        )
        scalars = {f"lambda/{name}": float(share) for name, share in zip(objectives, weights, strict=True)}
        memory = WeightsMemory(job_keys=state.memory.job_keys, weights=weights.tolist())
        return state.within_round("train", memory, Metrics(scalars=scalars), logged_at=state.round + 1)

    def measure(self, state: ServerState[WeightsMemory]) -> list[MeasureJob]:
        """The rewards of the server's policy."""
        return measure_rewards(state, self.averaging.slot)

    def outcome(self, state: ServerState[WeightsMemory]) -> OutcomeRecord:
        """The server's adapter."""
        slot = self.averaging.slot
        return OutcomeRecord(kind="shared-policy", adapters={slot: state.adapters[slot]})
