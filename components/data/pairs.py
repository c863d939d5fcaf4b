"""The pairs of the clients and of the judge: owners, sample, trees of thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from components.config import DataConfig
from components.data import partition
from components.data.data_report import TreeCounts
from components.data.lengths import TOO_LONG, drop_long
from components.data.ownership import assign_clients
from components.data.records import SPLITS, DataError
from components.data.splits import sample, with_splits
from components.data.tables import pairs_frame
from components.data.trees import thought_pairs
from components.seeding import generator

if TYPE_CHECKING:
    import pandas as pd


def client_pairs(
    rows: pd.DataFrame, judges: set[str], data: DataConfig, seed: int
) -> tuple[pd.DataFrame, list[str], dict[str, int]]:
    """Assign the pairs of a source to clients, and sample them.

    Args:
        rows: pairs with groups and splits.
        judges: owners of the judge's pairs.
        data: the recipe's section.
        seed: of the recipe.

    Returns:
        pairs with their clients; the ids of the clients, sorted; the number of other pairs by reason.
    """
    if not len(rows):
        raise DataError(f"source {data.source} gives no pairs")
    owned, left_out = assign_clients(rows, data, seed)
    clients = sorted(set(owned["client_id"]))
    shared = sorted(judges.intersection(clients))
    if shared:
        raise DataError(
            f"source {data.source}: {len(shared)} owners are clients and the judge's too"
            f" ({', '.join(shared[:5])}): the judge's owners must take no part, so rename these clients"
        )
    sampled = owned
    if data.max_pairs is not None and len(owned) > data.max_pairs:
        chosen = sample(list(owned["prompt"]), list(owned["split"]), data.max_pairs, seed)
        sampled = owned[owned["prompt"].isin(chosen)]
    empty = sorted(set(clients) - set(sampled["client_id"]))
    if empty:
        raise DataError(
            f"data.max_pairs {data.max_pairs} leaves {len(empty)} of {len(clients)} clients without a pair"
            f" (such as {empty[0]}): raise it, or lower data.clients"
        )
    left_out |= {"over max_pairs": len(owned) - len(sampled)}
    return sampled, clients, {reason: count for reason, count in left_out.items() if count}


def with_trees(
    pairs: pd.DataFrame, clients: Sequence[str], data: DataConfig, seed: int
) -> tuple[pd.DataFrame, TreeCounts | None]:
    """The pairs, with those of data.trees, whose questions are assigned to the clients."""
    import pandas as pd

    if data.trees is None:
        return pairs, None
    thoughts, dropped = thought_pairs(Path(data.trees), "data.trees", data.min_margin)
    short = drop_long(thoughts, "pairs of data.trees", data)
    if len(short) < len(thoughts):
        dropped[TOO_LONG] = len(thoughts) - len(short)
    drawn = with_splits(short, data.validation, data.test, seed)
    owners: dict[str, str] = {}
    for split in SPLITS:
        groups = [pair.split_group for pair in drawn if pair.split == split]
        if groups:
            owners |= assign_round_robin(groups, clients, split, seed)
    owned = [replace(pair, client_id=owners[pair.split_group]) for pair in drawn]
    counts = TreeCounts(pairs=len(owned), questions=len(owners), dropped=dropped)
    return pd.concat([pairs, pairs_frame(owned, "thoughts")], ignore_index=True), counts


def assign_round_robin(
    groups: Sequence[str], clients: Sequence[str], split: str, seed: int
) -> dict[str, str]:
    """Assign the groups of a split evenly to the clients, in a seeded order; returns the clients."""
    order = generator(seed, "trees", split).permutation(len(clients))
    turns = partition.iid(groups, min(len(clients), len(set(groups))), seed)
    return {group: clients[order[turn]] for group, turn in zip(groups, turns, strict=True)}
