"""Source `thoughts`: pairs of trees of thoughts (DRIFT section 2.2), see components/data/trees.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import Field

from components.config import DataConfig
from components.data.holdout import Shares, hold_out
from components.data.records import DataError, SourceData
from components.data.sources.base import Source
from components.data.splits import assign
from components.data.trees import thought_pairs


class Options(Source):
    """Options of the source thoughts."""

    align_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Share of the training questions that become the server's unlabeled prompts; their pairs are"
            " dropped."
        ),
    )
    judge_share: float = Field(
        0.1, ge=0, lt=1, description="Share of the questions whose pairs train the judge."
    )

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Load the pairs of a file of trees (data.path), or of all such files of a folder.

        With the natural partition a question set is a client. Splits are drawn by question, so that
        all steps of a tree are in one.

        Raises:
            DataError: data.path is missing or does not exist, or no tree gives a pair.
        """
        if data.path is None:
            raise DataError(
                "the data source thoughts reads trees that were grown before: give their file, or a folder"
                " of them, as data.path"
            )
        pairs, dropped = thought_pairs(Path(data.path), "data.path", data.min_margin)
        splits = assign((pair.split_group for pair in pairs), data.validation, data.test, seed)
        pairs = [replace(pair, split=split) for pair, split in zip(pairs, splits, strict=True)]
        shares = Shares(self.align_share, self.judge_share)
        return hold_out(pairs, "thoughts", shares, seed, dropped)
