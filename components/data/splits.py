"""Splits by prompt, and the pairs and prompts that the judge and the server get of them.

Whether a prompt (or a group of prompts) is held out is a hash of the seed and the prompt itself. So
it is the same for every client that judged it, whatever the order of the rows and whatever else is
in the file.

Prompts that are the same text (same_text.py) are in one split. Where a data set spells one in several
ways, the smallest of the spellings is hashed; a single spelling is hashed as it is. The turns of one
conversation, each a pair, are in one split too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from components.config import DataConfig
from components.data.dialogues import MARKERS, Turn, dialogue_turns
from components.data.records import SPLITS, DataError, Pair, Prompt, SourceData
from components.data.same_text import same_text
from components.seeding import derive, generator

MIN_OWNERS = 10
"""Minimum number of owners to reserve whole owners for the judge, rather than prompts of all."""
Links = Sequence[tuple[str, str]]
"""Pairs of prompts of which the second goes on with the conversation of the first."""
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


def connected(pairs: Sequence[Pair], links: Links = ()) -> list[int]:
    """The component of each pair [N], where pairs of one group, prompt or conversation are connected.

    So a prompt that occurs in several groups connects them, and all their pairs.

    Args:
        pairs: the pairs.
        links: see continuations. They connect nothing if more than half of the pairs would be connected,
            as where most conversations begin alike.
    """
    joined = _components(pairs, links)
    return joined if not links or 2 * _largest(joined) <= len(pairs) else _components(pairs, ())


def _largest(components: Sequence[int]) -> int:
    return max(Counter(components).values(), default=0)


def _components(pairs: Sequence[Pair], links: Links) -> list[int]:
    from networkx.utils import UnionFind

    sets = UnionFind()
    for pair in pairs:
        keys = [("prompt", same_text(pair.prompt))]
        keys += [("group", same_text(pair.group))] if pair.group else []
        sets.union(*keys)
    for prompt, other in links:
        sets.union(("prompt", same_text(prompt)), ("prompt", same_text(other)))
    numbers: dict[tuple[str, str], int] = {}
    return [numbers.setdefault(sets["prompt", same_text(pair.prompt)], len(numbers)) for pair in pairs]


def continuations(pairs: Sequence[Pair]) -> Links:
    """The prompts that begin with the prompt of a pair and one of its answers, as turns of a dialogue."""
    turns = {text: dialogue_turns(text) for text in {pair.prompt for pair in pairs} if MARKERS.search(text)}
    longer = {text: own for text, own in turns.items() if len(own) > 2}
    if not longer:
        return ()
    numbers: dict[tuple[int, str, str], int] = {}  # of a beginning: that without its last turn, and this turn

    def beginnings(dialogue: Iterable[Turn]) -> list[int]:
        found = [0]
        for turn in dialogue:
            key = (found[-1], turn["role"], turn["content"])
            found.append(numbers.setdefault(key, len(numbers) + 1))
        return found

    answered: dict[int, dict[str, None]] = {}  # the prompts, by the number of a prompt with an answer
    for pair in pairs:
        prompt = beginnings(turns.get(pair.prompt) or [Turn(role="user", content=pair.prompt.strip())])[-1]
        for answer in (pair.chosen, pair.rejected):
            number = numbers.setdefault((prompt, "assistant", answer.strip()), len(numbers) + 1)
            answered.setdefault(number, {})[pair.prompt] = None
    links: list[tuple[str, str]] = []
    for text, own in longer.items():
        for number in beginnings(own):
            links += [(prompt, text) for prompt in answered.get(number, ())]
    return links


def conversation_warning(pairs: Sequence[Pair], links: Links) -> str:
    """A sentence on links that are not used, see `connected`; empty where they are."""
    if not links or 2 * _largest(_components(pairs, links)) <= len(pairs):
        return ""
    longer = {prompt for _, prompt in links}
    count = sum(pair.prompt in longer for pair in pairs)
    return (
        f"{count:,} of {len(pairs):,} pairs go on with the conversation of another pair, and may be in other"
        " splits than it, since more than half of all pairs would stay together: name the conversation of"
        " each pair in the column group."
    )


def connection_warning(pairs: Sequence[Pair], links: Links) -> str:
    """A sentence on a prompt that connects groups to more than half of the pairs; empty if none does."""
    components = connected(pairs, links)
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


def grouped(pairs: Sequence[Pair], links: Links = ()) -> list[Pair]:
    """Give connected pairs one group: the smallest of their own groups, or of the texts of their prompts."""
    components = connected(pairs, links)
    groups: dict[int, str] = {}
    prompts: dict[int, str] = {}
    for number, pair in zip(components, pairs, strict=True):
        prompts[number] = min(pair.prompt, prompts.get(number, pair.prompt))
        if pair.group:
            groups[number] = min(pair.group, groups.get(number, pair.group))
    return [
        replace(pair, group=groups.get(number, prompts[number]))
        for number, pair in zip(components, pairs, strict=True)
    ]


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


def in_splits(
    by_split: Mapping[str, Sequence[Pair]], data: DataConfig, seed: int, links: Links = ()
) -> tuple[list[Pair], int]:
    """Assign splits to pairs, and drop training pairs whose prompt is in the test split too.

    An existing split of validation or test stays; others are drawn by group, or prompt. Prompts are
    the same if same_text says so.

    Args:
        by_split: pairs of 'train', and of 'validation' and 'test' if they exist.
        data: its shares of validation and test.
        seed: of the recipe.
        links: see connected.

    Returns:
        the pairs, and the number of those dropped because their group or prompt is held out.
    """
    everything: list[Pair] = []
    for split in reversed(SPLITS):
        everything += [replace(pair, split=split) for pair in by_split.get(split, ())]
    splits: dict[int, str] = {}  # the most held-out one of each component
    kept: dict[str, list[Pair]] = {split: [] for split in SPLITS}
    for component, pair in zip(connected(everything, links), everything, strict=True):
        if splits.setdefault(component, pair.split) == pair.split:
            kept[pair.split].append(pair)
    training = [replace(pair, split="") for pair in grouped(kept["train"], links)]
    validation, test = (
        0.0 if split in by_split else share
        for split, share in (("validation", data.validation), ("test", data.test))
    )
    pairs = with_splits(training, validation, test, seed)
    pairs += [*grouped(kept["validation"], links), *grouped(kept["test"], links)]
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
