"""Who owns which row: by natural owner, by a Dirichlet draw over domains, or evenly (FedBiscuit section 6); by margin, or by a column (FedPDPO D.1.2).

But for natural owners and columns, the rows of one group (a question, a post) go to one client, "ensuring that no questions
overlap between clients".
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from components.config import unknown_name
from components.seeding import generator


def dirichlet(domains: Sequence[Hashable], groups: Sequence[Hashable], n_clients: int, alpha: float, seed: int) -> np.ndarray:
    """Deal groups out to clients, each domain by its own Dirichlet(alpha) proportions over the clients.

    A small alpha gives clients few domains each (FedBiscuit: 0.3), a large one nearly the same mixture to all. The
    groups of a domain are shuffled and cut at the cumulative proportions. A client that comes out empty gets a group
    of the client that has most, so every client owns at least one. The result does not depend on the order of rows.

    Args:
        domains: domain of each row [N]; a group's domain is that of most of its rows.
        groups: group of each row [N].
        n_clients: number of clients, at most the number of groups.
        alpha: concentration, above 0.
        seed: of the recipe.

    Returns:
        Client of each row, int64 [N] in [0, n_clients).

    Raises:
        ValueError: lengths differ, alpha is not above 0, or there are more clients than groups.
    """
    if len(domains) != len(groups):
        raise ValueError(f"domains has {len(domains)} rows and groups has {len(groups)}: each row needs one of both")
    if not alpha > 0:
        raise ValueError(f"alpha is {alpha}: a Dirichlet distribution needs a concentration above 0")
    sizes = _sizes(groups, n_clients)
    votes: dict[str, Counter[str]] = {group: Counter() for group in sizes}
    for domain, group in zip(domains, groups, strict=True):
        votes[str(group)][str(domain)] += 1
    members: dict[str, list[str]] = {}
    for group in sorted(sizes):
        members.setdefault(min(votes[group], key=lambda d: (-votes[group][d], d)), []).append(group)

    owner: dict[str, int] = {}
    for domain in sorted(members):
        draw = generator(seed, "dirichlet", domain)
        shuffled = [members[domain][i] for i in draw.permutation(len(members[domain]))]
        clients = draw.permutation(n_clients)       # or rounding would favour the same clients in every domain
        cuts = np.cumsum(draw.dirichlet(np.full(n_clients, alpha))) * len(shuffled)
        slots = np.minimum(np.searchsorted(cuts, np.arange(len(shuffled)) + 0.5), n_clients - 1)
        owner |= {group: int(clients[slot]) for group, slot in zip(shuffled, slots, strict=True)}
    _fill_empty(owner, n_clients)
    return np.array([owner[str(group)] for group in groups], dtype=np.int64)


def iid(groups: Sequence[Hashable], n_clients: int, seed: int) -> np.ndarray:
    """Deal shuffled groups out evenly: each goes to the client that has fewest rows so far.

    Args:
        groups: group of each row [N].
        n_clients: number of clients, at most the number of groups.
        seed: of the recipe.

    Returns:
        Client of each row, int64 [N] in [0, n_clients).

    Raises:
        ValueError: there are more clients than groups.
    """
    sizes = _sizes(groups, n_clients)
    names = sorted(sizes)
    heap = [(0, client) for client in range(n_clients)]
    owner = {}
    for i in generator(seed, "iid").permutation(len(names)):
        rows, client = heapq.heappop(heap)
        owner[names[i]] = client
        heapq.heappush(heap, (rows + sizes[names[i]], client))
    return np.array([owner[str(group)] for group in groups], dtype=np.int64)


def by_margin(margins: Sequence[float | None], groups: Sequence[Hashable], n_clients: int) -> np.ndarray:
    """Sort groups by margin, the greatest first, and cut them into contiguous shards, the easiest for client 0 (FedPDPO D.1.2, IMDB).

    A group's margin is the mean of its rows'; equal ones are in the order of the groups' names. Each cut is at the end of
    the group that is nearest to an even share of the rows, the earlier of two as near, and leaves every client a group.
    Nothing is drawn, and the result does not depend on the order of rows.

    Args:
        margins: how much better chosen is than rejected, of each row [N], in any unit.
        groups: group of each row [N].
        n_clients: number of clients, at most the number of groups.

    Returns:
        Client of each row, int64 [N] in [0, n_clients).

    Raises:
        ValueError: lengths differ, a margin is missing or not finite, or there are more clients than groups.
    """
    if len(margins) != len(groups):
        raise ValueError(f"margins has {len(margins)} rows and groups has {len(groups)}: each row needs one of both")
    bare = sum(margin is None or not math.isfinite(margin) for margin in margins)
    if bare:
        raise ValueError(f"{bare} of {len(margins)} rows have no margin, which must be a finite number: bring one for each, or use another partition")
    sizes = _sizes(groups, n_clients)
    of_group: dict[str, list[float]] = {group: [] for group in sizes}
    for margin, group in zip(margins, groups, strict=True):
        of_group[str(group)].append(float(margin))
    ranked = sorted(sizes, key=lambda group: (-math.fsum(of_group[group]) / sizes[group], group))   # fsum knows no order
    ends = np.cumsum([sizes[group] for group in ranked])
    owner, start = {}, 0
    for client in range(n_clients):
        last = len(ranked) - (n_clients - client)       # of the groups that leave one for each client after this
        off = np.abs(ends[start:last + 1] * n_clients - (client + 1) * len(groups))
        cut = start + int(np.argmin(off)) + 1
        owner |= dict.fromkeys(ranked[start:cut], client)
        start = cut
    return np.array([owner[str(group)] for group in groups], dtype=np.int64)


def by_column(values: Sequence[str | None], clients: Mapping[str, Sequence[str]] | None = None) -> list[str | None]:
    """The client of each row by its value in a column (FedPDPO D.1.2, code by language); rows of one group may go to several clients.

    Args:
        values: of each row [N], compared as they stand.
        clients: by client, its values; None: each value is a client of that name.

    Returns:
        Name of each row's client [N], None where no client has its value.

    Raises:
        ValueError: a row has no value, or a client's value is that of no row; the nearest one is named.
    """
    bare = sum(not (value or "").strip() for value in values)
    if bare:
        raise ValueError(f"{bare} of {len(values)} rows have no value in the column: fill them, or leave these rows out of the data")
    if clients is None:
        return list(values)
    known = set(values)
    for client, own in clients.items():
        for value in own:
            if value not in known:
                raise ValueError(unknown_name(f"data.column_clients.{client}: value", value, known))
    owner = {value: client for client, own in clients.items() for value in own}
    return [owner.get(value) for value in values]


def natural(client_ids: Sequence[str]) -> np.ndarray:
    """Each row stays with its owner.

    Returns:
        Index of each row's owner among the sorted distinct owners, int64 [N].

    Raises:
        ValueError: a row has no owner.
    """
    ownerless = sum(not c for c in client_ids)
    if ownerless:
        raise ValueError(f"{ownerless} of {len(client_ids)} rows have no client_id: partition 'natural' needs an owner for each; use 'dirichlet' or 'iid'")
    index = {c: i for i, c in enumerate(sorted(set(client_ids)))}
    return np.array([index[c] for c in client_ids], dtype=np.int64)


def statistics(counts: Sequence[int]) -> dict[str, int | float]:
    """The partition's row of FedBiscuit's table 5: samples, clients, and max, min and std of a client's samples.

    std is the population's (divided by the number of clients): all clients are counted, none is sampled. The table
    does not say which one it gives; the other is 1% larger for 53 clients and 0.25% for 200.

    Args:
        counts: samples of each client.
    """
    held = np.array(list(counts), dtype=np.float64)
    if not len(held):
        return {"samples": 0, "clients": 0, "max": 0, "min": 0, "std": 0.0}
    return {"samples": int(held.sum()), "clients": len(held), "max": int(held.max()), "min": int(held.min()), "std": round(float(held.std()), 2)}


def _sizes(groups: Sequence[Hashable], n_clients: int) -> Counter[str]:
    sizes = Counter(str(group) for group in groups)
    if n_clients < 1:
        raise ValueError(f"n_clients is {n_clients}: at least 1 is needed")
    if n_clients > len(sizes):
        raise ValueError(f"{n_clients} clients cannot each own one of {len(sizes)} groups: use at most {len(sizes)} clients")
    return sizes


def _fill_empty(owner: dict[str, int], n_clients: int) -> None:
    held: list[list[str]] = [[] for _ in range(n_clients)]
    for group in sorted(owner):
        held[owner[group]].append(group)
    for client in range(n_clients):
        if not held[client]:
            richest = max(range(n_clients), key=lambda c: (len(held[c]), -c))
            group = held[richest].pop()
            held[client].append(group)
            owner[group] = client
