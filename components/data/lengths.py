"""Rows with texts that are too long (data.max_characters): dropped and counted, up to a share of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from components.config import DataConfig
from components.data.records import TEXTS, DataError, Pair, Prompt

TOO_LONG = "over max_characters"
R = TypeVar("R", Pair, Prompt)


def drop_long(rows: Sequence[R], what: str, data: DataConfig) -> list[R]:
    """The rows without a prompt or completion that is too long.

    References are not limited, as no model reads them. A missing text is left to the expectations.

    Args:
        rows: pairs or prompts.
        what: their name, for the message.
        data: the recipe's section.
    """
    limit = data.max_characters
    kept = [row for row in rows if all(len(getattr(row, name, None) or "") <= limit for name in TEXTS)]
    count = len(rows) - len(kept)
    if count > data.max_dropped * len(rows):
        raise DataError(
            f"{count} of {len(rows)} {what} have more than {limit} characters, more than"
            f" the share {data.max_dropped:g} that may be dropped: raise data.max_characters, or"
            " data.max_dropped."
        )
    return kept
