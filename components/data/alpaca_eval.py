"""Prompt source `alpaca_eval`: the 805 instructions of AlpacaEval with a model's answers (hub; FedBiscuit section 7.1).

The hub set is a loading script, which is not run: one of its JSON files is read. Any file of model outputs in
AlpacaEval's schema does as well (a list of rows with instruction, output, generator and dataset).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pydantic import Field

from components.config import PromptsConfig, Section
from components.data.records import DataError
from components.data.registry import PromptData, prompt_source
from components.data.rows import check_text, from_hub_file, read_file

HUB = "tatsu-lab/alpaca_eval"
COLUMNS = ("instruction", "output")


class AlpacaEvalOptions(Section):
    """Options of the prompt source alpaca_eval."""

    file: str = Field("alpaca_eval_gpt4_baseline.json", min_length=1, description="JSON file of the hub set: alpaca_eval_gpt4_baseline.json has GPT-4's answers, which AlpacaEval 2.0 "
                      "and the paper compare with; alpaca_eval.json has text_davinci_003's, those of version 1.")


@prompt_source("alpaca_eval", AlpacaEvalOptions)
def load(prompts: PromptsConfig, options: AlpacaEvalOptions, seed: int) -> PromptData:
    """The instructions in the file's order; the reference of each is the output in that file.

    Raises:
        DataError: the file cannot be read, lacks a column, or has no instruction.
    """
    where = prompts.path or f"{HUB} (file {options.file})"
    raw = read_file(Path(prompts.path)) if prompts.path else from_hub_file(HUB, options.file, prompts.revision)
    kept: dict[str, list[str]] = {}
    generators: set[str] = set()
    dropped: Counter[str] = Counter()
    for number, row in enumerate(raw, 1):
        missing = [c for c in COLUMNS if c not in row]
        if missing:
            raise DataError(f"{where}, row {number}: column {', '.join(map(repr, missing))} is missing; there are: {', '.join(map(str, row))}; "
                            "expected model outputs in AlpacaEval's schema")
        check_text(row, (*COLUMNS, "generator"), f"{where}, row {number}")
        instruction, output = ((row[c] or "").strip() for c in COLUMNS)
        if not instruction:
            dropped["empty instruction"] += 1
        elif instruction in kept:
            dropped["instruction that came before"] += 1
        else:
            kept[instruction] = [output] if output else []
            generators.add(row.get("generator") or "a model")
    if not kept:
        raise DataError(f"{where}: there is no instruction in these data")
    return PromptData(list(kept.items()), references=", ".join(sorted(generators)), dropped=dict(dropped))
