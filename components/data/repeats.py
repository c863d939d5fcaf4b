"""Pairs that an owner gives several times, or contradicts."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING

from components.data.data_report import RepeatCounts
from components.data.records import TEXTS

if TYPE_CHECKING:
    import pandas as pd


def count_repeats(*frames: pd.DataFrame) -> RepeatCounts:
    """Count the pairs that repeat or contradict an earlier one of the same owner.

    Args:
        frames: pairs with the columns client_id, prompt, chosen and rejected.
    """
    import pandas as pd

    own = pd.concat([frame[["client_id", *TEXTS]] for frame in frames], ignore_index=True)
    normal = own.assign(**{name: own[name].map(_normalized) for name in TEXTS})
    given = set(normal.itertuples(index=False, name=None))
    duplicates = own.duplicated()
    return RepeatCounts(
        duplicates=int(duplicates.sum()),
        normalized=int((normal.duplicated() & ~duplicates).sum()),
        contradictory=sum(
            (owner, prompt, rejected, chosen) in given and chosen != rejected
            for owner, prompt, chosen, rejected in normal.itertuples(index=False, name=None)
        ),
    )


def repeat_warnings(counts: RepeatCounts) -> Iterator[str]:
    """What the counts mean, as sentences; none where nothing repeats."""
    weigh = "they have more weight than others"
    if counts.duplicates:
        yield f"pairs that repeat an earlier one of the same owner: {counts.duplicates:,}; {weigh}."
    if counts.normalized:
        yield (
            "pairs that repeat an earlier one of the same owner in other code points (Unicode NFKC):"
            f" {counts.normalized:,}; {weigh}."
        )
    if counts.contradictory:
        yield (
            "pairs that are there the other way round too, of the same owner where owners are known:"
            f" {counts.contradictory:,}; a model cannot learn both."
        )


def _normalized(text: str) -> str:
    return unicodedata.normalize("NFKC", text)
