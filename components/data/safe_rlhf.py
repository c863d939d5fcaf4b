"""Prompt source `safe-rlhf`: PKU's prompts about harm (hub, Dai et al., 2023; Ji et al., 2024; FedBiscuit table 5: 44,578).

The paper names SafeRLHF and a number. The prompts-only set of that project has 44.6 thousand rows, so it is the default;
the prompts of its pairs (PKU-Alignment/PKU-SafeRLHF, where each stands in several rows) can be named instead.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pydantic import Field

from components.config import PromptsConfig, Section
from components.data.records import DataError
from components.data.registry import PromptData, prompt_source
from components.data.rows import check_text, from_hub, read_file


class SafeRlhfOptions(Section):
    """Options of the prompt source safe-rlhf."""

    dataset: str = Field("PKU-Alignment/PKU-SafeRLHF-prompt", min_length=1, description="Hub data set whose column prompt is read, split train.")


@prompt_source("safe-rlhf", SafeRlhfOptions)
def load(prompts: PromptsConfig, options: SafeRlhfOptions, seed: int) -> PromptData:
    """The distinct prompts, without references, in the order in which they come first.

    Two prompts are the same where they differ in white space only. A local file (path) needs the column prompt.

    Raises:
        DataError: the data cannot be read, or there is no prompt in them.
    """
    where = prompts.path or options.dataset
    raw = read_file(Path(prompts.path), ("prompt",)) if prompts.path else from_hub(options.dataset, split="train", revision=prompts.revision)
    kept: dict[str, str] = {}
    dropped: Counter[str] = Counter()
    for number, row in enumerate(raw, 1):
        if "prompt" not in row:
            raise DataError(f"{where}, row {number}: column 'prompt' is missing; there are: {', '.join(row)}")
        check_text(row, ("prompt",), f"{where}, row {number}")
        text = (row["prompt"] or "").strip()
        words = " ".join(text.split())
        if not words:
            dropped["empty prompt"] += 1
        elif words in kept:
            dropped["prompt that came before"] += 1
        else:
            kept[words] = text
    if not kept:
        raise DataError(f"{where}: there is no prompt in these data")
    return PromptData([(text, []) for text in kept.values()], dropped=dict(dropped))
