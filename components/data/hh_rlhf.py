"""Source `hh-rlhf`: Anthropic's helpful and harmless dialogues (hub, Bai et al., 2022; MIT).

A raw row is two whole dialogues, `chosen` and `rejected`, which differ in the assistant's last turn. No owner is
known: use data.partition iid or dirichlet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field

from components.config import DataConfig
from components.data.plain import PlainOptions, in_splits, raw_rows
from components.data.records import SourceData
from components.data.registry import source
from components.data.reserve import set_apart
from components.data.rows import check_text

HUB = "Anthropic/hh-rlhf"
TURN = "\n\nAssistant:"
COLUMNS = ("chosen", "rejected")


class HhOptions(PlainOptions):
    """Options of the source hh-rlhf."""

    subset: str = Field("harmless-base", min_length=1, description="Folder of the hub data set: harmless-base, helpful-base, helpful-online, helpful-rejection-sampled.")


@source("hh-rlhf", HhOptions)
def load(data: DataConfig, options: HhOptions, seed: int) -> SourceData:
    """Pairs of the last turns.

    From the hub, or from a folder with files train and test, the test split stays the test split, and a training row
    whose prompt is in it too is dropped. From a single file, splits are drawn by prompt. Prompts are the same where they
    differ in case and white space only.

    Raises:
        DataError: the data cannot be read or hold no usable pair.
    """
    by_split, dropped = {}, Counter()
    for split, (rows, where) in raw_rows(data, HUB, COLUMNS, ("train", "test"), options.subset).items():
        by_split[split], counts = split_dialogues(rows, where)
        dropped.update(counts)
    rows, dropped["prompt also in the test split"] = in_splits(by_split, data, seed)
    rows = [r | {"domain": options.subset} for r in rows]
    return set_apart(rows, "hh-rlhf", options.align_share, options.judge_share, seed, {k: n for k, n in dropped.items() if n})


def split_dialogues(rows: Iterable[Mapping[str, Any]], where: str) -> tuple[list[dict[str, str]], dict[str, int]]:
    """Turn pairs of dialogues into a common prompt and the two last turns of the assistant.

    Args:
        rows: mappings with chosen and rejected.
        where: what the rows come from, for errors.

    Returns:
        Rows of prompt, chosen and rejected, and how many rows were dropped, by reason: the two dialogues do not share
        a prompt, an answer is empty, or both answers are the same.

    Raises:
        DataError: a value is not text.
    """
    pairs, dropped = [], Counter()
    for number, row in enumerate(rows, 1):
        check_text(row, COLUMNS, f"{where}, row {number}")
        (prompt, turn, chosen), (other, other_turn, rejected) = ((row[c] or "").rpartition(TURN) for c in COLUMNS)
        chosen, rejected = chosen.strip(), rejected.strip()
        if not (turn and other_turn) or not prompt.strip() or prompt != other:
            dropped["dialogues without a common prompt"] += 1
        elif not chosen or not rejected:
            dropped["empty answer"] += 1
        elif chosen == rejected:
            dropped["both answers the same"] += 1
        else:
            pairs.append({"prompt": prompt.strip(), "chosen": chosen, "rejected": rejected})
    return pairs, dict(dropped)
