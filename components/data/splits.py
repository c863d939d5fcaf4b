"""Splitting by prompt, before any augmentation (DESIGN.md, list of errors, item 8).

Whether a prompt (or a group of prompts) is held out is a hash of the seed and the prompt itself. So it is the same
for every client that judged it, whatever the order of the rows and whatever else is in the file.
"""

from __future__ import annotations

from collections.abc import Iterable

from components.seeding import derive


def position(seed: int, purpose: str, group: str) -> float:
    """A number in [0, 1) that the seed, the purpose and the group determine."""
    return derive(seed, purpose, group) / 2**63


def assign(groups: Iterable[str], validation: float, test: float, seed: int) -> list[str]:
    """The split of each row: 'test' for about a share `test` of the distinct groups, 'validation', else 'train'.

    Args:
        groups: what must stay in one split, one a row; the prompt where nothing larger is known.
        validation: share of the groups.
        test: share of the groups; validation + test < 1.
        seed: of the recipe.
    """
    def one(group: str) -> str:
        at = position(seed, "split", group)
        return "test" if at < test else "validation" if at < test + validation else "train"

    return [one(group) for group in groups]
