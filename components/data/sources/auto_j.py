"""Source `auto-j`: the pairwise comparison set of Auto-J, 58 scenarios with human verdicts.

Li et al., 2023, arXiv 2310.05470. A raw row is a query with two responses and a verdict: label 0
says that response 1 is better, 1 that response 2 is, 2 that they tie. It has no owners: use
data.partition dirichlet (by scenario) or iid. The set is the file testdata_pairwise.jsonl of the
repository GAIR-NLP/auto-j, or a part of it; data.path names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from components.config import DataConfig
from components.data.holdout import hold_out
from components.data.records import DataError, Pair, SourceData
from components.data.rows import Row, check_text, read_file, text_of
from components.data.sources.base import PairSource
from components.data.splits import assign, grouped

RESPONSES = ("response 1", "response 2")
COLUMNS = ("scenario", "label", "prompt", *RESPONSES)
TIE = 2


class Options(PairSource):
    """Options of the source auto-j."""

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Load the pairs that are no ties, with the scenario as domain and splits drawn by prompt.

        Raises:
            DataError: data.path is missing, cannot be read, or has no usable pair.
        """
        if data.path is None:
            raise DataError(
                "the data source auto-j reads Auto-J's pairwise set from a file: give testdata_pairwise.jsonl"
                " of the repository GAIR-NLP/auto-j as data.path"
            )
        pairs, dropped = preferences(read_labeled(Path(data.path)))
        pairs = grouped(pairs)
        splits = assign((pair.split_group for pair in pairs), data.validation, data.test, seed)
        pairs = [replace(pair, split=split) for pair, split in zip(pairs, splits, strict=True)]
        return hold_out(pairs, "auto-j", self.shares, seed, dropped)


def read_labeled(path: Path) -> list[Row]:
    """Read a file of the set with its ties: scenario, label, prompt, response 1, response 2.

    Raises:
        DataError: the file cannot be read, a column is missing, text is not text, or a label is not
            0, 1 or 2.
    """
    rows = read_file(path, COLUMNS)
    for number, row in enumerate(rows, 1):
        where = f"{path}, row {number}"
        check_text(row, ("scenario", "prompt", *RESPONSES), where)
        if type(row["label"]) is not int or row["label"] not in (0, 1, TIE):
            raise DataError(
                f"{where}: column 'label' is {row['label']!r}, but 0 (response 1 is better), 1 (response 2)"
                " or 2 (tie) is expected"
            )
    return rows


def preferences(rows: Iterable[Mapping[str, Any]]) -> tuple[list[Pair], dict[str, int]]:
    """Make pairs of a prompt, the preferred response and the other one.

    Args:
        rows: as read_labeled returns them.

    Returns:
        the pairs, and the number of dropped rows by reason: a tie, an empty text, or two responses
        that are the same.
    """
    pairs: list[Pair] = []
    dropped: Counter[str] = Counter()
    for row in rows:
        prompt = text_of(row, "prompt")
        responses = [text_of(row, column) for column in RESPONSES]
        if row["label"] == TIE:
            dropped["tie"] += 1
        elif not prompt or not all(responses):
            dropped["empty prompt or response"] += 1
        elif responses[0] == responses[1]:
            dropped["both responses the same"] += 1
        else:
            chosen, rejected = responses[row["label"]], responses[1 - row["label"]]
            pairs.append(Pair(prompt, chosen, rejected, domain=row["scenario"] or ""))
    return pairs, dict(dropped)
