"""Source `thoughts`: pairs of trees of thoughts (DRIFT section 2.2), see components/data/trees.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from components.config import DataConfig
from components.data.records import DataError, Pair, SourceData
from components.data.sources.source import AlignShare, PairSource
from components.data.splits import hold_out, with_splits
from components.data.trees import thought_pairs
from components.seeding import generator


class ThoughtPairs(PairSource):
    """Options of the source thoughts."""

    is_local: ClassVar[bool] = True
    not_judgements: ClassVar[str] = "has verdicts by the scores of a model, which are nobody's judgements"

    align_share: AlignShare = 0.0
    clients_per_set: int = Field(
        1,
        ge=1,
        description=(
            "Clients that each question set is divided among at random, evenly by questions. With 1 the set"
            " is the client; with more they are <set>-0, <set>-1 and so on."
        ),
    )

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Load the pairs of a file of trees (data.path), or of all such files of a folder.

        With the natural partition a question set is a client, or several (clients_per_set). Splits are
        drawn by question, so that all steps of a tree are in one.
        """
        if data.path is None:
            raise DataError(
                "the data source thoughts reads trees that were grown before: give their file, or a folder"
                " of them, as data.path"
            )
        pairs, dropped = thought_pairs(Path(data.path), "data.path", data.min_margin)
        pairs = with_splits(pairs, data.validation, data.test, seed)
        if self.clients_per_set > 1:
            pairs = divide_sets(pairs, self.clients_per_set, seed)
        return hold_out(pairs, "thoughts", self.shares, seed, dropped)


def divide_sets(pairs: Sequence[Pair], clients: int, seed: int) -> list[Pair]:
    """Divide the questions of each set evenly and at random among clients of its own.

    Splits are divided one by one, so that each of a set's clients has nearly as many questions of
    each split as the others.

    Args:
        pairs: owned by their sets.
        clients: for each set.
        seed: of the recipe.

    Returns:
        the pairs in their order, owned by the clients <set>-<number>.
    """
    groups = sorted({(pair.client_id, pair.split, pair.split_group) for pair in pairs})
    owners: dict[tuple[str, str, str], str] = {}
    for (name, split), own in groupby(groups, key=lambda key: key[:2]):
        keys = list(own)
        order = generator(seed, "clients", name, split).permutation(len(keys))
        owners |= {keys[position]: f"{name}-{n % clients}" for n, position in enumerate(order)}
    return [replace(pair, client_id=owners[pair.client_id, pair.split, pair.split_group]) for pair in pairs]
