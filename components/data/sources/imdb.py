"""Source `imdb`: beginnings of film reviews, each with two continuations (FedPDPO D.1.1).

Hub data set yuasosnin/imdb-dpo. Both completions of a raw row begin with the prompt's own text,
which is removed. The white space after it stays, at the beginning of the completion: a review is
read as one text. The margin is the difference of their rewards; the one with the higher reward is
chosen. It has no owners: use data.partition margin (FedPDPO D.1.2) or iid. The hub's two splits
(9,000 and 1,000 rows) are the splits of the source. Beginnings are short, so the same one may be in
both: those training rows are dropped and counted. Their number was not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.config import DataConfig
from components.data.records import Pair, SourceData
from components.data.rows import check_text
from components.data.sources.base import PairSource
from components.data.sources.plain import FIELDS, HubDataset, PlainSource, check_finite

REWARDS = ("chosen_reward", "rejected_reward")
DATASET = HubDataset("yuasosnin/imdb-dpo", (*FIELDS, *REWARDS), ("train", "test"))


class Options(PairSource):
    """Options of the source imdb."""

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Load the pairs.

        data.path names a file of the hub's schema, whose splits are drawn by prompt, or a folder
        with files train and test.

        Raises:
            DataError: the data cannot be read, lack a column, or have no usable pair.
        """
        return PlainSource("imdb", DATASET, make_pair, continues=True).load(data, self.shares, seed)


def make_pair(row: Mapping[str, Any], where: str) -> Pair | str:
    """Make the pair of a row with its margin, or name the reason why it gives none.

    The reasons are a completion of another prompt, and a margin that is not above 0.

    Raises:
        DataError: a value has the wrong type.
    """
    check_text(row, FIELDS, where)
    check_finite(row, REWARDS, where)
    prompt, chosen, rejected = (row[column] or "" for column in FIELDS)
    margin = float(row["chosen_reward"] - row["rejected_reward"])
    if not (chosen.startswith(prompt) and rejected.startswith(prompt)):
        return "completion that does not begin with its prompt"
    if not margin > 0:
        return "margin not above 0"
    return Pair(prompt, chosen.removeprefix(prompt), rejected.removeprefix(prompt), margin=margin)
