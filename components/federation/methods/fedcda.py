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

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from components.federation import aggregation
from components.federation.closeness import Candidates, choose_closest
from components.federation.pair_training import PairTraining
from components.federation.protocol import Memory, Update, sent_adapters
from components.federation.server import Server, State
from components.models.store import Adapter


class CacheMemory(Memory):
    """The clients' last adapters."""

    # Hashes of each client's cached adapters, oldest first.
    cache: dict[str, list[str]] = Field(default_factory=dict)
    # Hash of the adapter of each client that the last mean is of.
    chosen: dict[str, str] = Field(default_factory=dict)


class FedCda(PairTraining):
    """Options of FedCDA."""

    memory_type: ClassVar[type[Memory]] = CacheMemory

    cached: int = Field(3, ge=1, le=1000)
    """Adapters of each client that the server keeps; Wang et al. keep a few."""
    warmup_rounds: int = Field(0, ge=0)
    """First rounds, in which the newest adapters are averaged, since earlier ones do not fit
    yet."""
    group: int = Field(3, ge=1, le=1000)
    """Sampled clients whose combinations are tried together, cached^group of them."""

    def aggregate(self, state: State, updates: Sequence[Update], server: Server) -> State:
        """The mean of the closest combination, over all clients that ever sent an update."""
        adapter_name = self.trained_model
        cache = {name: list(hashes) for name, hashes in state.memory.cache.items()}
        for name, digest in sent_adapters(updates).items():
            earlier = [known for known in cache.get(name, []) if known != digest]
            cache[name] = [*earlier, digest][-self.cached :]
        names = sorted(cache)
        participants = {update.client for update in updates}
        before = server.store.get(state.adapters[adapter_name])
        weights = state.federation.weights
        candidates = self._candidates(cache, weights, before, server)
        start = [
            len(cache[name]) - 1 if name in participants else cache[name].index(state.memory.chosen[name])
            for name in names
        ]
        is_warm = state.round >= self.warmup_rounds
        free = [names.index(name) for name in sorted(participants)] if is_warm else []
        places = choose_closest(candidates, start, free, self.group)
        chosen = {name: cache[name][place] for name, place in zip(names, places, strict=True)}
        adapters = ((server.store.get(digest), weights[name]) for name, digest in chosen.items())
        mean = server.process(state, aggregation.weighted_average(adapters), before, adapter_name, names)
        newest = [len(cache[name]) - 1 for name in names]
        metrics = {
            "weight_sum": 1.0,
            "divergence": candidates.spread(places),
            "divergence_of_newest": candidates.spread(newest),
            "older_chosen": sum(place < last for place, last in zip(places, newest, strict=True)),
        }
        metrics |= aggregation.step_metrics(mean, before)
        memory = CacheMemory(cache=cache, chosen=chosen)
        return state.end_round({adapter_name: server.store.put(mean)}, metrics, memory)

    def _candidates(
        self, cache: Mapping[str, list[str]], weights: Mapping[str, float], before: Adapter, server: Server
    ) -> Candidates:
        digests: list[str] = []
        rows: list[list[int]] = []
        for name in sorted(cache):
            rows.append(list(range(len(digests), len(digests) + len(cache[name]))))
            digests += cache[name]
        products = aggregation.inner_products(server.store.open(digests), before)
        shares = np.array([weights[name] for name in sorted(cache)])
        return Candidates(products, rows, shares / shares.sum())
