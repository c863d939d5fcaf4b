"""Assigns rows to clients.

By natural owner, by a Dirichlet draw over domains, or evenly (FedBiscuit section 6); by margin, or
by a column (FedPDPO D.1.2). Except for natural owners and columns, the rows of one group (a
question, a post) go to one client, "ensuring that no questions overlap between clients".
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from components.config import unknown_name
from components.data.data_report import PartitionSummary
from components.seeding import generator

ClientIndices = npt.NDArray[np.int64]
"""Client of each row, [N]."""


def dirichlet(
    domains: Sequence[Hashable],
    groups: Sequence[Hashable],
    n_clients: int,
    alpha: float,
    seed: int,
) -> ClientIndices:
    """Assign groups to clients, each domain by its own Dirichlet(alpha) proportions.

    A small alpha gives clients few domains each (FedBiscuit: 0.3), a large one nearly the same
    mixture to all. The groups of a domain are shuffled and divided at the cumulative proportions. A
    client without a group gets one of the client with most groups, so every client owns at least
    one. The result does not depend on the order of rows.

    Args:
        domains: domain of each row [N]; a group's domain is that of most of its rows.
        groups: group of each row [N].
        n_clients: number of clients, at most the number of groups.
        alpha: concentration, above 0.
        seed: of the recipe.

    Returns:
        client of each row, int64 [N] in [0, n_clients).

    Raises:
        ValueError: lengths differ, alpha is not above 0, or there are more clients than groups.
    """
    if len(domains) != len(groups):
        raise ValueError(
            f"domains has {len(domains)} rows and groups has {len(groups)}: each row needs one of both"
        )
    if not alpha > 0:
        raise ValueError(f"alpha is {alpha}: a Dirichlet distribution needs a concentration above 0")
    _group_sizes(groups, n_clients)
    client_of: dict[str, int] = {}
    for domain, members in sorted(_groups_by_domain(domains, groups).items()):
        draw = generator(seed, "dirichlet", domain)
        shuffled = [members[i] for i in draw.permutation(len(members))]
        clients = draw.permutation(n_clients)  # or rounding would favor the same clients in every domain
        ends = np.cumsum(draw.dirichlet(np.full(n_clients, alpha))) * len(shuffled)
        places = np.minimum(np.searchsorted(ends, np.arange(len(shuffled)) + 0.5), n_clients - 1)
        client_of |= {group: int(clients[place]) for group, place in zip(shuffled, places, strict=True)}
    _fill_empty(client_of, n_clients)
    return _clients_of_rows(groups, client_of)


def _groups_by_domain(domains: Sequence[Hashable], groups: Sequence[Hashable]) -> dict[str, list[str]]:
    """The sorted groups of each domain; a group's domain is that of most of its rows."""
    votes: dict[str, Counter[str]] = {}
    for domain, group in zip(domains, groups, strict=True):
        votes.setdefault(str(group), Counter())[str(domain)] += 1
    members: dict[str, list[str]] = {}
    for group, counts in sorted(votes.items()):
        ranked = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
        members.setdefault(ranked[0][0], []).append(group)
    return members


def iid(groups: Sequence[Hashable], n_clients: int, seed: int) -> ClientIndices:
    """Assign shuffled groups evenly: each goes to the client with the fewest rows so far.

    Args:
        groups: group of each row [N].
        n_clients: number of clients, at most the number of groups.
        seed: of the recipe.

    Returns:
        client of each row, int64 [N] in [0, n_clients).

    Raises:
        ValueError: there are more clients than groups.
    """
    sizes = _group_sizes(groups, n_clients)
    names = sorted(sizes)
    heap = [(0, client) for client in range(n_clients)]
    client_of: dict[str, int] = {}
    for i in generator(seed, "iid").permutation(len(names)):
        rows, client = heapq.heappop(heap)
        client_of[names[i]] = client
        heapq.heappush(heap, (rows + sizes[names[i]], client))
    return _clients_of_rows(groups, client_of)


