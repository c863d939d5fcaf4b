"""Source `py-dpo`: validated Python programs against those of weaker models (FedPDPO D.1.1).

Hub data set jondurbin/py-dpo-v0.1. It has no owners: use data.partition iid, or the source mixture.
It has one split of 9.47 thousand rows; FedPDPO's 8,966 and 500 are a data.test of 0.053.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.config import DataConfig
from components.data.records import Pair, SourceData
from components.data.rows import check_text
from components.data.sources.base import PairSource
from components.data.sources.plain import FIELDS, HubDataset, PlainSource, plain_pair

DATASET = HubDataset("jondurbin/py-dpo-v0.1", FIELDS)


class Options(PairSource):
    """Options of the source py-dpo."""

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Load the pairs, with splits drawn by prompt.

        data.path names a file of the hub's schema, or a folder with files train and test.

        Raises:
            DataError: the data cannot be read, lack a column, or have no usable pair.
        """
        return PlainSource("py-dpo", DATASET, make_pair).load(data, self.shares, seed)


def make_pair(row: Mapping[str, Any], where: str) -> Pair:
    """Make the pair of a row.

    Raises:
        DataError: a value is not text.
    """
    check_text(row, FIELDS, where)
    return plain_pair(row)
