"""Federated averaging of one adapter: the rounds that many methods share.

    for r in 0 .. R-1:
        A_r     = A clients sampled uniformly without replacement
        phi_m   = OPTIM(m, phi_r, K)   for m in A_r
        phi_r+1 = combination of the phi_m by the method's aggregator

phi_r is the server's adapter, and OPTIM(m, phi, K) are K local steps of client m from phi. Methods
differ in what the clients minimize, in the aggregator, and in the modules that do not leave a
client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from components.config import FederationConfig
from components.federation import aggregation
from components.federation.aggregators.base import Aggregator, Contributions
from components.federation.postprocessing import PostProcessor, process_combined
from components.federation.protocol import (
    Federation,
    Job,
    M,
    Memory,
    ServerState,
    Strategy,
    TrainJob,
    Update,
    accepted_job_keys,
)
from components.federation.sampling import sample_clients
from components.federation.weight_scale import running_scale, scale_warnings
from components.models.store import AdapterHash, AdapterStore
from components.results import Metrics, OutcomeRecord
from components.seeding import derive


class AveragingMemory(Memory):
    """Memory of federated averaging, which has nothing of its own."""


@dataclass(frozen=True)
class FederatedAveraging(Strategy[AveragingMemory]):
    """The strategy; see the module's docstring.

    Attributes:
        config: rounds and clients per round.
        store: the server's adapters.
        aggregator: combines the clients' adapters.
        slot: name of the server's adapter.
        outcome_kind: what the rounds end with.
        stateful: whether clients keep private state from round to round.
        postprocessors: applied to the combined adapter.
    """

    config: FederationConfig
    store: AdapterStore
    aggregator: Aggregator
    slot: str = "policy"
    outcome_kind: Literal["selector-ensemble", "shared-policy", "personalized-clients"] = "shared-policy"
    stateful: bool = False
    postprocessors: tuple[PostProcessor, ...] = ()

    memory_type = AveragingMemory

    def init(self, federation: Federation, seed: int) -> ServerState[AveragingMemory]:
        """All clients start from the same adapter."""
        return ServerState.start(federation, seed, {self.slot: federation.initial}, AveragingMemory())

    def warnings(self, federation: Federation, seed: int) -> Sequence[str]:
        """Weights that shrink or inflate the adapter over the rounds."""
        rounds = {self.slot: range(self.config.rounds)}
        return scale_warnings(self.aggregator, federation, self.config.clients_per_round, seed, rounds)

    def plan(self, state: ServerState[AveragingMemory]) -> Sequence[Job]:
        """A training job on the server's adapter for each sampled client."""
        return plan_training(self.config, state, self.slot)

    def aggregate(
        self, state: ServerState[AveragingMemory], updates: Sequence[Update]
    ) -> ServerState[AveragingMemory]:
        """The combination of the clients' adapters."""
        adapter, scalars = self.combine(state, updates)
        scalars |= running_scale(self.aggregator, state, scalars)
        return state.end_round(
            {self.slot: adapter}, self.next_memory(state, updates), Metrics(scalars=scalars)
        )

    def combine(
        self, state: ServerState[M], updates: Sequence[Update]
    ) -> tuple[AdapterHash, dict[str, float]]:
        """The server's new adapter, and its metrics; see combine_updates."""
        return combine_updates(self.store, state, self.slot, updates, self.aggregator, self.postprocessors)

    def next_memory(self, state: ServerState[AveragingMemory], updates: Sequence[Update]) -> AveragingMemory:
        """The memory after these updates were accepted."""
        return AveragingMemory(job_keys=accepted_job_keys(state.memory, updates, self.stateful))

    def outcome(self, state: ServerState[AveragingMemory]) -> OutcomeRecord:
        """The server's adapter, and the private state of clients that have some."""
        job_keys = {name: state.memory.job_keys.get(name, "") for name in state.federation.names}
        return OutcomeRecord(
            kind=self.outcome_kind,
            adapters={self.slot: state.adapters[self.slot]},
            job_keys=job_keys if self.outcome_kind == "personalized-clients" else {},
        )


def plan_training(config: FederationConfig, state: ServerState[M], slot: str) -> list[TrainJob]:
    """A training job on one of the server's adapters for each sampled client.

    Args:
        config: the rounds.
        state: before the step.
        slot: name of the adapter.
    """
    names = sample_clients(state.federation.names, config.clients_per_round, state.seed, state.round)
    return [
        TrainJob(
            client=name,
            round=state.round,
            seed=derive(state.seed, "train", state.round, name),
            slot=slot,
            adapter=state.adapters[slot],
            previous_job_key=state.memory.job_keys.get(name, ""),
        )
        for name in names
    ]


def shared_policy(state: ServerState[M], slot: str) -> OutcomeRecord:
    """The outcome of a method that ends with one policy for all clients."""
    return OutcomeRecord(kind="shared-policy", adapters={slot: state.adapters[slot]})


def combine_updates(
    store: AdapterStore,
    state: ServerState[M],
    slot: str,
    updates: Sequence[Update],
    aggregator: Aggregator,
    postprocessors: Sequence[PostProcessor] = (),
) -> tuple[AdapterHash, dict[str, float]]:
    """The server's new adapter of a slot.

    Args:
        store: where adapters are.
        state: before the step.
        slot: name of the trained adapter.
        updates: of its training jobs, in any order.
        aggregator: how they are combined.
        postprocessors: applied to the combination.

    Returns:
        the adapter, and the metrics weight_sum, server_step (how far the adapter moved) and
        server_norm.
    """
    server = store.get(state.adapters[slot])
    combined, metrics = aggregator.combine(server, Contributions.of_step(state, updates, store))
    combined = process_combined(postprocessors, combined, server)
    return store.put(combined), metrics | aggregation.step_metrics(combined, server)
