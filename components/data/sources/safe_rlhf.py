"""Prompt source `safe-rlhf`: PKU's prompts about harm (hub, Dai et al., 2023; Ji et al., 2024).

FedBiscuit's table 5 names SafeRLHF and 44,578 prompts. The prompts-only set of that project has
44.6 thousand rows, so it is the default; the prompts of its pairs (PKU-Alignment/PKU-SafeRLHF,
where each is in several rows) can be named instead.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from pydantic import Field

from components.config import NameOrFolder, PromptsConfig
from components.data.raw import BareText, RawRow
from components.data.records import DataError, PromptData
from components.data.rows import find_file, from_file, from_hub
from components.data.sources.base import PromptSource


class PromptRow(RawRow):
    """A prompt."""

    prompt: BareText


class Options(PromptSource):
    """Options of the prompt source safe-rlhf."""

    dataset: NameOrFolder = Field(
        NameOrFolder("PKU-Alignment/PKU-SafeRLHF-prompt"),
        description="Hub data set whose column prompt is read, split train.",
    )

    def load(self, prompts: PromptsConfig, seed: int) -> PromptData:
        """Load the distinct prompts, without references, in the order of their first rows.

        Two prompts are the same if they differ only in white space. A local file (path) needs the
        column prompt.

        Raises:
            DataError: the data cannot be read, or have no prompt.
        """
        raw = (
            from_file(_train(Path(prompts.path)))
            if prompts.path
            else from_hub(os.fspath(self.dataset), split="train", revision=prompts.revision)
        )
        texts: dict[str, str] = {}
        dropped: Counter[str] = Counter()
        for row in PromptRow.read(*raw):
            key = " ".join(row.prompt.split())
            if not key:
                dropped["empty prompt"] += 1
            elif key in texts:
                dropped["prompt that came before"] += 1
            else:
                texts[key] = row.prompt
        if not texts:
            raise DataError(f"{raw.where}: there is no prompt in these data")
        return PromptData([(text, []) for text in texts.values()], dropped=dict(dropped))


def _train(path: Path) -> Path:
    """The split train of a folder that has one, as on the hub."""
    return (find_file(path, "train") if path.is_dir() else None) or path
