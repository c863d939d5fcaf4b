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
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from components.config import Betas, DpoObjective, FederationConfig, OfflinePpoObjective
from components.federation import aggregation
from components.federation.aggregators.base import Contributions, LinearAggregator
from components.federation.aggregators.weighted import AnyLinearAggregator, ParticipationMean
from components.federation.averaging import plan_training, shared_policy
from components.federation.pair_training import PairObjective
from components.federation.postprocessing import PostProcessor, postprocessors_of, process_combined
from components.federation.protocol import (
    Federation,
    Job,
    Memory,
    RatedMethod,
    ServerState,
    Strategy,
    Update,
    accepted_job_keys,
)
from components.models.store import AdapterStore
from components.results import Metrics, OutcomeRecord

if TYPE_CHECKING:
    import torch

    from components.models.store import Adapter

SLOT = "policy"


class Options(RatedMethod):
    """Options of FedOPT."""

    trainer: ClassVar[str] = "policy"

    server_optimizer: Literal["adam", "yogi", "adagrad"] = Field(
        "adam", description="How the server averages squared movements."
    )
    server_lr: float = Field(1e-3, gt=0, description="Learning rate of the server (eta).")
    server_betas: Betas = Field([0.9, 0.99], description="b1 and b2; Reddi et al.: 0.9 and 0.99.")
    tau: float = Field(1e-3, gt=0, description="Degree of adaptivity; Reddi et al.: 1e-3 for most tasks.")
    objective: PairObjective = Field(
        default_factory=DpoObjective, description="Local objective: dpo, or ppo with the recipe's one reward."
    )
    aggregator: AnyLinearAggregator = Field(
        default_factory=ParticipationMean, description="Weights w_m of the clients' movements."
    )

    @property
    def local_objective(self) -> DpoObjective | OfflinePpoObjective:
        """DPO or PPO."""
        return self.objective

    def build(self, config: FederationConfig, store: AdapterStore) -> FedOPT:
        """The strategy."""
        return FedOPT(config, store, self, postprocessors_of(config))


class OptimizerMemory(Memory):
    """Hashes of the server optimizer's moments in the store; None before the first round."""

    first_moment: str | None = None
    second_moment: str | None = None


@dataclass(frozen=True)
class FedOPT(Strategy[OptimizerMemory]):
    """The strategy; see the module's docstring."""

    config: FederationConfig
    store: AdapterStore
    options: Options
    postprocessors: tuple[PostProcessor, ...] = ()

    memory_type = OptimizerMemory

    def init(self, federation: Federation, seed: int) -> ServerState[OptimizerMemory]:
        """All clients start from the same adapter."""
        return ServerState.start(federation, seed, {SLOT: federation.initial}, OptimizerMemory())

    def plan(self, state: ServerState[OptimizerMemory]) -> Sequence[Job]:
        """A training job on the server's adapter for each sampled client."""
        return plan_training(self.config, state, SLOT)

    def aggregate(
        self, state: ServerState[OptimizerMemory], updates: Sequence[Update]
    ) -> ServerState[OptimizerMemory]:
        """A step of the server's optimizer along the mean movement."""
        server = self.store.get(state.adapters[SLOT])
        contributions = Contributions.of_step(state, updates, self.store)
        aggregator: LinearAggregator = self.options.aggregator
        weights = aggregator.client_weights(contributions)
        total, weight_sum = aggregation.weighted_sum(zip(contributions.adapters(), weights, strict=True))
        if self.postprocessors:
            mean = {name: tensor / weight_sum for name, tensor in total.items()}
            mean = process_combined(self.postprocessors, mean, server)
            total = {name: weight_sum * tensor for name, tensor in mean.items()}
        origin = {name: weight_sum * tensor for name, tensor in server.items()}
        movement = {name: total[name] - origin[name] for name in server}
        first, second = self._moments(state.memory, movement)
        rate = self.options.server_lr
        new = {
            name: tensor + rate * first[name] / (second[name].sqrt() + self.options.tau)
            for name, tensor in server.items()
        }
        metrics = {"weight_sum": 1.0, "mean_movement": aggregation.distance(total, origin)}
        memory = OptimizerMemory(
            job_keys=accepted_job_keys(state.memory, updates, self.options.keeps_client_state(self.config)),
            first_moment=self.store.put(first),
            second_moment=self.store.put(second),
        )
        return state.end_round(
            {SLOT: self.store.put(new)},
            memory,
            Metrics(scalars=metrics | aggregation.step_metrics(new, server)),
        )

    def _moments(self, memory: OptimizerMemory, movement: Adapter) -> tuple[Adapter, Adapter]:
        first = self._stored(memory.first_moment)
        second = self._stored(memory.second_moment)
        beta = self.options.server_betas[0]
        new_first = {}
        new_second = {}
        for name, delta in movement.items():
            new_first[name] = (1 - beta) * delta + (beta * first[name] if first is not None else 0)
            new_second[name] = self._second_moment(delta, None if second is None else second[name])
        return new_first, new_second

    def _second_moment(self, delta: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        import torch

        if previous is None:
            previous = torch.full_like(delta, self.options.tau**2)
        beta = self.options.server_betas[1]
        square = delta.square()
        if self.options.server_optimizer == "adam":
            return beta * previous + (1 - beta) * square
        if self.options.server_optimizer == "yogi":
            return previous - (1 - beta) * square * torch.sign(previous - square)
        return previous + square

    def _stored(self, digest: str | None) -> Adapter | None:
        return None if digest is None else self.store.get(digest)

    def outcome(self, state: ServerState[OptimizerMemory]) -> OutcomeRecord:
        """The server's adapter."""
        return shared_policy(state, SLOT)
