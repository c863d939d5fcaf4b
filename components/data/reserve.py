"""Setting rows apart, for sources that have neither judges nor server prompts of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from components.data.records import DataError, SourceData
from components.data.registry import CountedSourceData, pairs_dataset, prompts_dataset
from components.data.splits import group_of, normal, position
from components.seeding import generator

OWNERS_FOR_JUDGES = 10
JUDGE = "judge"


def set_apart(rows: Sequence[dict[str, Any]], source: str, align: float, judge: float, seed: int, dropped: dict[str, int]) -> SourceData:
    """Divide rows among the clients, the judge and the server.

    The judge gets the rows of a share of the owners where there are at least ten, else those of a share of the
    groups (or prompts), under the owner 'judge'. Of the clients' training groups a share become the server's unlabelled
    prompts, and their pairs are left out, so that no prompt is on both sides. The clients' test prompts are the test
    prompts of the server; all completions chosen for them are references.

    Args:
        rows: prompt, chosen, rejected and split; client_id, domain, margin and group where known.
        source: name written to the rows.
        align: share of the clients' training groups.
        judge: share of the owners, or of the groups.
        seed: of the recipe.
        dropped: what the source itself left out, by reason; counted on.

    Raises:
        DataError: nothing is left to train on.
    """
    owners = sorted({r["client_id"] for r in rows if r.get("client_id")})
    if len(owners) >= OWNERS_FOR_JUDGES and all(r.get("client_id") for r in rows):
        drawn = generator(seed, "judges").permutation(len(owners))[:max(1, round(judge * len(owners))) if judge else 0]
        apart = {owners[i] for i in drawn}
        judged = [r for r in rows if r["client_id"] in apart]
        rest = [r for r in rows if r["client_id"] not in apart]
    else:
        judged = [r | {"client_id": JUDGE} for r in rows if position(seed, "judge", group_of(r)) < judge]
        rest = [r for r in rows if not position(seed, "judge", group_of(r)) < judge]

    # a prompt that the judge has seen may still be a client's, but it is not asked of the server's policy
    seen = {normal(r["prompt"]) for r in judged}
    pairs, prompts = [], []
    references: dict[str, list[str]] = {}
    for row in rest:
        if row["split"] == "train" and position(seed, "align", group_of(row)) < align and normal(row["prompt"]) not in seen:
            prompts.append((row["prompt"], [row["chosen"]], "align"))
            continue
        pairs.append(row)
        if row["split"] == "test":
            known = references.setdefault(row["prompt"], [])
            known += [row["chosen"]] if row["chosen"] not in known else []
    left_out = len(rest) - len(pairs)
    if not any(r["split"] == "train" for r in pairs):
        raise DataError(f"source {source}: of {len(rows)} pairs none is left to train on, after the shares of the test, the judge and the server; "
                        "bring more pairs, or lower data.test, data.validation or the source's shares")
    prompts += [(prompt, known, "test") for prompt, known in references.items()]
    dropped = dropped | ({"prompt given to the server": left_out} if left_out else {})
    return CountedSourceData(pairs_dataset(pairs, source), prompts_dataset(prompts, source), pairs_dataset(judged, source), dropped=dropped)
