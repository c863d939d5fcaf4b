"""Rows with texts that are too long (data.max_characters): dropped and counted, up to a share of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from components.config import DataConfig
from components.data.records import DataError, SourceData

if TYPE_CHECKING:
    from datasets import Dataset

TEXTS = ("prompt", "chosen", "rejected")
TOO_LONG = "over max_characters"


def drop_long_rows(source: SourceData, data: DataConfig) -> SourceData:
    """The data of a source without pairs and prompts whose texts are too long, which are counted.

    References are not limited, as no model reads them.

    Args:
        source: the data.
        data: the recipe's section.

    Raises:
        DataError: more rows than the share data.max_dropped are too long.
    """
    kept: dict[str, Dataset] = {}
    dropped = dict(source.dropped)
    for name, rows in (("pair", source.pairs), ("judge's pair", source.judge), ("prompt", source.prompts)):
        columns = [rows[column] for column in TEXTS if column in rows.column_names]
        is_kept = [fits(texts, data) for texts in zip(*columns, strict=True)]
        count = check_dropped(is_kept, f"{name}s of source {data.source}", data)
        kept[name] = rows.select(np.flatnonzero(is_kept)) if count else rows
        if count:
            dropped[f"{name} {TOO_LONG}"] = count
    return replace(
        source, pairs=kept["pair"], judge=kept["judge's pair"], prompts=kept["prompt"], dropped=dropped
    )


def fits(texts: Iterable[str], data: DataConfig) -> bool:
    """Whether no text is too long; a missing text is left to the expectations."""
    return all(len(text or "") <= data.max_characters for text in texts)


def check_dropped(is_kept: Sequence[bool], what: str, data: DataConfig) -> int:
    """The number of rows that are too long.

    Args:
        is_kept: of each row.
        what: name of the rows, for the message.
        data: the recipe's section.

    Raises:
        DataError: it is more than the share data.max_dropped of all.
    """
    count = len(is_kept) - sum(is_kept)
    if count > data.max_dropped * len(is_kept):
        raise DataError(
            f"{count} of {len(is_kept)} {what} have more than {data.max_characters} characters, more than"
            f" the share {data.max_dropped:g} that may be dropped: raise data.max_characters, or"
            " data.max_dropped."
        )
    return count
