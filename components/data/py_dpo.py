"""Source `py-dpo`: Python programs that were validated against those of weaker models (hub, jondurbin/py-dpo-v0.1; FedPDPO D.1.1).

No owner is known: use data.partition iid, or the source mixture. The hub has one split of 9.47 thousand rows; FedPDPO's 8,966
and 500 are a data.test of 0.053.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.config import DataConfig
from components.data.plain import FIELDS, PlainOptions, load_plain
from components.data.records import SourceData
from components.data.registry import source
from components.data.rows import check_text

HUB = "jondurbin/py-dpo-v0.1"


@source("py-dpo", PlainOptions)
def load(data: DataConfig, options: PlainOptions, seed: int) -> SourceData:
    """The pairs, in splits drawn by prompt; data.path names a file of the hub set's schema, or a folder with files train and test.

    Raises:
        DataError: the data cannot be read, lack a column, or hold no usable pair.
    """
    return load_plain(data, options, seed, "py-dpo", HUB, FIELDS, make_pair)


def make_pair(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The pair of a row.

    Raises:
        DataError: a value is not text.
    """
    check_text(row, FIELDS, where)
    return {c: row[c] for c in FIELDS}
