"""The choice of one candidate adapter per client so that the chosen ones are close together (FedCDA).

An exact search over T candidates of each of A clients takes T^A evaluations. The approximation
iterates over blocks of clients: it tries all combinations of one block while the other clients keep
their choice, until no block changes. The objective never increases, and with one block the search
is exact. Distances follow from the inner products of the candidates' movements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

MAX_PASSES = 20
"""Maximum number of passes over the blocks. Each pass lowers the objective, so few are needed."""

Products = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Candidates:
    """The cached adapters among which one of each client is chosen."""

    products: Products  # [T, T] inner products of all candidates' movements
    rows: Sequence[Sequence[int]]  # by client, the rows of its candidates
    weights: npt.NDArray[np.float64]  # [M], of the clients; they sum to one

    def spread(self, chosen: Sequence[int]) -> float:
        """sum_m p_m |phi_m - mean|^2 of a choice, by client the index of its candidate."""
        members = [self.rows[client][place] for client, place in enumerate(chosen)]
        return spread(self.products, members, self.weights)


def spread(products: Products, members: Sequence[int], weights: npt.NDArray[np.float64]) -> float:
    """sum_m p_m |phi_m - mean|^2 = sum_m p_m |phi_m|^2 - |mean|^2, for weights that sum to one.

    The products [T, T] are of all candidates' movements from any common origin; members are M of
    their rows, and weights [M].
    """
    inner = products[np.ix_(members, members)]
    return max(0.0, float(weights @ np.diag(inner) - weights @ inner @ weights))


def choose_closest(
    candidates: Candidates, start: Sequence[int], free: Sequence[int], block_size: int
) -> list[int]:
    """Choose one candidate of each of M clients so that they are close together, see the module.

    Of equally good combinations it is the first one, beginning with the start.

    Args:
        start: [M], the index of the candidate that each client starts with.
        free: clients whose choice may change.
        block_size: number of them that are tried together.
    """
    chosen = list(start)
    blocks = [list(free[begin : begin + block_size]) for begin in range(0, len(free), block_size)]
    best = candidates.spread(chosen)
    for _ in range(MAX_PASSES):
        changed = False
        for members in blocks:
            for places in product(*(range(len(candidates.rows[client])) for client in members)):
                trial = list(chosen)
                for client, place in zip(members, places, strict=True):
                    trial[client] = place
                value = candidates.spread(trial)
                if value < best * (1 - 1e-12):
                    chosen = trial
                    best = value
                    changed = True
        if not changed:
            break
    return chosen
