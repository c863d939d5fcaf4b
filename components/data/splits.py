"""Splits by prompt, and the pairs and prompts that the judge and the server get of them.

Whether a prompt (or a group of prompts) is held out is a hash of the seed and the prompt itself. So
it is the same for every client that judged it, whatever the order of the rows and whatever else is
in the file.

Prompts that are the same text (same_text.py) are in one split. Where a data set spells one in several
ways, the smallest of the spellings is hashed; a single spelling is hashed as it is. Turns of one
conversation, each a pair, are in one split if their rows name a group; others are counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from components.config import DataConfig
from components.data.records import SPLITS, DataError, Pair, Prompt, SourceData
from components.data.same_text import same_text
from components.seeding import derive, generator

MIN_OWNERS = 10
"""Minimum number of owners to reserve whole owners for the judge, rather than prompts of all."""
TURN_END = re.compile(r"\n\s*\n\s*Assistant:")
USER_TURN = re.compile(r"\n\s*\n\s*Human:")
JUDGE = "judge"
"""Owner of the judge's pairs, where these are not those of reserved owners."""


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
        keys += [("group", same_text(pair.group))] if pair.group else []
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


def conversation_warning(rows: Iterable[tuple[str, str, str, str]]) -> str:
    """A sentence on pairs that go on with a conversation of which a pair is in another split.

    Such a prompt has the other pair's prompt and one of its answers as turns before its last one, so that a
    model may train on an answer that it is measured with.

    Args:
        rows: the prompt, the chosen and the rejected completion, and the split of each pair.
    """
    answered: dict[tuple[str, str], set[str]] = {}
    longer: list[tuple[str, str]] = []
    count = 0
    for prompt, chosen, rejected, split in rows:
        count += 1
        start = prompt.strip().removeprefix("Human:").strip()
        for answer in (chosen, rejected):
            answered.setdefault((start, answer.strip()), set()).add(split)
        if "Assistant:" in prompt:
            longer.append((start, split))
    divided = 0
    for prompt, split in longer:
        divided += any(answered.get(turns, {split}) - {split} for turns in _earlier(prompt))
    if not divided:
        return ""
    return (
        f"{divided:,} of {count:,} pairs go on with the conversation of a pair in another split, so that"
        " answers of held-out pairs may be in training prompts: name the conversation of each pair in the"
        " column group."
    )


def _earlier(dialogue: str) -> Iterator[tuple[str, str]]:
    """What precedes each answer in a dialogue, and the answer."""
    for match in TURN_END.finditer(dialogue):
        following = USER_TURN.search(dialogue, match.end())
        if following:
            yield dialogue[: match.start()].strip(), dialogue[match.end() : following.start()].strip()


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
    """Pairs with a split in each: its own, or one drawn by group, see assign_splits."""
    drawn = iter(
        assign_splits((pair.split_group for pair in pairs if not pair.split), validation, test, seed)
    )
    return [pair if pair.split else replace(pair, split=next(drawn)) for pair in pairs]


def position(seed: int, purpose: str, group: str) -> float:
    """A number in [0, 1) that is a function of the seed, the purpose and the group."""
    return derive(seed, purpose, group) / 2**63


def assign_splits(groups: Iterable[str], validation: float, test: float, seed: int) -> list[str]:
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


@dataclass(frozen=True)
class Shares:
    """What is reserved."""

    align: float  # share of the clients' training groups that become the server's prompts
    judge: float  # share of the owners, or of the groups, whose pairs train the judge


def hold_out(
    pairs: Sequence[Pair], source: str, shares: Shares, seed: int, dropped: Mapping[str, int]
) -> SourceData:
    """Divide pairs among the clients, the judge and the server.

    The judge gets the pairs of a share of the owners if there are at least ten, and otherwise those
    of a share of the groups (or prompts), under the owner 'judge'. A share of the clients' training
    groups become the server's unlabeled prompts, and their pairs are dropped, so that no prompt is
    on both sides. The clients' test prompts are the test prompts of the server; all completions
    chosen for them are human answers.

    Args:
        pairs: pairs with splits.
        source: name of the source, for errors.
        shares: of the judge and of the server.
        seed: of the recipe.
        dropped: rows that the source itself dropped, by reason.

    Raises:
        DataError: no pair to train on remains.
    """
    judged, remaining = _reserve_for_judge(pairs, shares.judge, seed)
    # The clients may have a prompt that the judge has seen, but the server does not align on it.
    seen = {same_text(pair.prompt) for pair in judged}
    aligned = [_aligned(pair, shares.align, seen, seed) for pair in remaining]
    own = [pair for pair, reserved in zip(remaining, aligned, strict=True) if not reserved]
    if not any(pair.split == "train" for pair in own):
        raise DataError(
            f"source {source}: of {len(pairs)} pairs none is left to train on, after the shares of the test,"
            " the judge and the server; bring more pairs, or lower data.test, data.validation or the"
            " source's shares"
        )
    prompts = [
        Prompt(pair.prompt, [pair.chosen], "align")
        for pair, reserved in zip(remaining, aligned, strict=True)
        if reserved
    ]
    reserved_pairs = {"prompt given to the server": sum(aligned)} if any(aligned) else {}
    return SourceData(
        own, [*prompts, *evaluation_prompts(own)], judged, dropped={**dropped, **reserved_pairs}
    )


def _reserve_for_judge(pairs: Sequence[Pair], share: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """The judge's pairs, and the others."""
    owners = sorted({pair.client_id for pair in pairs if pair.client_id})
    if len(owners) >= MIN_OWNERS and all(pair.client_id for pair in pairs):
        count = max(1, round(share * len(owners))) if share else 0
        drawn = generator(seed, "judges").permutation(len(owners))[:count]
        reserved = {owners[i] for i in drawn}
        judged = [pair for pair in pairs if pair.client_id in reserved]
        return judged, [pair for pair in pairs if pair.client_id not in reserved]
    in_share = [position(seed, "judge", pair.split_group) < share for pair in pairs]
    judged = [replace(pair, client_id=JUDGE) for pair, drawn in zip(pairs, in_share, strict=True) if drawn]
    return judged, [pair for pair, drawn in zip(pairs, in_share, strict=True) if not drawn]


def _aligned(pair: Pair, share: float, seen: set[str], seed: int) -> bool:
    """Whether a pair's prompt becomes one of the server's prompts to align on."""
    return (
        pair.split == "train"
        and position(seed, "align", pair.split_group) < share
        and same_text(pair.prompt) not in seen
    )


def evaluation_prompts(pairs: Iterable[Pair]) -> list[Prompt]:
    """The prompts of the test pairs, with their distinct chosen completions as human answers."""
    prompts: dict[str, Prompt] = {}
    for pair in pairs:
        if pair.split == "test":
            known = prompts.setdefault(pair.prompt, Prompt(pair.prompt, [], "test"))
            if pair.chosen not in known.references:
                known.references.append(pair.chosen)
    return list(prompts.values())
