"""Accuracy of selectors, and of the implicit reward of policies, per client and per domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from components.data.records import PairRow, Pairs
from components.learning.pair_scores import Array, PreferenceScores
from components.results import AccuracyReport, AccuracySummary
from components.seeding import generator


def accuracy_report(scores: PreferenceScores, pairs: Pairs) -> AccuracyReport:
    """Share of held-out pairs on which the models' majority agrees with their owner.

    A pair with a margin of 0, or on which votes tie, counts half, and so does a pair on which the
    majority depends on the order of its completions: a selector that always chooses one position
    has an accuracy of exactly one half. Each client counts once in
    `mean`. The preference accuracy of FedPDPO section 5 is by 'summed' or 'per_token'
    log-likelihood (the paper does not say which): log pi of the chosen completion less that of the
    rejected one.

    Args:
        scores: of U models on N pairs.
        pairs: N held-out rows with client_id and domain.
    """
    report = _report(scores, pairs)
    if scores.assigned is None:
        return report
    columns, assigned = scores.by_assigned()
    return report.model_copy(update={"assigned": _report(assigned, [pairs[n] for n in columns])})


def _report(scores: PreferenceScores, pairs: Pairs) -> AccuracyReport:
    votes = _votes(scores.orders)
    summary = _summarize(votes, pairs)
    margins = _client_means(np.mean(scores.orders, axis=0), pairs)
    rewards = None if scores.rewards is None else _client_means(scores.rewards, pairs)
    return AccuracyReport(
        mean=summary.mean,
        worst=summary.worst,
        best=summary.best,
        clients=summary.clients,
        domains={name: float(votes[rows].mean()) for name, rows in _rows_by(pairs, "domain").items()},
        pairs=len(pairs),
        margin=float(np.mean(list(margins.values()))),
        margins=margins,
        reward=None if rewards is None else float(np.mean(list(rewards.values()))),
        rewards=rewards,
        by_metric={
            name: _summarize(_votes([values]), pairs) for name, values in scores.margins_by_metric.items()
        },
    )


def _summarize(votes: Array, pairs: Pairs) -> AccuracySummary:
    clients = {name: float(votes[rows].mean()) for name, rows in _rows_by(pairs, "client_id").items()}
    values = list(clients.values())
    return AccuracySummary(mean=float(np.mean(values)), worst=min(values), best=max(values), clients=clients)


def _client_means(values: Array, pairs: Pairs) -> dict[str, float]:
    """By client, the mean over its pairs of the mean over models."""
    means = values.mean(axis=0)
    return {name: float(means[rows].mean()) for name, rows in _rows_by(pairs, "client_id").items()}


def _votes(orders: Sequence[Array]) -> Array:
    """The mean of the majority over the orders of presentation, [N], of margins [U, N] each."""
    votes: Array = np.mean([_majority(margins) for margins in orders], axis=0)
    return votes


def _majority(margins: Array) -> Array:
    """The majority of the models on each pair, [N]: 1 for chosen, 0 for rejected, 0.5 for a tie."""
    votes = np.where(margins > 0, 1.0, np.where(margins < 0, 0.0, 0.5)).mean(axis=0)
    return np.where(votes > 0.5, 1.0, np.where(votes < 0.5, 0.0, 0.5))


def _rows_by(pairs: Pairs, column: Literal["client_id", "domain"]) -> dict[str, npt.NDArray[np.int64]]:
    values = np.array([pair[column] for pair in pairs], dtype=object)
    return {name: np.flatnonzero(values == name) for name in sorted(set(values.tolist()))}


def sample_evenly(pairs: Pairs, limit: int | None, seed: int) -> list[PairRow]:
    """A seeded sample of pairs, in their order, with equally many of each client.

    A client with fewer pairs contributes all of them.

    Args:
        pairs: rows with client_id.
        limit: maximum number of pairs; None takes all.
        seed: the sample is a function of it.
    """
    if limit is None or limit >= len(pairs):
        return list(pairs)
    rows_by_client: dict[str, list[int]] = {}
    for n in generator(seed, "accuracy pairs").permutation(len(pairs)):
        rows_by_client.setdefault(pairs[n]["client_id"], []).append(int(n))
    turns = []
    for client, rows in rows_by_client.items():
        turns += [(turn, client, n) for turn, n in enumerate(rows)]
    return [pairs[n] for n in sorted(n for _, _, n in sorted(turns)[:limit])]
