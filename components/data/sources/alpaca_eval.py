"""Prompt source `alpaca_eval`: AlpacaEval's 805 instructions with a model's answers (hub).

FedBiscuit section 7.1. The hub set is a loading script, which is not run: one of its JSON files is
read. Any file of model outputs in AlpacaEval's schema can be read too (a list of rows with
instruction, output, generator and dataset).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from components.config import PromptsConfig
from components.data.raw import BareText, RawRow, Text
from components.data.records import PromptData
from components.data.rows import from_file, from_hub_file
from components.data.sources.source import PromptSource, distinct

HUB = "tatsu-lab/alpaca_eval"


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
            from_file(Path(prompts.path)) if prompts.path else from_hub_file(HUB, self.file, prompts.revision)
        )
        rows, dropped = distinct(
            AlpacaEvalRow.read(*raw), lambda row: row.instruction, "instruction", raw.where
        )
        return PromptData(
            [(row.instruction, [row.output] if row.output else []) for row in rows],
            answers_author=", ".join(sorted({row.generator or "a model" for row in rows})),
            dropped=dropped,
        )
