"""Prompt source `safe-rlhf`: PKU's prompts about harm (hub, Dai et al., 2023; Ji et al., 2024).

FedBiscuit's table 5 names SafeRLHF and 44,578 prompts. The prompts-only set of that project has
44.6 thousand rows, so it is the default; the prompts of its pairs (PKU-Alignment/PKU-SafeRLHF,
where each is in several rows) can be named instead.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from components.config import NameOrFolder, PromptsConfig
from components.data.raw import BareText, RawRow
from components.data.records import PromptData
from components.data.rows import find_file, from_file, from_hub
from components.data.same_text import same_text
from components.data.sources.source import PromptSource, distinct


class SafeRlhfRow(RawRow):
    """A prompt."""

    prompt: BareText


class SafeRlhfPrompts(PromptSource):
    """Options of the prompt source safe-rlhf."""

    dataset: NameOrFolder = Field(
        NameOrFolder("PKU-Alignment/PKU-SafeRLHF-prompt"),
        description="Hub data set whose column prompt is read, split train.",
    )

    def load(self, prompts: PromptsConfig, seed: int) -> PromptData:
        """Load the distinct prompts, without references, in the order of their first rows.

        Two prompts are the same if same_text says so. A local file (path) needs the
        column prompt.
        """
        raw = (
            from_file(_train(Path(prompts.path)))
            if prompts.path
            else from_hub(os.fspath(self.dataset), split="train", revision=prompts.revision)
        )
        rows, dropped = distinct(
            SafeRlhfRow.read(*raw), lambda row: same_text(row.prompt), "prompt", raw.where
        )
        return PromptData([(row.prompt, []) for row in rows], dropped=dropped)


def _train(path: Path) -> Path:
    """The split train of a folder that has one, as on the hub."""
    return (find_file(path, "train") if path.is_dir() else None) or path
