"""Source `hh-rlhf`: Anthropic's helpful and harmless dialogues (hub, Bai et al., 2022; MIT).

A raw row is two whole dialogues, `chosen` and `rejected`, which differ in the assistant's last turn. No owner is
known: use data.partition iid or dirichlet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from components.config import DataConfig, Section
from components.data.records import DataError, SourceData
from components.data.registry import source
from components.data.reserve import set_apart
from components.data.rows import SUFFIXES, check_text, find_file, from_hub, read_file
from components.data.splits import assign, group_of, grouped, normal

HUB = "Anthropic/hh-rlhf"
TURN = "\n\nAssistant:"
COLUMNS = ("chosen", "rejected")


class HhOptions(Section):
    """Options of the source hh-rlhf."""

    subset: str = Field("harmless-base", min_length=1, description="Folder of the hub data set: harmless-base, helpful-base, helpful-online, helpful-rejection-sampled.")
    align_share: float = Field(0.2, ge=0, lt=1, description="Share of the training prompts that become the server's unlabelled prompts; their pairs are left out.")
    judge_share: float = Field(0.1, ge=0, lt=1, description="Share of the prompts whose pairs train the judge.")


@source("hh-rlhf", HhOptions)
def load(data: DataConfig, options: HhOptions, seed: int) -> SourceData:
    """Pairs of the last turns.

    From the hub, or from a folder with files train and test, the test split stays the test split, and a training row
    whose prompt is in it too is dropped. From a single file, splits are drawn by prompt. Prompts are the same where they
    differ in case and white space only.

    Raises:
        DataError: the data cannot be read or hold no usable pair.
    """
    raw = _raw(data, options.subset)
    split, dropped = {}, Counter()
    for name, rows in raw.items():
        split[name], counts = split_dialogues(rows, data.path or f"{HUB} ({options.subset}, {name})")
        dropped.update(counts)
    if "test" in split:
        held_out = {normal(r["prompt"]) for r in split["test"]}
        kept = grouped([r for r in split["train"] if normal(r["prompt"]) not in held_out])
        dropped["prompt also in the test split"] += len(split["train"]) - len(kept)
        parts = assign(map(group_of, kept), data.validation, 0.0, seed)
        rows = [r | {"split": s} for r, s in zip(kept, parts, strict=True)] + [r | {"split": "test"} for r in grouped(split["test"])]
    else:
        kept = grouped(split["train"])
        parts = assign(map(group_of, kept), data.validation, data.test, seed)
        rows = [r | {"split": s} for r, s in zip(kept, parts, strict=True)]
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


def _raw(data: DataConfig, subset: str) -> dict[str, Iterable[Mapping[str, Any]]]:
    if data.path is None:
        return {name: from_hub(HUB, split=name, revision=data.revision, data_dir=subset) for name in ("train", "test")}
    path = Path(data.path)
    if not path.is_dir():
        return {"train": read_file(path, COLUMNS)}
    files = {name: find_file(path, name) for name in ("train", "test")}
    if files["train"] is None:
        raise DataError(f"{path}: expected a file train ({', '.join(SUFFIXES)}), and optionally test, in this folder")
    return {name: read_file(file, COLUMNS) for name, file in files.items() if file}
