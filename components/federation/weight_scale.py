"""How much the weights of eq. 8 of FedBiscuit rescale an adapter over the rounds.

The weights (M / A) p_m of a round's clients sum to s_r, which is one only in expectation. A round
thus multiplies the server's adapter by s_r, and R rounds by the product of s_0 .. s_R-1, whatever
the clients learn. Its logarithm drifts downwards, because E[log s] < log E[s] = 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from components.federation.aggregators import Aggregator
from components.federation.protocol import Federation, ServerState
from components.federation.sampling import sample_clients

HARMLESS = (0.1, 10.0)
"""Products of the weight sums that are not warned of."""


def planned_weight_sums(
    weights: Mapping[str, float], clients_per_round: int, seed: int, rounds: Sequence[int]
) -> list[float]:
    """s_r = (M / A) sum p_m over the clients that each round will sample, from p_m and A."""
    scale = len(weights) / clients_per_round
    samples = (sample_clients(list(weights), clients_per_round, seed, r) for r in rounds)
    return [scale * sum(weights[name] for name in names) for names in samples]


def scale_warnings(
    aggregator: Aggregator,
    federation: Federation,
    clients_per_round: int,
    seed: int,
    phases: Mapping[str, Sequence[int]],
) -> list[str]:
    """A sentence for each adapter that the planned rounds would shrink or inflate.

    The phases are the indices of the rounds in which each adapter is aggregated.
    """
    if not aggregator.rescales:
        return []
    warnings = []
    for name, rounds in phases.items():
        product = math.prod(planned_weight_sums(federation.weights, clients_per_round, seed, rounds))
        if not HARMLESS[0] <= product <= HARMLESS[1]:
            warnings.append(
                f"federation.options.aggregator multiplies the adapter '{name}' by {product:.1e} over its"
                f" {len(rounds)} rounds, whatever the clients learn, because the weights of a round do not"
                " sum to one: use 'uniform' or 'participation'."
            )
    return warnings


def running_scale(
    aggregator: Aggregator, state: ServerState[Any], scalars: Mapping[str, float], prefix: str = ""
) -> dict[str, float]:
    """The product of the weight sums up to a round, as the metric `weight_product`.

    The state is that before the round, whose metric's name has the prefix; the scalars are those of
    the round. An aggregator whose weights sum to one has no such metric.
    """
    if not aggregator.rescales:
        return {}
    before = state.metrics.scalars.get(f"{prefix}weight_product", 1.0)
    return {"weight_product": before * scalars["weight_sum"]}
