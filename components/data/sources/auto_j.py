"""Source `auto-j`: the pairwise comparison set of Auto-J, 58 scenarios with human verdicts.

Li et al., 2023, arXiv 2310.05470. It has no owners: use data.partition dirichlet (by scenario) or
iid. The set is the file testdata_pairwise.jsonl of the repository GAIR-NLP/auto-j, or a part of it;
data.path names it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from components.config import DataConfig
from components.data.raw import BareText, Label, RawRow, Text, one_of
from components.data.records import DataError, Pair
from components.data.rows import RawRows, from_file
from components.data.sources.hub_pairs import HubPairs

TIE = 2


class LabeledRow(RawRow):
    """A prompt with two responses and a human verdict."""

    scenario: Label
    label: Annotated[int, one_of({0: "response 1 is better", 1: "response 2 is better", TIE: "tie"})]
    prompt: Text
    first: BareText = Field(alias="response 1")
    second: BareText = Field(alias="response 2")


class AutoJPairs(HubPairs):
    """Options of the source auto-j."""

    is_local: ClassVar[bool] = True

    name = "auto-j"
    row = LabeledRow

    def raw_splits(self, data: DataConfig) -> dict[str, RawRows]:
        """The rows of the file, whose splits are drawn by prompt."""
        if data.path is None:
            raise DataError(
                "the data source auto-j reads Auto-J's pairwise set from a file: give testdata_pairwise.jsonl"
                " of the repository GAIR-NLP/auto-j as data.path"
            )
        return {"train": from_file(Path(data.path))}

    def pair(self, row: LabeledRow) -> Pair | str:
        """The preferred response and the other one, with the scenario as domain."""
        if row.label == TIE:
            return "tie"
        if not (row.prompt.strip() and row.first and row.second):
            return "empty prompt or response"
        if row.first == row.second:
            return "both responses the same"
        chosen, rejected = (row.second, row.first) if row.label else (row.first, row.second)
        return Pair(row.prompt, chosen, rejected, domain=row.scenario)