def by_margin(margins: Sequence[float], groups: Sequence[Hashable], n_clients: int) -> ClientIndices:
    """Sort groups by margin, the greatest first, and divide them into contiguous shards.

    The shard with the greatest margins, the easiest, is client 0's (FedPDPO D.1.2, IMDB). A group's
    margin is the mean of its rows'; equal ones are in the order of the groups' names. Each shard
    ends at the end of the group that is nearest to an even share of the rows, the earlier of two as
    near, and leaves every client a group. Nothing is random, and the result does not depend on the
    order of rows.

    Args:
        margins: how much better chosen is than rejected, of each row [N], in any unit; finite.
        groups: group of each row [N].
        n_clients: number of clients, at most the number of groups.

    Returns:
        client of each row, int64 [N] in [0, n_clients).

    Raises:
        ValueError: lengths differ, or there are more clients than groups.
    """
    if len(margins) != len(groups):
        raise ValueError(
            f"margins has {len(margins)} rows and groups has {len(groups)}: each row needs one of both"
        )
    sizes = _group_sizes(groups, n_clients)
    of_group: dict[str, list[float]] = {group: [] for group in sizes}
    for margin, group in zip(margins, groups, strict=True):
        of_group[str(group)].append(margin)
    # fsum does not depend on the order
    means = {group: math.fsum(values) / sizes[group] for group, values in of_group.items()}
    ranked = sorted(sizes, key=lambda group: (-means[group], group))
    ends = np.cumsum([sizes[group] for group in ranked])
    client_of: dict[str, int] = {}
    start = 0
    for client in range(n_clients):
        last = len(ranked) - (n_clients - client)  # leaves one group for each later client
        distance = np.abs(ends[start : last + 1] * n_clients - (client + 1) * len(groups))
        end = start + int(np.argmin(distance)) + 1
        client_of |= dict.fromkeys(ranked[start:end], client)
        start = end
    return _clients_of_rows(groups, client_of)


def by_column(values: Sequence[str], clients: Mapping[str, Sequence[str]] | None = None) -> list[str | None]:
    """Assign rows to clients by their value in a column (FedPDPO D.1.2, code by language).

    Rows of one group may go to several clients.

    Args:
        values: of each row [N], compared exactly.
        clients: by client, its values; None: each value is a client of that name.

    Returns:
        name of each row's client [N], None if no client has its value.

    Raises:
        ValueError: no row has a client's value; the nearest one is named.
    """
    if clients is None:
        return list(values)
    known = set(values)
    client_of: dict[str, str] = {}
    for client, own in clients.items():
        for value in own:
            if value not in known:
                raise ValueError(unknown_name(f"data.column_clients.{client}: value", value, known))
            client_of[value] = client
    return [client_of.get(value) for value in values]


def summarize(counts: Sequence[int]) -> PartitionSummary:
    """The partition's row of FedBiscuit's table 5.

    Args:
        counts: number of samples of each client.
    """
    if not counts:
        return PartitionSummary(samples=0, clients=0, max=0, min=0, std=0.0)
    std = float(np.array(counts, dtype=np.float64).std())
    return PartitionSummary(
        samples=sum(counts), clients=len(counts), max=max(counts), min=min(counts), std=round(std, 2)
    )


def _group_sizes(groups: Sequence[Hashable], n_clients: int) -> Counter[str]:
    sizes = Counter(str(group) for group in groups)
    if n_clients < 1:
        raise ValueError(f"n_clients is {n_clients}: at least 1 is needed")
    if n_clients > len(sizes):
        raise ValueError(
            f"{n_clients} clients cannot each own one of {len(sizes)} groups: use at most"
            f" {len(sizes)} clients"
        )
    return sizes


def _fill_empty(client_of: dict[str, int], n_clients: int) -> None:
    """Move a group of the client with most groups to each client that has none."""
    groups: list[list[str]] = [[] for _ in range(n_clients)]
    for group in sorted(client_of):
        groups[client_of[group]].append(group)
    for client in range(n_clients):
        if not groups[client]:
            largest = max(range(n_clients), key=lambda other: (len(groups[other]), -other))
            group = groups[largest].pop()
            groups[client].append(group)
            client_of[group] = client


def _clients_of_rows(groups: Sequence[Hashable], client_of: Mapping[str, int]) -> ClientIndices:
    return np.array([client_of[str(group)] for group in groups], dtype=np.int64)
