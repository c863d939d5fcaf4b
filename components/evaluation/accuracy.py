"""Accuracy of selectors, and of the implicit reward of policies, per client and per domain."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from components.federation.outcome import Positions
from components.learning.pair_scores import PairFigures
from components.results import AccuracyReport, AccuracySummary
from components.seeding import generator


def accuracy_report(figures: Mapping[str, PairFigures]) -> AccuracyReport:
    """Share of held-out pairs on which the models' majority agrees with their owner, see PairFigures.

    Each client counts once in `mean`. The preference accuracy of FedPDPO section 5 is by 'summed' or
    'per_token' log-likelihood (the paper does not say which): log pi of the chosen completion less that
    of the rejected one.

    Args:
        figures: of each client, by name; each has at least one pair.
    """
    figures = dict(sorted(figures.items()))
    metrics = next(iter(figures.values())).by_metric
    summary = _summarize((name, own.votes / own.pairs) for name, own in figures.items())
    margins = {name: own.margin / own.pairs for name, own in figures.items()}
    rewards = {name: own.reward / own.pairs for name, own in figures.items() if own.reward is not None}
    domains: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for own in figures.values():
        for domain, (pairs, votes) in own.domains.items():
            domains[domain] = (domains[domain][0] + pairs, domains[domain][1] + votes)
    assigned = {name: own.assigned for name, own in figures.items() if own.assigned is not None}
    return AccuracyReport(
        **summary.model_dump(),
        domains={name: votes / pairs for name, (pairs, votes) in sorted(domains.items())},
        pairs=sum(own.pairs for own in figures.values()),
        margin=float(np.mean(list(margins.values()))),
        margins=margins,
        reward=float(np.mean(list(rewards.values()))) if rewards else None,
        rewards=rewards or None,
        by_metric={
            metric: _summarize((name, own.by_metric[metric] / own.pairs) for name, own in figures.items())
            for metric in metrics
        },
        assigned=accuracy_report(assigned) if assigned else None,
    )


def _summarize(shares: Iterable[tuple[str, float]]) -> AccuracySummary:
    clients = dict(shares)
    values = list(clients.values())
    return AccuracySummary(mean=float(np.mean(values)), worst=min(values), best=max(values), clients=clients)


def sample_evenly(counts: Mapping[str, int], limit: int | None, seed: int) -> Positions:
    """A seeded sample of the clients' pairs, with equally many of each client.

    A client with fewer pairs contributes all of them.

    Args:
        counts: number of pairs of each client.
        limit: maximum number of pairs; None takes all.

    Returns:
        by client with pairs, the positions of its pairs in the sample; None for all.
    """
    owners = _owners(counts)
    if limit is None or limit >= len(owners):
        return {client: None for client, count in sorted(counts.items()) if count}
    drawn: Counter[str] = Counter()
    turns: list[tuple[int, str, int]] = []
    for n in generator(seed, "accuracy pairs").permutation(len(owners)):
        client, position = owners[n]
        turns.append((drawn[client], client, position))
        drawn[client] += 1
    return _by_client((client, position) for _, client, position in sorted(turns)[:limit])


def sample_pairs(counts: Mapping[str, int], limit: int, seed: int) -> Positions:
    """A seeded sample of the clients' pairs; each pair is drawn with the same probability.

    Arguments and returned value as of `sample_evenly`.
    """
    owners = _owners(counts)
    if limit >= len(owners):
        return {client: None for client, count in sorted(counts.items()) if count}
    chosen = generator(seed, "preference pairs").choice(len(owners), limit, replace=False)
    return _by_client(owners[n] for n in chosen)


def _owners(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """The client of each pair, and the pair's position among the client's, by the clients' names."""
    return [(client, position) for client, count in sorted(counts.items()) for position in range(count)]


def _by_client(pairs: Iterable[tuple[str, int]]) -> Positions:
    positions: dict[str, list[int]] = {}
    for client, position in sorted(pairs):
        positions.setdefault(client, []).append(position)
    return positions
