"""Splitting by prompt, before any augmentation (DESIGN.md, list of errors, item 8).

Whether a prompt (or a group of prompts) is held out is a hash of the seed and the prompt itself. So
it is the same for every client that judged it, whatever the order of the rows and whatever else is
in the file.

Prompts that are the same text (same_text.py) are one prompt. Where a data set spells one in several
ways, the smallest of the spellings is hashed; a single spelling is hashed as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from components.config import DataConfig
from components.data.records import SPLITS, Pair
from components.data.same_text import same_text
from components.seeding import derive, generator


def one_spelling(prompts: Iterable[str]) -> dict[str, str]:
    """Map each prompt to the smallest of its spellings, which does not depend on the order of rows."""
    unique = set(prompts)
    smallest: dict[str, str] = {}
    for prompt in unique:
        key = same_text(prompt)
        smallest[key] = min(prompt, smallest.get(key, prompt))
    return {prompt: smallest[same_text(prompt)] for prompt in unique}


def connected(pairs: Sequence[Pair]) -> list[int]:
    """The component of each pair [N], where pairs of one group or of one prompt are connected.

    So a prompt that occurs in several groups connects them, and all their pairs.
    """
    from networkx.utils import UnionFind

    sets = UnionFind()
    for pair in pairs:
        keys = [("prompt", same_text(pair.prompt))]
        keys += [("group", pair.group)] if pair.group else []
        sets.union(*keys)
    numbers: dict[tuple[str, str], int] = {}
    return [numbers.setdefault(sets["prompt", same_text(pair.prompt)], len(numbers)) for pair in pairs]


def connection_warning(pairs: Sequence[Pair]) -> str:
    """A sentence on a prompt that connects groups to more than half of the pairs; empty if none does."""
    components = connected(pairs)
    (largest, size), *_ = Counter(components).most_common(1) or [(0, 0)]
    if 2 * size <= len(pairs):
        return ""
    groups: dict[str, set[str]] = {}
    for number, pair in zip(components, pairs, strict=True):
        if number == largest and pair.group:
            groups.setdefault(same_text(pair.prompt), set()).add(pair.group)
    most = max(map(len, groups.values()), default=0)
    if most < 2:
        return ""
    return (
        f"{size} of {len(pairs)} pairs ({size / len(pairs):.0%}) stay together in one split and with one"
        f" client, because prompts that occur in several groups (one in {most}) connect these:"
        " leave pairs of such prompts out, make the prompts distinct, or leave out the column group"
    )


def grouped(pairs: Sequence[Pair]) -> list[Pair]:
    """Give connected pairs one group: the smallest of their own groups, or of their prompt's spellings."""
    components = connected(pairs)
    groups: dict[int, str] = {}
    for number, pair in zip(components, pairs, strict=True):
        if pair.group:
            groups[number] = min(pair.group, groups.get(number, pair.group))
    (result,) = with_groups(
        [replace(pair, group=groups.get(number)) for number, pair in zip(components, pairs, strict=True)]
    )
    return result


def with_groups(*tables: Sequence[Pair]) -> list[list[Pair]]:
    """Tables of pairs with a group in each: its own, or its prompt in one spelling in all tables."""
    spelling = one_spelling(pair.prompt for pair in chain(*tables))
    return [[replace(pair, group=pair.group or spelling[pair.prompt]) for pair in pairs] for pairs in tables]


def with_splits(pairs: Sequence[Pair], validation: float, test: float, seed: int) -> list[Pair]:
    """Pairs with a split in each: its own, or one drawn by group, see assign."""
    drawn = iter(assign((pair.split_group for pair in pairs if not pair.split), validation, test, seed))
    return [pair if pair.split else replace(pair, split=next(drawn)) for pair in pairs]


def position(seed: int, purpose: str, group: str) -> float:
    """A number in [0, 1) that is a function of the seed, the purpose and the group."""
    return derive(seed, purpose, group) / 2**63


def assign(groups: Iterable[str], validation: float, test: float, seed: int) -> list[str]:
    """Assign each row to a split: about a share `test` of the distinct groups to 'test', and so on.

    Args:
        groups: group of each row [N]; the prompt, in one spelling, where nothing larger is known.
        validation, test: shares of the groups, together below 1.
        seed: of the recipe.
    """
    places = (position(seed, "split", group) for group in groups)
    return [
        "test" if place < test else "validation" if place < test + validation else "train" for place in places
    ]


def in_splits(by_split: Mapping[str, Sequence[Pair]], data: DataConfig, seed: int) -> tuple[list[Pair], int]:
    """Assign splits to pairs, and drop training pairs whose prompt is in the test split too.

    An existing split of validation or test stays; others are drawn by group, or prompt. Prompts are
    the same if same_text says so.

    Args:
        by_split: pairs of 'train', and of 'validation' and 'test' if they exist.
        data: its shares of validation and test.
        seed: of the recipe.

    Returns:
        the pairs, and the number of those dropped because their group or prompt is held out.
    """
    everything: list[Pair] = []
    for split in reversed(SPLITS):
        everything += [replace(pair, split=split) for pair in by_split.get(split, ())]
    splits: dict[int, str] = {}  # the most held-out one of each component
    kept: dict[str, list[Pair]] = {split: [] for split in SPLITS}
    for component, pair in zip(connected(everything), everything, strict=True):
        if splits.setdefault(component, pair.split) == pair.split:
            kept[pair.split].append(pair)
    training = [replace(pair, split="") for pair in grouped(kept["train"])]
    validation, test = (
        0.0 if split in by_split else share
        for split, share in (("validation", data.validation), ("test", data.test))
    )
    pairs = with_splits(training, validation, test, seed)
    pairs += [*grouped(kept["validation"]), *grouped(kept["test"])]
    return pairs, len(everything) - len(pairs)


def sample(prompts: Sequence[str], splits: Sequence[str], limit: int, seed: int) -> set[str]:
    """Sample whole prompts in a seeded order, each split in its own proportion (rounded down).

    Args:
        prompts: of each row [N].
        splits: of each row [N]; a prompt is in one.
        limit: maximum number of rows.
        seed: of the recipe.
    """
    chosen: set[str] = set()
    for split in sorted(set(splits)):
        counts = Counter(prompt for prompt, own in zip(prompts, splits, strict=True) if own == split)
        sizes = sorted(counts.items())
        room = limit * counts.total() // len(prompts)
        for i in generator(seed, "max_pairs", split).permutation(len(sizes)):
            prompt, rows = sizes[i]
            if rows <= room:
                chosen.add(prompt)
                room -= rows
    return chosen
