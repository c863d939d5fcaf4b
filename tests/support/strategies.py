"""Federations whose adapters are one short tensor, for tests of the server half of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from components.config import FederationConfig
from components.federation.protocol import (
    Federation,
    Job,
    ServerState,
    Strategy,
    Update,
    build_federation,
    method_of,
)
from components.models.store import AdapterHash, AdapterStore
from components.results import Metrics

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


def build_strategy(
    store: AdapterStore, method: str, clients_per_round: int, rounds: int = 500, **options: Any
) -> Strategy[Any]:
    """The strategy of a method with these options."""
    config = FederationConfig.model_validate(
        {
            "method": method,
            "clients_per_round": clients_per_round,
            "rounds": rounds,
            "options": options,
        }
    )
    return method_of(config).build(config, store)


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
) -> Update:
    """A client's answer to a job."""
    return Update(
        job=job.key(),
        client=job.client,
        slot=job.slot,
        adapter=adapter,
        losses=list(losses),
        rows=1,
        metrics=metrics or Metrics(),
    )


def make_updates(
    store: AdapterStore, jobs: Sequence[Job], values: Mapping[str, Sequence[float]]
) -> list[Update]:
    """An answer to each training job, with the values that its client has trained."""
    return [make_update(job, put_values(store, values[job.client])) for job in jobs]


def play_round(
    store: AdapterStore,
    strategy: Strategy[Any],
    state: ServerState[Any],
    values: Mapping[str, Sequence[float]],
) -> ServerState[Any]:
    """The state after a step of training jobs, with the values that the clients have trained."""
    return strategy.aggregate(state, make_updates(store, strategy.plan(state), values))
