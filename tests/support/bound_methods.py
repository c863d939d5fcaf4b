"""Federations whose adapters are one short tensor, for tests of the server half of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from components.config import FederationConfig
from components.federation.commits import Commits
from components.federation.method import Method
from components.federation.protocol import (
    Failure,
    Federation,
    Job,
    Memory,
    TrainJob,
    Update,
    build_federation,
    by_client,
)
from components.federation.rounds import aggregate_step, close_step
from components.federation.server import Server, State
from components.federation.step_answers import StepAnswers, add_up, collect
from components.models.store import AdapterHash, AdapterStore
from components.results import Metrics, Outcome, StepRecord, Traffic

TENSOR = "a"
"""Name of the only tensor of an adapter."""


def small_federation(
    store: AdapterStore,
    training_pairs: Mapping[str, int],
    start: Sequence[float],
    clients_per_round: int,
    validation_pairs: int = 1,
) -> Federation:
    """A federation of clients with these numbers of training pairs and this common start."""
    counts = {
        name: {"train": pairs, "validation": validation_pairs, "test": 1}
        for name, pairs in training_pairs.items()
    }
    return build_federation(counts, put_values(store, start), clients_per_round)


@dataclass(frozen=True)
class BoundMethod:
    """A method with the settings of the rounds and the server's store, which its steps use."""

    method: Method
    config: FederationConfig
    store: AdapterStore

    @property
    def memory_type(self) -> type[Memory]:
        return self.method.memory_type

    def start(self, federation: Federation, seed: int) -> State:
        return self.method.start(federation, seed)

    def warnings(self, federation: Federation, seed: int) -> Sequence[str]:
        return self.method.warnings(federation, seed, self.config)

    def plan(self, state: State) -> Sequence[Job]:
        return self.method.plan(state, Server(self.config, self.store))

    def aggregate(self, state: State, updates: Sequence[Update]) -> State:
        """The state after a step whose clients were those of the updates."""
        updates = by_client(updates)
        jobs = [TrainJob(client=one.client, round=0, seed=0, adapters=("",)) for one in updates]
        kept = {one.client: one.job for one in updates if one.traffic.kept}
        answers = StepAnswers([one.client for one in updates], updates, kept=kept)
        return aggregate_step(self.method, state, self._summed(state, jobs, answers), self.config, self.store)

    def _summed(self, state: State, jobs: Sequence[Job], answers: StepAnswers) -> StepAnswers:
        """The sums of the answers, where the step needs no more."""
        weights = self.method.sums(state, jobs, self.config)
        return answers if weights is None else add_up(answers, self.store, weights, client_figures=True)

    def outcome(self, state: State) -> Outcome:
        return self.method.outcome(state)

    def close_step(
        self,
        state: State,
        jobs: Sequence[Job],
        answers: Sequence[Update | Failure],
        quorum: float,
        commits: Commits,
    ) -> tuple[State, StepRecord]:
        config = self.config.model_copy(update={"quorum": quorum})
        template = self.method.update_template(state, self.store.get(state.initial))
        collected = collect(jobs, answers, self.store, template, config.max_update_ratio)
        return close_step(self.method, state, jobs, self._summed(state, jobs, collected), config, commits)


def bind(config: FederationConfig, store: AdapterStore) -> BoundMethod:
    """The method of a federation's settings."""
    return BoundMethod(config.options, config, store)


def bind_method(
    store: AdapterStore, method: str, clients_per_round: int, rounds: int = 500, **options: Any
) -> BoundMethod:
    """A method with these options."""
    config = FederationConfig.model_validate(
        {
            "method": method,
            "clients_per_round": clients_per_round,
            "rounds": rounds,
            "options": options,
        }
    )
    return bind(config, store)


def put_values(store: AdapterStore, values: Sequence[float]) -> AdapterHash:
    """Store an adapter with these values."""
    return store.put({TENSOR: torch.tensor(values, dtype=torch.float32)})


def get_values(store: AdapterStore, adapter: AdapterHash) -> list[float]:
    """The values of a stored adapter."""
    values: list[float] = store.get(adapter)[TENSOR].tolist()
    return values


def make_update(
    job: Job,
    adapter: AdapterHash | None = None,
    losses: Sequence[float] = (),
    metrics: Metrics | None = None,
    kept: int = 0,
) -> Update:
    """A client's answer to a job; a client that keeps state has kept more than 0 bytes."""
    return Update(
        job=job.key(),
        client=job.client,
        adapter_name=job.adapter_name,
        adapter=adapter,
        losses=list(losses),
        rows=1,
        metrics=metrics or Metrics(),
        traffic=Traffic(kept=kept),
    )


def make_updates(
    store: AdapterStore, jobs: Sequence[Job], values: Mapping[str, Sequence[float]]
) -> list[Update]:
    """An answer to each training job, with the values that its client has trained."""
    return [make_update(job, put_values(store, values[job.client])) for job in jobs]


def play_round(
    store: AdapterStore,
    bound: BoundMethod,
    state: State,
    values: Mapping[str, Sequence[float]],
) -> State:
    """The state after a step of training jobs, with the values that the clients have trained."""
    return bound.aggregate(state, make_updates(store, bound.plan(state), values))
