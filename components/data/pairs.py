"""The pairs of the clients and of the judge: groups, splits, owners, sample, trees of thoughts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from components.config import DataConfig
from components.data import partition
from components.data.lengths import TOO_LONG, check_dropped, fits
from components.data.ownership import assign_clients
from components.data.records import SPLITS, DataError, SourceData
from components.data.report import TreeCounts
from components.data.splits import assign, one_spelling, sample
from components.data.tables import pairs_dataset
from components.data.trees import thought_pairs
from components.seeding import generator

if TYPE_CHECKING:
    import pandas as pd
    from datasets import Dataset


@dataclass(frozen=True)
class PreparedPairs:
    """The pairs of a prepared folder, and what was counted on the way.

    Attributes:
        pairs: of the clients, sorted by client and id, those of trees included.
        judge: of owners that are not clients.
        clients: ids of the clients, sorted.
        source_rows: number of pairs that the source gave.
        left_out: number of pairs left out, by reason.
        trees: of the pairs of trees beside the source; None where there are none.
    """

    pairs: pd.DataFrame
    judge: pd.DataFrame
    clients: list[str]
    source_rows: int
    left_out: dict[str, int]
    trees: TreeCounts | None


def prepare_pairs(source: SourceData, data: DataConfig, seed: int) -> PreparedPairs:
    """Split, partition and sample the pairs of a source.

    Args:
        source: the data of the source.
        data: the recipe's section.
        seed: of the recipe.

    Raises:
        DataError: the data cannot be used.
    """
    spelling = one_spelling((*source.pairs["prompt"], *source.judge["prompt"]))
    rows = _frame(source.pairs, spelling, data, seed)
    judge = _frame(source.judge, spelling, data, seed)
    if not len(rows):
        raise DataError(f"source {data.source} gives no pairs")
    owned = assign_clients(rows, data, seed)
    clients = sorted(set(owned.pairs["client_id"]))
    _refuse_shared_owners(clients, judge, data)
    sampled = _sample(owned.pairs, data.max_pairs, seed)
    _refuse_empty_clients(clients, sampled, data)
    left_out = owned.left_out | {"over max_pairs": len(owned.pairs) - len(sampled)}
    pairs, trees = _with_trees(sampled, clients, data, seed)
    if not (pairs["split"] == "train").any():
        raise DataError(
            f"of {len(pairs)} pairs none is in the train split: bring more pairs, or lower data.test and"
            " data.validation, or raise data.max_pairs"
        )
    return PreparedPairs(
        pairs=pairs.sort_values(["client_id", "pair_id"], kind="stable", ignore_index=True),
        judge=judge,
        clients=clients,
        source_rows=len(rows),
        left_out={reason: count for reason, count in left_out.items() if count},
        trees=trees,
    )


def _frame(rows: Dataset, spelling: Mapping[str, str], data: DataConfig, seed: int) -> pd.DataFrame:
    """Pairs with a group and a split in every row.

    The group is that of the source, or the prompt, in the spelling that represents it.
    """
    frame = rows.to_pandas()
    prompts = frame["prompt"].map(spelling)
    groups = frame.get("group", prompts)
    frame["group"] = groups.where(groups.notna() & (groups != ""), prompts)
    unsplit = frame["split"] == ""
    frame.loc[unsplit, "split"] = assign(frame.loc[unsplit, "group"], data.validation, data.test, seed)
    return frame


def _refuse_shared_owners(clients: Sequence[str], judge: pd.DataFrame, data: DataConfig) -> None:
    shared = sorted(set(clients) & set(judge["client_id"]))
    if shared:
        raise DataError(
            f"source {data.source}: {len(shared)} owners are clients and the judge's too"
            f" ({', '.join(shared[:5])}): the judge's owners must take no part, so rename these clients"
        )


def _refuse_empty_clients(clients: Sequence[str], pairs: pd.DataFrame, data: DataConfig) -> None:
    empty = sorted(set(clients) - set(pairs["client_id"]))
    if empty:
        raise DataError(
            f"data.max_pairs {data.max_pairs} leaves {len(empty)} of {len(clients)} clients without a pair"
            f" (such as {empty[0]}): raise it, or lower data.clients"
        )


def _sample(pairs: pd.DataFrame, limit: int | None, seed: int) -> pd.DataFrame:
    """At most so many pairs, see splits.sample."""
    if limit is None or len(pairs) <= limit:
        return pairs
    chosen = sample(list(pairs["prompt"]), list(pairs["split"]), limit, seed)
    return pairs[pairs["prompt"].isin(chosen)]


def _with_trees(
    pairs: pd.DataFrame, clients: Sequence[str], data: DataConfig, seed: int
) -> tuple[pd.DataFrame, TreeCounts | None]:
    """The pairs, with those of data.trees, whose questions are assigned to the clients."""
    import pandas as pd

    if data.trees is None:
        return pairs, None
    thoughts, dropped = thought_pairs(Path(data.trees), "data.trees", data.min_margin)
    is_kept = [fits((pair.prompt, pair.chosen, pair.rejected), data) for pair in thoughts]
    if too_long := check_dropped(is_kept, "pairs of data.trees", data):
        thoughts = [pair for pair, kept in zip(thoughts, is_kept, strict=True) if kept]
        dropped |= {TOO_LONG: too_long}
    groups = [pair.split_group for pair in thoughts]
    splits = assign(groups, data.validation, data.test, seed)
    owners: dict[str, str] = {}
    for split in SPLITS:
        members = [group for group, own in zip(groups, splits, strict=True) if own == split]
        if members:
            owners |= assign_round_robin(members, clients, split, seed)
    owned = [
        replace(pair, client_id=owners[group], split=split)
        for pair, group, split in zip(thoughts, groups, splits, strict=True)
    ]
    frame = _frame(pairs_dataset(owned, "thoughts"), {}, data, seed)
    counts = TreeCounts(pairs=len(owned), questions=len(owners), dropped=dropped)
    return pd.concat([pairs, frame], ignore_index=True), counts


def assign_round_robin(
    groups: Sequence[str], clients: Sequence[str], split: str, seed: int
) -> dict[str, str]:
    """Assign the groups of a split evenly to the clients, in a seeded order; returns the clients."""
    order = generator(seed, "trees", split).permutation(len(clients))
    turns = partition.iid(groups, min(len(clients), len(set(groups))), seed)
    return {group: clients[order[turn]] for group, turn in zip(groups, turns, strict=True)}
