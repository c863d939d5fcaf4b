"""Assigns the pairs of a source to clients, as data.partition says."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from components.config import DataConfig, unknown_name
from components.data import partition
from components.data.records import TEXT_COLUMNS, DataError

if TYPE_CHECKING:
    import pandas as pd


Owned = tuple["pd.DataFrame", dict[str, int]]
"""Pairs with their clients, and the number of those whose owner or value is none, by reason."""


def assign_clients(pairs: pd.DataFrame, data: DataConfig, seed: int) -> Owned:
    """Assign pairs, which have groups and splits, to clients."""
    try:
        if data.partition == "natural":
            return _by_owner(pairs, data)
        if data.partition == "column":
            return _by_column(pairs, data)
        return _by_number(pairs, data, seed), {}
    except ValueError as error:
        raise DataError(f"partition '{data.partition}': {error}") from None


def _by_number(pairs: pd.DataFrame, data: DataConfig, seed: int) -> pd.DataFrame:
    """Pairs of clients that have numbers for names."""
    import pandas as pd

    assert data.clients is not None  # checked with the recipe
    groups = list(pairs["group"])
    if data.partition == "margin":
        margins = pairs.get("margin", pd.Series(np.nan, pairs.index))
        _refuse_missing(pairs, ~np.isfinite(margins), "no margin (a finite number)")
        clients = partition.by_margin(list(margins), groups, data.clients)
    elif data.partition == "dirichlet":
        clients = partition.dirichlet(list(pairs["domain"]), groups, data.clients, data.alpha, seed)
    else:
        clients = partition.iid(groups, data.clients, seed)
    width = max(2, len(str(data.clients - 1)))
    return pairs.assign(client_id=[f"client-{i:0{width}d}" for i in clients])


def _by_owner(pairs: pd.DataFrame, data: DataConfig) -> Owned:
    ownerless = int((pairs["client_id"].fillna("") == "").sum())
    if ownerless:
        raise ValueError(
            f"{ownerless} of {len(pairs)} rows have no client_id: partition 'natural' needs an owner for"
            " each; name the column of owners (data.columns={client_id: ...}), or set data.partition=iid and"
            " data.clients"
        )
    return _largest_clients(pairs, data, f"source {data.source} has", "owners")


def _by_column(pairs: pd.DataFrame, data: DataConfig) -> Owned:
    column = _column_of(pairs, data)
    empty = pairs[column].fillna("").map(str.strip) == ""
    _refuse_missing(pairs, empty, f"no value in the column '{data.column}'")
    owned = pairs.assign(client_id=partition.by_column(list(pairs[column]), data.column_clients))
    owned = owned[owned["client_id"].notna()]
    left_out = {"value of data.column not among the clients": len(pairs) - len(owned)}
    chosen, others = _largest_clients(owned, data, f"data.column '{data.column}' gives", "clients")
    return chosen, left_out | others


def _column_of(pairs: pd.DataFrame, data: DataConfig) -> str:
    """The column of the pairs that data.column names; `column` has the values of a file's own."""
    if "column" in pairs:
        return "column"
    existing = [column for column in TEXT_COLUMNS if column in pairs]
    if data.column is None or data.column not in existing:
        raise ValueError(unknown_name("data.column", str(data.column), existing))
    return data.column


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
