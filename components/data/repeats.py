"""Pairs that an owner gives several times, or contradicts, and names that look alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from components.data.data_report import RepeatCounts
from components.data.records import TEXTS
from components.data.same_text import same_text

if TYPE_CHECKING:
    import pandas as pd


def count_repeats(*frames: pd.DataFrame) -> RepeatCounts:
    """Count the pairs that repeat or contradict an earlier one of the same owner.

    Args:
        frames: pairs with the columns client_id, prompt, chosen and rejected.
    """
    import pandas as pd

    own = pd.concat([frame[["client_id", *TEXTS]] for frame in frames], ignore_index=True)
    normal = own.assign(**{name: own[name].map(same_text) for name in TEXTS})
    alike = normal["chosen"] == normal["rejected"]  # such a pair prefers a spelling
    normal.loc[alike, ["chosen", "rejected"]] = own.loc[alike, ["chosen", "rejected"]]
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
            "pairs that repeat an earlier one of the same owner in other case, white space or code points:"
            f" {counts.normalized:,}; {weigh}."
        )
    if counts.contradictory:
        yield (
            "pairs that are there the other way round too, of the same owner where owners are known:"
            f" {counts.contradictory:,}; a model cannot learn both."
        )


def alike_warnings(kind: str, names: Iterable[str]) -> Iterator[str]:
    """A sentence where names are the same text (same_text), such as two ids of one owner."""
    spellings: dict[str, set[str]] = {}
    for name in names:
        spellings.setdefault(same_text(name), set()).add(name)
    alike = sorted(sorted(own) for own in spellings.values() if len(own) > 1)
    if alike:
        yield (
            f"{kind} that differ only in case, white space or code points: {sum(map(len, alike)):,}, such as"
            f" {alike[0][0]!r} and {alike[0][1]!r}; each counts as one of its own, so write one name where it"
            " is one."
        )
