"""Accuracy on held-out pairs, per client and per domain: of selectors, and of the implicit reward of policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def client_accuracy(
    margins: np.ndarray, pairs: Sequence[dict[str, Any]], rewards: np.ndarray | None = None, others: Mapping[str, np.ndarray] | None = None,
) -> dict[str, Any]:
    """Share of held-out pairs on which the majority agrees with their owner.

    Args:
        margins: [U, N], above 0 where a model scores the chosen completion above the rejected one. A pair that it
            scores the same, or on which the votes tie, counts half.
        pairs: N held-out rows with client_id and domain.
        rewards: [U, N], implicit rewards of the chosen completions over beta, log pi / pi_ref (DRIFT section 7.1); None where
            the models are no policies.
        others: [U, N] each, other differences that a model is right by where they are above 0. The preference accuracy of FedPDPO section 5 is by
            'summed' or by 'per_token' (it says log-likelihood, and not which): log pi of chosen less that of rejected, over all tokens or a token.

    Returns:
        mean, worst and best over clients (each client counts once), `clients` {id: accuracy},
        `domains` {domain: accuracy over its pairs}, `pairs`; `margin` is the clients' mean of their mean margin over the
        models, `margins` {id: mean margin} (log-odds of a selector; of a policy the reward margin over beta); `reward` and
        `rewards` are the same of the rewards, where they are given. `by` {name: mean, worst, best, clients} is the accuracy by each of the others.
    """
    right = _right(margins)
    clients = {name: float(right[rows].mean()) for name, rows in _rows_by(pairs, "client_id").items()}
    values = list(clients.values())
    means = {}
    for name, values_of in (("margin", margins), ("reward", rewards)):
        if values_of is not None:
            means[f"{name}s"] = {client: float(values_of.mean(axis=0)[rows].mean()) for client, rows in _rows_by(pairs, "client_id").items()}
            means[name] = float(np.mean(list(means[f"{name}s"].values())))
    if others:
        means["by"] = {name: client_accuracy(found, pairs) for name, found in others.items()}
        means["by"] = {name: {key: found[key] for key in ("mean", "worst", "best", "clients")} for name, found in means["by"].items()}
    return {
        "mean": float(np.mean(values)), "worst": min(values), "best": max(values), "clients": clients,
        "domains": {name: float(right[rows].mean()) for name, rows in _rows_by(pairs, "domain").items()}, "pairs": len(pairs), **means}


def assigned_accuracy(
    margins: np.ndarray, names: Sequence[str], assigned: Mapping[str, str], pairs: Sequence[dict[str, Any]], rewards: np.ndarray | None = None,
    others: Mapping[str, np.ndarray] | None = None,
) -> dict[str, Any]:
    """The same, where each client uses the one adapter that it is assigned (that of its group, or its own).

    Args:
        margins: [U, N], as client_accuracy.
        names: [U], of the adapters.
        assigned: name of the adapter by client; pairs of clients without one are left out.
        pairs: N held-out rows.
        rewards, others: [U, N] or None, as client_accuracy.
    """
    rows = [n for n, pair in enumerate(pairs) if pair["client_id"] in assigned]
    own = [list(names).index(assigned[pairs[n]["client_id"]]) for n in rows]
    return client_accuracy(
        margins[own, rows][None, :], [pairs[n] for n in rows], None if rewards is None else rewards[own, rows][None, :],
        {name: values[own, rows][None, :] for name, values in (others or {}).items()})


def _right(margins: np.ndarray) -> np.ndarray:
    votes = np.where(margins > 0, 1.0, np.where(margins < 0, 0.0, 0.5)).mean(axis=0)
    return np.where(votes > 0.5, 1.0, np.where(votes < 0.5, 0.0, 0.5))


def _rows_by(pairs: Sequence[dict[str, Any]], column: str) -> dict[str, np.ndarray]:
    values = np.array([pair[column] for pair in pairs], dtype=object)
    return {name: np.flatnonzero(values == name) for name in sorted(set(values.tolist()))}
