"""Source `auto-j`: the pairwise comparison set of Auto-J (Li et al., 2023, arXiv 2310.05470), 58 scenarios with human verdicts.

A raw row is a query with two responses and a verdict: label 0 says that response 1 is better, 1 that response 2 is, 2
that they tie. No owner is known: use data.partition dirichlet (by scenario) or iid. The set is the file
testdata_pairwise.jsonl of the repository GAIR-NLP/auto-j, or a part of it, given as data.path.
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
from components.data.rows import check_text, read_file
from components.data.splits import assign, group_of, grouped

RESPONSES = ("response 1", "response 2")
COLUMNS = ("scenario", "label", "prompt", *RESPONSES)
TIE = 2


class AutoJDataOptions(Section):
    """Options of the source auto-j."""

    align_share: float = Field(0.2, ge=0, lt=1, description="Share of the training prompts that become the server's unlabelled prompts; their pairs are left out.")
    judge_share: float = Field(0.1, ge=0, lt=1, description="Share of the prompts whose pairs train the judge.")


@source("auto-j", AutoJDataOptions)
def load(data: DataConfig, options: AutoJDataOptions, seed: int) -> SourceData:
    """Pairs whose verdict is not a tie; the domain is the scenario, and splits are drawn by prompt.

    Raises:
        DataError: the file is not given, cannot be read, or holds no usable pair.
    """
    if data.path is None:
        raise DataError("the data source auto-j reads Auto-J's pairwise set from a file: give testdata_pairwise.jsonl of the repository GAIR-NLP/auto-j as data.path")
    pairs, dropped = preferences(read_labelled(Path(data.path)))
    pairs = grouped(pairs)
    parts = assign(map(group_of, pairs), data.validation, data.test, seed)
    rows = [r | {"split": s} for r, s in zip(pairs, parts, strict=True)]
    return set_apart(rows, "auto-j", options.align_share, options.judge_share, seed, dropped)


def read_labelled(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of the set, ties among them: scenario, label, prompt, response 1, response 2.

    Raises:
        DataError: the file cannot be read, a column is missing, text is not text, or a label is not 0, 1 or 2.
    """
    rows = read_file(path, COLUMNS)
    for number, row in enumerate(rows, 1):
        where = f"{path}, row {number}"
        check_text(row, ("scenario", "prompt", *RESPONSES), where)
        if type(row["label"]) is not int or row["label"] not in (0, 1, TIE):
            raise DataError(f"{where}: column 'label' is {row['label']!r}, but 0 (response 1 is better), 1 (response 2) or 2 (tie) is expected")
    return rows


def preferences(rows: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, str]], dict[str, int]]:
    """Pairs of a prompt, the response that was preferred and the other one.

    Args:
        rows: as read_labelled gives them.

    Returns:
        Rows of prompt, chosen, rejected and domain, and how many rows were dropped, by reason: a tie, an empty text,
        or two responses that are the same.
    """
    pairs, dropped = [], Counter()
    for row in rows:
        prompt, *responses = ((row[c] or "").strip() for c in ("prompt", *RESPONSES))
        if row["label"] == TIE:
            dropped["tie"] += 1
        elif not prompt or not all(responses):
            dropped["empty prompt or response"] += 1
        elif responses[0] == responses[1]:
            dropped["both responses the same"] += 1
        else:
            pairs.append({"prompt": prompt, "chosen": responses[row["label"]], "rejected": responses[1 - row["label"]], "domain": row["scenario"] or ""})
    return pairs, dict(dropped)
