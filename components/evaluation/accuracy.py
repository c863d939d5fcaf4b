"""Accuracy of selectors, and of the implicit reward of policies, per client and per domain."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np

from components.federation.outcome import PairCounts
from components.learning.pair_scores import PairFigures
from components.results import AccuracyReport, AccuracySummary
from components.seeding import generator


def accuracy_report(
    figures: Mapping[str, PairFigures], missing: Mapping[str, str] = MappingProxyType({})
) -> AccuracyReport:
    """Share of held-out pairs on which the models' majority agrees with their owner, see PairFigures.

    The figures are by client, of which each has at least one pair, and counts once in `mean`. The preference
    accuracy of FedPDPO section 5 is by 'summed' or 'per_token' log-likelihood (the paper does not say which):
    log pi of the chosen completion less that of the rejected one. `missing` has the reasons of clients that
    were asked and gave no figures.
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
        assigned=accuracy_report(assigned, missing) if assigned else None,
        missing=dict(missing),
    )


def _summarize(shares: Iterable[tuple[str, float]]) -> AccuracySummary:
    clients = dict(shares)
    values = list(clients.values())
    return AccuracySummary(mean=float(np.mean(values)), worst=min(values), best=max(values), clients=clients)


def count_evenly(counts: Mapping[str, int], limit: int | None, seed: int) -> PairCounts:
    """How many pairs each client measures, so that clients contribute equally many; None for all its pairs.

    A client with fewer pairs contributes all of them; a seeded order says who contributes one more. There are
    at most `limit` pairs, and None takes all.
    """
    left = {client: count for client, count in sorted(counts.items()) if count}
    if limit is None or limit >= sum(left.values()):
        return dict.fromkeys(left)
    clients = list(left)
    order = [clients[n] for n in generator(seed, "accuracy pairs").permutation(len(clients))]
    turns = sorted((turn, place) for place, name in enumerate(order) for turn in range(left[name]))
    return Counter(order[place] for _, place in turns[:limit])


def count_uniformly(counts: Mapping[str, int], limit: int, seed: int) -> PairCounts:
    """As `count_evenly`, but each pair is drawn with the same probability."""
    left = {client: count for client, count in sorted(counts.items()) if count}
    if limit >= sum(left.values()):
        return dict.fromkeys(left)
    drawn = generator(seed, "preference pairs").multivariate_hypergeometric(list(left.values()), limit)
    return {client: int(count) for client, count in zip(left, drawn, strict=True) if count}
