"""Selector accuracy on held-out pairs, per client and per domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from components.learning.selector import score_pairs
from components.models.selector import Selector, majority_vote

if TYPE_CHECKING:
    from components.models.adapters import Adapter


def client_accuracy(selector: Selector, adapters: Sequence[Adapter], pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Share of held-out pairs on which the selectors' majority agrees with their owner.

    Args:
        selector: the resident model; its slot is overwritten.
        adapters: the ensemble that is measured; one for FedBis.
        pairs: held-out rows with prompt, chosen, rejected, client_id, domain.

    Returns:
        mean, worst and best over clients (each client counts once), `clients` {id: accuracy},
        `domains` {domain: accuracy over its pairs}, `pairs`.
    """
    right = []
    for adapter in adapters:
        selector.slot.load(adapter)
        right.append(score_pairs(selector, pairs) > 0)
    agreed = majority_vote(np.array(right, dtype=int))
    clients = {name: float(agreed[rows].mean()) for name, rows in _rows_by(pairs, "client_id").items()}
    values = list(clients.values())
    return {
        "mean": float(np.mean(values)), "worst": min(values), "best": max(values), "clients": clients,
        "domains": {name: float(agreed[rows].mean()) for name, rows in _rows_by(pairs, "domain").items()}, "pairs": len(pairs)}


def _rows_by(pairs: Sequence[dict[str, Any]], column: str) -> dict[str, np.ndarray]:
    values = np.array([pair[column] for pair in pairs], dtype=object)
    return {name: np.flatnonzero(values == name) for name in sorted(set(values.tolist()))}
