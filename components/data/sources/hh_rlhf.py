"""Source `hh-rlhf`: Anthropic's helpful and harmless dialogues (hub, Bai et al., 2022; MIT).

A raw row is two whole dialogues, `chosen` and `rejected`, which differ in the assistant's last
turn. It has no owners: use data.partition iid or dirichlet.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from pydantic import Field

from components.config import DataConfig
from components.data.holdout import hold_out
from components.data.records import Pair, SourceData
from components.data.rows import check_text
from components.data.sources.base import PairSource
from components.data.sources.plain import HubDataset, RawSplit, in_splits, nonzero

HUB = "Anthropic/hh-rlhf"
TURN = "\n\nAssistant:"
COLUMNS = ("chosen", "rejected")


class Options(PairSource):
    """Options of the source hh-rlhf."""

    subset: str = Field(
        "harmless-base",
        min_length=1,
        description=(
            "Folder of the hub data set: harmless-base, helpful-base, helpful-online,"
            " helpful-rejection-sampled."
        ),
    )

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Load pairs of the last turns.

        From the hub, or from a folder with files train and test, the test split stays the test
        split, and a training row whose prompt is in it too is dropped. From a single file, splits
        are drawn by prompt. Prompts are the same if they differ only in case and white space.

        Raises:
            DataError: the data cannot be read or have no usable pair.
        """
        dataset = HubDataset(HUB, COLUMNS, ("train", "test"), self.subset)
        by_split: dict[str, list[Pair]] = {}
        dropped: Counter[str] = Counter()
        for split, raw in dataset.raw_splits(data).items():
            by_split[split], counts = split_dialogues(raw)
            dropped.update(counts)
        pairs, duplicates = in_splits(by_split, data, seed)
        pairs = [replace(pair, domain=self.subset) for pair in pairs]
        return hold_out(pairs, "hh-rlhf", self.shares, seed, nonzero(dropped, duplicates))


def split_dialogues(raw: RawSplit) -> tuple[list[Pair], dict[str, int]]:
    """Split pairs of dialogues into their common prompt and the last turns of the assistant.

    Args:
        raw: rows with chosen and rejected.

    Returns:
        the pairs, and the number of dropped rows by reason: the dialogues have no common prompt, an
        answer is empty, or both answers are the same.

    Raises:
        DataError: a value is not text.
    """
    pairs: list[Pair] = []
    dropped: Counter[str] = Counter()
    for number, row in enumerate(raw.rows, 1):
        check_text(row, COLUMNS, f"{raw.where}, row {number}")
        prompt, turn, chosen = (row["chosen"] or "").rpartition(TURN)
        other_prompt, other_turn, rejected = (row["rejected"] or "").rpartition(TURN)
        pair = Pair(prompt.strip(), chosen.strip(), rejected.strip())
        if not (turn and other_turn and pair.prompt) or prompt != other_prompt:
            dropped["dialogues without a common prompt"] += 1
        elif not (pair.chosen and pair.rejected):
            dropped["empty answer"] += 1
        elif pair.chosen == pair.rejected:
            dropped["both answers the same"] += 1
        else:
            pairs.append(pair)
    return pairs, dict(dropped)
