"""Reserves pairs and prompts for the judge and the server, for sources without own ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from components.data.records import DataError, Pair, Prompt, SourceData
from components.data.same_text import same_text
from components.data.splits import position
from components.seeding import generator

MIN_OWNERS = 10
"""Minimum number of owners to reserve whole owners for the judge, rather than prompts of all."""
JUDGE = "judge"
"""Owner of the judge's pairs, where these are not those of reserved owners."""


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
            known = prompts.setdefault(same_text(pair.prompt), Prompt(pair.prompt, [], "test"))
            if pair.chosen not in known.references:
                known.references.append(pair.chosen)
    return list(prompts.values())
