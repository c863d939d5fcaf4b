"""FedCDA: the mean of the clients' cached adapters that are closest together (Wang et al. 2024).

    for r in 0 .. R-1:
        A_r     = A clients sampled uniformly without replacement
        phi_m   = OPTIM(m, phi_r, K)   for m in A_r    # the server caches the last ones of each client
        chosen  = one cached adapter of each m in A_r, and of other clients the one chosen last,
                  with minimal sum_m p_m |phi_m - mean|^2, where mean = sum_m p_m phi_m
        phi_r+1 = that mean

In the first `warmup_rounds`, each sampled client's newest adapter is chosen, as in FedAvg.

A client trains from another global adapter each time that it is sampled, and may end in another
optimum. A mean that is close to all its members preserves most of what they learned. The objective
and the caches are the paper's; the search (components/federation/closeness.py) is our reading of
its "approximate selection".

The method assumes that each cached adapter fits its client's data. Before local training has
converged, earlier adapters have moved less, so they are closer together and are chosen again, and
the server does not move. `warmup_rounds` is an addition for that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from components.config import DpoObjective, FederationConfig, OfflinePpoObjective
from components.federation import aggregation
from components.federation.averaging import plan_training, shared_policy
from components.federation.closeness import Candidates, choose_closest
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
    sent_adapters,
)
from components.models.store import AdapterStore
from components.results import Metrics, OutcomeRecord

if TYPE_CHECKING:
    from components.models.store import Adapter

SLOT = "policy"


class Options(RatedMethod):
    """Options of FedCDA."""

    trainer: ClassVar[str] = "policy"

    cached: int = Field(
        3, ge=1, le=1000, description="Adapters of each client that the server keeps; Wang et al. keep a few."
    )
    warmup_rounds: int = Field(
        0,
        ge=0,
        description=(
            "First rounds, in which the newest adapters are averaged, since earlier ones do not fit yet."
        ),
    )
    group: int = Field(
        3,
        ge=1,
        le=1000,
        description="Sampled clients whose combinations are tried together, cached^group of them.",
    )
    objective: PairObjective = Field(
        default_factory=DpoObjective, description="Local objective: dpo, or ppo with the recipe's one reward."
    )

    @property
    def local_objective(self) -> DpoObjective | OfflinePpoObjective:
        """DPO or PPO."""
        return self.objective

    def build(self, config: FederationConfig, store: AdapterStore) -> FedCDA:
        """The strategy."""
        return FedCDA(config, store, self, postprocessors_of(config))


class CacheMemory(Memory):
    """The clients' last adapters.

    Attributes:
        cache: hashes of each client's cached adapters, oldest first.
        chosen: hash of the adapter of each client that the last mean is of.
    """

    cache: dict[str, list[str]] = Field(default_factory=dict)
    chosen: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True)
class FedCDA(Strategy[CacheMemory]):
    """The strategy; see the module's docstring."""

    config: FederationConfig
    store: AdapterStore
    options: Options
    postprocessors: tuple[PostProcessor, ...] = ()

    memory_type = CacheMemory

    def init(self, federation: Federation, seed: int) -> ServerState[CacheMemory]:
        """All clients start from the same adapter."""
        return ServerState.start(federation, seed, {SLOT: federation.initial}, CacheMemory())

    def plan(self, state: ServerState[CacheMemory]) -> Sequence[Job]:
        """A training job on the server's adapter for each sampled client."""
        return plan_training(self.config, state, SLOT)

    def aggregate(
        self, state: ServerState[CacheMemory], updates: Sequence[Update]
    ) -> ServerState[CacheMemory]:
        """The mean of the closest combination, over all clients that ever sent an update."""
        cache = self._updated_cache(state.memory, updates)
        names = sorted(cache)
        participants = {update.client for update in updates}
        server = self.store.get(state.adapters[SLOT])
        candidates = self._candidates(cache, names, state.federation.weights, server)
        start = [
            len(cache[name]) - 1 if name in participants else cache[name].index(state.memory.chosen[name])
            for name in names
        ]
        free = [names.index(name) for name in sorted(participants)]
        if state.round < self.options.warmup_rounds:
            free = []
        chosen = choose_closest(candidates, start, free, self.options.group)
        digests = {name: cache[name][place] for name, place in zip(names, chosen, strict=True)}
        weights = state.federation.weights
        mean = aggregation.weighted_average(
            (self.store.get(digest), weights[name]) for name, digest in digests.items()
        )
        mean = process_combined(self.postprocessors, mean, server)
        newest = [len(cache[name]) - 1 for name in names]
        metrics = {
            "weight_sum": 1.0,
            "divergence": candidates.spread(chosen),
            "divergence_of_newest": candidates.spread(newest),
            "older_chosen": sum(place < last for place, last in zip(chosen, newest, strict=True)),
        }
        stateful = self.options.keeps_client_state(self.config)
        job_keys = accepted_job_keys(state.memory, updates, stateful)
        return state.end_round(
            {SLOT: self.store.put(mean)},
            CacheMemory(job_keys=job_keys, cache=cache, chosen=digests),
            Metrics(scalars=metrics | aggregation.step_metrics(mean, server)),
        )

    def _updated_cache(self, memory: CacheMemory, updates: Sequence[Update]) -> dict[str, list[str]]:
        cache = {name: list(hashes) for name, hashes in memory.cache.items()}
        for name, digest in sent_adapters(updates).items():
            earlier = [known for known in cache.get(name, []) if known != digest]
            cache[name] = [*earlier, digest][-self.options.cached :]
        return cache

    def _candidates(
        self, cache: dict[str, list[str]], names: list[str], weights: dict[str, float], server: Adapter
    ) -> Candidates:
        digests: list[str] = []
        rows: list[list[int]] = []
        for name in names:
            rows.append(list(range(len(digests), len(digests) + len(cache[name]))))
            digests += cache[name]
        products = aggregation.inner_products(self.store.open(digests), server)
        shares = np.array([weights[name] for name in names])
        return Candidates(products, rows, shares / shares.sum())

    def outcome(self, state: ServerState[CacheMemory]) -> OutcomeRecord:
        """The server's adapter."""
        return shared_policy(state, SLOT)
