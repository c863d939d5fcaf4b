"""What methods with an adapter for each client share: their jobs, and mixtures (DRIFT, FedAMP)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from components.config import FederationConfig
from components.federation import aggregation
from components.federation.postprocessing import PostProcessor, process_combined
from components.federation.protocol import M, ServerState, TrainJob
from components.federation.sampling import sample_clients
from components.models.store import AdapterHash, AdapterStore
from components.seeding import derive

if TYPE_CHECKING:
    import torch

MIXED_TOGETHER = 16
"""Clients whose mixtures are computed in one pass over the adapters, and held in memory."""


def plan_on_own_adapters(
    config: FederationConfig, state: ServerState[M], adapters: Mapping[str, AdapterHash]
) -> list[TrainJob]:
    """A training job for each sampled client, on the adapter of its own.

    Args:
        config: the rounds.
        state: before the step.
        adapters: the adapter that each client is sent, by client.
    """
    names = sample_clients(state.federation.names, config.clients_per_round, state.seed, state.round)
    return [
        TrainJob(
            client=name,
            round=state.round,
            seed=derive(state.seed, "train", state.round, name),
            slot=name,
            adapter=adapters[name],
            previous_job_key=state.memory.job_keys.get(name, ""),
        )
        for name in names
    ]


def store_mixtures(
    store: AdapterStore,
    trained: Mapping[str, Mapping[str, torch.Tensor]],
    weights: Mapping[str, Mapping[str, float]],
    previous: Mapping[str, AdapterHash],
    postprocessors: Sequence[PostProcessor],
) -> tuple[dict[str, AdapterHash], dict[str, float]]:
    """Store sum_i w_ki theta_i for each client k.

    Args:
        store: where mixtures are stored.
        trained: theta_i by client, in the order of the names; a mapping may read from a file.
        weights: w_ki by client k and client i.
        previous: the adapter of each client before the step.
        postprocessors: applied to each mixture.

    Returns:
        the mixtures by client, and the distance of each from the client's previous adapter, as the
        metric `<client>/server_step`.
    """
    names = list(weights)
    adapters: dict[str, AdapterHash] = {}
    metrics: dict[str, float] = {}
    for start in range(0, len(names), MIXED_TOGETHER):
        targets = names[start : start + MIXED_TOGETHER]
        members = sorted(set().union(*(weights[name] for name in targets)))
        rows = np.array([[weights[name].get(member, 0.0) for member in members] for name in targets])
        sources = [trained[member] for member in members]
        for name, mixture in zip(targets, aggregation.mixtures(sources, rows), strict=True):
            before = store.get(previous[name])
            combined = process_combined(postprocessors, mixture, before)
            adapters[name] = store.put(combined)
            metrics[f"{name}/server_step"] = aggregation.distance(combined, before)
    return adapters, metrics
