"""Prompt sources `alpaca_eval` and `safe-rlhf`, of the hub.

alpaca_eval  AlpacaEval's 805 instructions with a model's answers (FedBiscuit section 7.1). The hub set is a
             loading script, which is not run: one of its JSON files is read. Any file of model outputs in
             AlpacaEval's schema can be read too (a list of rows with instruction, output, generator and
             dataset).
safe-rlhf    PKU's prompts about harm (Dai et al., 2023; Ji et al., 2024). FedBiscuit's table 5 names
             SafeRLHF and 44,578 prompts. The prompts-only set of that project has 44.6 thousand rows, so it
             is the default; the prompts of its pairs (PKU-Alignment/PKU-SafeRLHF, where each is in several
             rows) can be named instead.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from components.config import NameOrFolder, PromptsConfig
from components.data.raw import BareText, RawRow, Text
from components.data.records import PromptData
from components.data.rows import find_file, from_file, from_hub, from_hub_file
from components.data.same_text import one_prompt
from components.data.sources.source import PromptSource, distinct

ALPACA_EVAL = "tatsu-lab/alpaca_eval"


class AlpacaEvalRow(RawRow):
    """An instruction with a model's output."""

    instruction: BareText
    output: BareText
    generator: Text = ""


class AlpacaEvalPrompts(PromptSource):
    """Options of the prompt source alpaca_eval."""

    file: str = Field(
        "alpaca_eval_gpt4_baseline.json",
        min_length=1,
        description=(
            "JSON file of the hub set: alpaca_eval_gpt4_baseline.json has GPT-4's answers, the baseline of"
            " AlpacaEval 2.0 and of the paper; alpaca_eval.json has text_davinci_003's, those of"
            " version 1."
        ),
    )

    def load(self, prompts: PromptsConfig, seed: int) -> PromptData:
        """Load the instructions in the order of the file; the output of each is its reference."""
        raw = (
            from_file(Path(prompts.path))
            if prompts.path
            else from_hub_file(ALPACA_EVAL, self.file, prompts.revision)
        )
        rows, dropped = distinct(
            AlpacaEvalRow.read(*raw), lambda row: row.instruction, "instruction", raw.where
        )
        return PromptData(
            [(row.instruction, [row.output] if row.output else []) for row in rows],
            answers_author=", ".join(sorted({row.generator or "a model" for row in rows})),
            dropped=dropped,
        )


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

        Two texts are the same prompt if one_prompt says so. A local file (path) needs the
        column prompt.
        """
        path = Path(prompts.path) if prompts.path else None
        raw = (
            from_file((find_file(path, "train") if path.is_dir() else None) or path)  # as on the hub
            if path
            else from_hub(os.fspath(self.dataset), split="train", revision=prompts.revision)
        )
        rows, dropped = distinct(
            SafeRlhfRow.read(*raw), lambda row: one_prompt(row.prompt), "prompt", raw.where
        )
        return PromptData([(row.prompt, []) for row in rows], dropped=dropped)
