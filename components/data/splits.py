"""Splitting by prompt, before any augmentation (DESIGN.md, list of errors, item 8).

Whether a prompt (or a group of prompts) is held out is a hash of the seed and the prompt itself. So it is the same
for every client that judged it, whatever the order of the rows and whatever else is in the file.

Prompts that differ in case and white space only are one prompt. Where a data set spells one in several ways, the least
of the spellings is hashed; one that has a single spelling is hashed as it stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from components.seeding import derive, generator


def normal(prompt: str) -> str:
    """What is the same for prompts that differ in case and white space only."""
    return " ".join(prompt.split()).casefold()


def one_spelling(prompts: Iterable[str]) -> dict[str, str]:
    """By prompt, the spelling that stands for all that are the same: the least, so that the order of the rows changes nothing."""
    prompts = set(prompts)
    least: dict[str, str] = {}
    for prompt in prompts:
        key = normal(prompt)
        least[key] = min(prompt, least.get(key, prompt))
    return {prompt: least[normal(prompt)] for prompt in prompts}


def grouped(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of prompts, those with another spelling than the one that stands for their prompt in its group; a group that a row has stays."""
    spelling = one_spelling(row["prompt"] for row in rows)
    return [row if row.get("group") or spelling[row["prompt"]] == row["prompt"] else row | {"group": spelling[row["prompt"]]} for row in rows]


def group_of(row: Mapping[str, Any]) -> str:
    """What must stay in one split: a row's group, or its prompt where it has none."""
    return row.get("group") or row["prompt"]


def position(seed: int, purpose: str, group: str) -> float:
    """A number in [0, 1) that the seed, the purpose and the group determine."""
    return derive(seed, purpose, group) / 2**63


def assign(groups: Iterable[str], validation: float, test: float, seed: int) -> list[str]:
    """The split of each row: 'test' for about a share `test` of the distinct groups, 'validation', else 'train'.

    Args:
        groups: what must stay in one split, one a row; the prompt, in one spelling, where nothing larger is known.
        validation: share of the groups.
        test: share of the groups; validation + test < 1.
        seed: of the recipe.
    """
    def one(group: str) -> str:
        at = position(seed, "split", group)
        return "test" if at < test else "validation" if at < test + validation else "train"

    return [one(group) for group in groups]


def sample(prompts: Sequence[str], splits: Sequence[str], most: int, seed: int) -> set[str]:
    """Whole prompts in a seeded order, of at most so many rows, each split in its own proportion (rounded down).

    Args:
        prompts: of each row [N].
        splits: of each row [N]; a prompt is in one.
        most: rows to keep.
        seed: of the recipe.
    """
    kept: set[str] = set()
    for split in sorted(set(splits)):
        sizes = sorted(Counter(prompt for prompt, own in zip(prompts, splits, strict=True) if own == split).items())
        room = most * sum(rows for _, rows in sizes) // len(prompts)
        for i in generator(seed, "max_pairs", split).permutation(len(sizes)):
            prompt, rows = sizes[i]
            if rows <= room:
                kept.add(prompt)
                room -= rows
    return kept
