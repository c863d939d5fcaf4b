"""Assigns pairs to clients, samples them, and leaves clients out of the rounds.

Pairs are assigned by natural owner, by a Dirichlet draw over domains, or evenly (FedBiscuit
section 6); by margin, or by a column (FedPDPO D.1.2). Except for natural owners and columns, the
rows of one group (a question, a post) go to one client, "ensuring that no questions overlap between
clients".
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from components.config import DataConfig, unknown_name
from components.data.data_report import PartitionSummary
from components.data.records import TEXT_COLUMNS, DataError
from components.data.splits import sample
from components.seeding import generator

if TYPE_CHECKING:
    import pandas as pd

ClientIndices = npt.NDArray[np.int64]
"""Client of each row, [N]."""
Owned = tuple["pd.DataFrame", dict[str, int]]
"""Pairs with their clients, and the number of those whose owner or value is none, by reason."""
POOLED = "pooled"
"""The client that has the training pairs of all owners, with data.pooled."""


def assign_clients(pairs: pd.DataFrame, judges: set[str], data: DataConfig, seed: int) -> Owned:
    """Assign the pairs of a source to clients, as data.partition says.

    Args:
        pairs: with groups and splits.
        judges: owners of the judge's pairs.
        data: the recipe's section.
        seed: of the recipe.

    Raises:
        DataError: there are no pairs, they cannot be assigned, or a client is an owner of the judge's too.
    """
    if not len(pairs):
        raise DataError(f"source {data.source} gives no pairs")
    try:
        if data.partition == "natural":
            ownerless = int((pairs["client_id"].fillna("") == "").sum())
            if ownerless:
                raise ValueError(
                    f"{ownerless} of {len(pairs)} rows have no client_id: partition 'natural' needs an owner"
                    " for each; name the column of owners (data.columns={client_id: ...}), or set"
                    " data.partition=iid and data.clients"
                )
            owned, left_out = _largest_clients(pairs, data, f"source {data.source} has", "owners")
        elif data.partition == "column":
            owned, left_out = _by_column(pairs, data)
        else:
            owned, left_out = _by_number(pairs, data, seed), {}
    except ValueError as error:
        raise DataError(f"partition '{data.partition}': {error}") from None
    shared = sorted(judges.intersection(owned["client_id"]))
    if shared:
        raise DataError(
            f"source {data.source}: {len(shared)} owners are clients and the judge's too"
            f" ({', '.join(shared[:5])}): the judge's owners must take no part, so rename these clients"
        )
    return owned, left_out


def _by_number(pairs: pd.DataFrame, data: DataConfig, seed: int) -> pd.DataFrame:
    """Pairs of clients that have numbers for names."""
    import pandas as pd

    assert data.clients is not None  # checked with the recipe
    groups = list(pairs["group"])
    if data.partition == "margin":
        margins = pairs.get("margin", pd.Series(np.nan, pairs.index))
        _refuse_missing(pairs, ~np.isfinite(margins), "no margin (a finite number)")
        clients = by_margin(list(margins), groups, data.clients)
    elif data.partition == "dirichlet":
        clients = dirichlet(list(pairs["domain"]), groups, data.clients, data.alpha, seed)
    else:
        clients = iid(groups, data.clients, seed)
    width = max(2, len(str(data.clients - 1)))
    return pairs.assign(client_id=[f"client-{i:0{width}d}" for i in clients])


def _by_column(pairs: pd.DataFrame, data: DataConfig) -> Owned:
    column = data.column
    existing = [name for name in TEXT_COLUMNS if name in pairs]
    if "column" in pairs:  # the values of a file's own
        column = "column"
    elif column is None or column not in existing:
        raise ValueError(unknown_name("data.column", str(column), existing))
    empty = pairs[column].fillna("").map(str.strip) == ""
    _refuse_missing(pairs, empty, f"no value in the column '{data.column}'")
    owned = pairs.assign(client_id=by_column(list(pairs[column]), data.column_clients))
    owned = owned[owned["client_id"].notna()]
    left_out = {"value of data.column not among the clients": len(pairs) - len(owned)}
    chosen, others = _largest_clients(owned, data, f"data.column '{data.column}' gives", "clients")
    return chosen, left_out | others


def _largest_clients(pairs: pd.DataFrame, data: DataConfig, origin: str, kind: str) -> Owned:
    """The pairs of the data.clients clients with most pairs, or of all."""
    counts = Counter(pairs["client_id"])
    if data.clients is not None and data.clients > len(counts):
        raise ValueError(
            f"data.clients is {data.clients}, but {origin} only {len(counts)} {kind} with pairs, besides"
            f" those of the judge (data.options): set data.clients to {len(counts)}, or to null for all, or"
            " choose another data.partition"
        )
    largest = sorted(counts, key=lambda client: (-counts[client], client))[: data.clients]
    chosen = pairs[pairs["client_id"].isin(largest)]
    return chosen, {"owner not among the clients": len(pairs) - len(chosen)}


def _refuse_missing(pairs: pd.DataFrame, missing: pd.Series, what: str) -> None:
    """Refuse rows without a value that a partition needs, with their number by source.

    Raises:
        ValueError: there are such rows.
    """
    if not missing.any():
        return
    counts = Counter(pairs.loc[missing, "source"])
    sources = ", ".join(f"{count} of source {name}" for name, count in sorted(counts.items()))
    raise ValueError(
        f"{int(missing.sum())} of {len(pairs)} rows have {what}: {sources}; bring one for each row, or use"
        " another data.partition"
    )


def sample_pairs(pairs: pd.DataFrame, data: DataConfig, seed: int) -> pd.DataFrame:
    """At most data.max_pairs of the clients' pairs.

    Raises:
        DataError: a client has none of them.
    """
    if data.max_pairs is None or len(pairs) <= data.max_pairs:
        return pairs
    chosen = sample(list(pairs["prompt"]), list(pairs["split"]), data.max_pairs, seed)
    sampled = pairs[pairs["prompt"].isin(chosen)]
    clients = set(pairs["client_id"])
    empty = sorted(clients - set(sampled["client_id"]))
    if empty:
        raise DataError(
            f"data.max_pairs {data.max_pairs} leaves {len(empty)} of {len(clients)} clients without a pair"
            f" (such as {empty[0]}): raise it, or lower data.clients"
        )
    return sampled


def leave_out_unseen(pairs: pd.DataFrame, data: DataConfig, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Separate the pairs of the clients of the rounds from those of data.unseen_clients others.

    Returns:
        the pairs of the clients of the rounds; those of the others, with at most data.unseen_pairs training
        pairs of each.

    Raises:
        DataError: too few clients can be left out.
    """
    if not data.unseen_clients:
        return pairs, pairs[:0]
    clients = pairs.groupby("client_id")["split"].agg(set)
    suitable = [name for name, splits in clients.items() if {"train", "test"} <= splits]
    most = min(len(suitable), len(clients) - 1)
    if data.unseen_clients > most:
        raise DataError(
            f"data.unseen_clients is {data.unseen_clients}, but of {len(clients)} clients {len(suitable)}"
            f" have both training and held-out pairs, and one at least must train: use at most {most}"
        )
    drawn = generator(seed, "unseen clients").choice(len(suitable), data.unseen_clients, replace=False)
    unseen = sorted(suitable[n] for n in drawn)
    own = pairs[pairs["client_id"].isin(unseen)]
    unused: list[object] = []
    for name in unseen:
        training = own.index[(own["client_id"] == name) & (own["split"] == "train")]
        order = generator(seed, "unseen pairs", name).permutation(len(training))
        unused += list(training[order[data.unseen_pairs :]])
    return pairs[~pairs["client_id"].isin(unseen)], own.drop(index=unused)


def pool_training(
    pairs: pd.DataFrame, clients: Sequence[str], unseen: pd.DataFrame
) -> tuple[pd.DataFrame, list[str]]:
    """All pairs but the held-out ones as those of the client POOLED; and the clients.

    Raises:
        DataError: an owner has that name, also one of the unseen ones.
    """
    if POOLED in (*clients, *unseen["client_id"]):
        raise DataError(f"data.pooled names a client '{POOLED}', and an owner has this name: rename it")
    pairs = pairs.assign(client_id=pairs["client_id"].where(pairs["split"] == "test", POOLED))
    return pairs, sorted([*clients, POOLED])


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
    owned: list[list[str]] = [[] for _ in range(n_clients)]
    for group in sorted(client_of):
        owned[client_of[group]].append(group)
    for client in range(n_clients):
        if not owned[client]:
            largest = max(range(n_clients), key=lambda other: (len(owned[other]), -other))
            group = owned[largest].pop()
            owned[client].append(group)
            client_of[group] = client
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


def _clients_of_rows(groups: Sequence[Hashable], client_of: Mapping[str, int]) -> ClientIndices:
    return np.array([client_of[str(group)] for group in groups], dtype=np.int64)
