"""AlpacaEval's instructions, and outputs of models in its schema."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from components.config import AlpacaEvalConfig, PromptsConfig, TemplateFile
from components.data.records import DataError
from components.data.templates import load as load_template
from components.data.templates import user_message

COLUMNS = ("dataset", "instruction", "output", "generator")
"""Columns of an output in AlpacaEval's schema."""

INSTRUCTIONS = 805
"""Number of AlpacaEval's own instructions."""

INSTRUCTIONS_HASH = "7070c11faddea0f0c875e59fc63e01287d374cc66905c67b5fed8aea027d771f"
"""sha256 of AlpacaEval's own instructions: stripped, in their order, and joined by U+001F.

Source: results/gpt4_1106_preview/model_outputs.json of tatsu-lab/alpaca_eval."""


class AlpacaEvalError(DataError):
    """AlpacaEval cannot run as the recipe configures it."""


class ModelOutput(TypedDict):
    """An output in AlpacaEval's schema.

    Attributes:
        dataset: source of the prompt; may be empty.
        instruction: the instruction that was answered.
        output: the answer.
        generator: name of the model.
    """

    dataset: str
    instruction: str
    output: str
    generator: str


def annotator_instructions(
    prompts: Sequence[str],
    template: TemplateFile,
    source: PromptsConfig | None = None,
    config: AlpacaEvalConfig | None = None,
) -> list[str]:
    """Build the instruction that the annotator sees for each prompt, which is a user's message.

    AlpacaEval's own instructions (from the prompt source `alpaca_eval`, or answered by the
    reference) stay unchanged with every template, since its outputs and its length control are
    looked up by them.

    Args:
        prompts: held-out prompts.
        template: the policy's template, see components.data.templates.user_message.
        source: source of the prompts; None if they are held out from the run's own data.
        config: names the reference outputs; None stands for none.

    Raises:
        AlpacaEvalError: the reference outputs cannot be read.
    """
    if source is not None and source.source == "alpaca_eval":
        return list(prompts)
    reference_outputs = config.reference_outputs if config else None
    if reference_outputs is not None:
        answered = [row["instruction"] for row in read_outputs(Path(reference_outputs))]
        if is_alpaca_eval(answered):
            return list(prompts)
    policy_template = load_template(template, "policy")
    return [user_message(policy_template, prompt) for prompt in prompts]


def model_outputs(
    instructions: Sequence[str], answers: Sequence[str], generator: str, dataset: str
) -> list[ModelOutput]:
    """Convert answers to AlpacaEval's schema, one row for each instruction.

    Args:
        instructions, answers: texts, row by row.
        generator: name of the model.
        dataset: source of the prompts.
    """
    return [
        ModelOutput(dataset=dataset, instruction=instruction, output=answer, generator=generator)
        for instruction, answer in zip(instructions, answers, strict=True)
    ]


def read_outputs(path: Path) -> list[ModelOutput]:
    """Read a model's outputs from a JSON file in AlpacaEval's schema.

    A missing `dataset` becomes ''. Instructions are stripped, as the prompts of the source
    `alpaca_eval` are: five of the 805 have white space at an end.

    Raises:
        AlpacaEvalError: the file is missing or no JSON list, or a row lacks a text; names the row.
    """
    columns = ", ".join(COLUMNS)
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AlpacaEvalError(
            f"{path} cannot be read ({error.strerror}): provide a JSON file of outputs in AlpacaEval's"
            " schema."
        ) from None
    except (ValueError, RecursionError):
        raise AlpacaEvalError(
            f"{path} is not JSON: outputs in AlpacaEval's schema are a JSON list of objects with {columns}."
        ) from None
    if not isinstance(rows, list) or not rows:
        raise AlpacaEvalError(
            f"{path} holds no list of outputs: expected a JSON list of objects with {columns}."
        )
    return [_output(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]


def _output(row: object, where: str) -> ModelOutput:
    values = {"dataset": ""} | (row if isinstance(row, dict) else {})
    missing = [name for name in COLUMNS if not isinstance(values.get(name), str)]
    if missing:
        raise AlpacaEvalError(
            f"{where}: {', '.join(missing)} must be text; an output has {', '.join(COLUMNS)}."
        )
    return ModelOutput(
        dataset=values["dataset"],
        instruction=values["instruction"].strip(),
        output=values["output"],
        generator=values["generator"],
    )


def is_alpaca_eval(instructions: Sequence[str]) -> bool:
    """Whether these are AlpacaEval's own instructions in their order."""
    text = "\x1f".join(instruction.strip() for instruction in instructions)
    return hashlib.sha256(text.encode()).hexdigest() == INSTRUCTIONS_HASH


def match_outputs(
    reference_outputs: Sequence[ModelOutput], prompts: Sequence[str], instructions: Sequence[str]
) -> list[ModelOutput | None]:
    """Find the reference's output for each prompt, by its instruction or by the prompt itself.

    Args:
        reference_outputs: those of the model that is compared with.
        prompts: held-out prompts.
        instructions: the instruction of each prompt, see annotator_instructions.

    Returns:
        an output for each prompt; None if the reference has not answered it.
    """
    rows = {row["instruction"]: row for row in reference_outputs}
    return [
        rows.get(instruction.strip(), rows.get(prompt.strip()))
        for prompt, instruction in zip(prompts, instructions, strict=True)
    ]
