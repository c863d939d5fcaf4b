"""AlpacaEval's inputs: instructions and outputs in its schema, and checks of them before a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import yaml

from components.config import AlpacaEvalConfig, NameOrFolder, PromptsConfig, TemplateFile, unknown_name
from components.data.raw import NeededText, RawRow, Text
from components.data.records import DataError
from components.data.same_text import one_prompt
from components.data.templates import load as load_template
from components.data.templates import user_message

INSTRUCTIONS = 805
"""Number of AlpacaEval's own instructions."""

INSTRUCTIONS_HASH = "7070c11faddea0f0c875e59fc63e01287d374cc66905c67b5fed8aea027d771f"
"""sha256 of AlpacaEval's own instructions: stripped, in their order, and joined by U+001F.

Source: results/gpt4_1106_preview/model_outputs.json of tatsu-lab/alpaca_eval."""

CALIBRATION_COLUMNS = (
    "model",
    "index",
    "preference",
    "std_delta_len",
    "instruction_difficulty",
    "not_gamed_baseline",
)
"""Columns of df_gamed.csv that get_length_controlled_winrate of alpaca-eval 0.6.6 reads."""

GET_CALIBRATION = "get df_gamed.csv from the hub's data set tatsu-lab/alpaca_eval"


class ModelOutput(RawRow):
    """An output in AlpacaEval's schema."""

    dataset: Text = ""  # source of the prompt
    instruction: NeededText
    output: NeededText
    generator: NeededText  # name of the model


def annotator_instructions(
    prompts: Sequence[str],
    template: TemplateFile,
    source: PromptsConfig | None = None,
    config: AlpacaEvalConfig | None = None,
) -> list[str]:
    """The instruction that the annotator sees for each held-out prompt: a user's message by the template.

    AlpacaEval's own instructions (from the prompt source `alpaca_eval`, or answered by the
    reference) stay unchanged with every template, since its outputs and its length control are
    looked up by them. The source is None if the prompts are held out from the run's own data.
    """
    if source is not None and source.source == "alpaca_eval":
        return list(prompts)
    if config is not None and is_alpaca_eval(answered_instructions(config)):
        return list(prompts)
    policy_template = load_template(template, "policy")
    return [user_message(policy_template, prompt) for prompt in prompts]


def model_outputs(
    instructions: Sequence[str], answers: Sequence[str], generator: str, dataset: str
) -> list[ModelOutput]:
    """Convert a model's answers to AlpacaEval's schema, one row for each instruction."""
    return [
        ModelOutput(dataset=dataset, instruction=instruction, output=answer, generator=generator)
        for instruction, answer in zip(instructions, answers, strict=True)
    ]


def read_outputs(path: Path) -> list[ModelOutput]:
    """Read a model's outputs in AlpacaEval's schema, whose texts stay as they are: lengths count."""
    where = f"{path} (evaluation.alpaca_eval.reference_outputs)"
    expected = f"expected a JSON list of objects with {', '.join(ModelOutput.model_fields)}."
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise DataError(f"{where} cannot be read ({reason}): {expected}") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{where}: {expected}")
    return list(ModelOutput.read(rows, where))


def answered_instructions(config: AlpacaEvalConfig) -> list[str]:
    """Read the instructions that the reference has answered; none without a reference."""
    path = config.reference_outputs
    return [row.instruction for row in read_outputs(Path(path))] if path else []


def is_alpaca_eval(instructions: Sequence[str]) -> bool:
    """Whether these are AlpacaEval's own instructions in their order."""
    text = "\x1f".join(instruction.strip() for instruction in instructions)
    return hashlib.sha256(text.encode()).hexdigest() == INSTRUCTIONS_HASH


def find_baseline(
    config: AlpacaEvalConfig, prompts: Sequence[str], instructions: Sequence[str]
) -> list[ModelOutput] | None:
    """The reference's output under each prompt's instruction (`annotator_instructions`); None without one.

    It is found by the instruction, or by the prompt itself, by one_prompt: five of AlpacaEval's own 805
    instructions have white space around them. A prompt that has no output is a DataError.
    """
    if config.reference_outputs is None:
        return None
    outputs = {one_prompt(row.instruction): row for row in read_outputs(Path(config.reference_outputs))}
    baseline: list[ModelOutput] = []
    unanswered: list[int] = []
    for number, (prompt, instruction) in enumerate(zip(prompts, instructions, strict=True), 1):
        output = outputs.get(one_prompt(instruction)) or outputs.get(one_prompt(prompt))
        if output is None:
            unanswered.append(number)
        else:
            baseline.append(output.model_copy(update={"instruction": instruction}))
    if unanswered:
        raise DataError(
            f"{config.reference_outputs} (evaluation.alpaca_eval.reference_outputs) has no output for"
            f" {len(unanswered)} of the {len(prompts)} held-out prompts (first: number {unanswered[0]}):"
            " provide outputs for these prompts, or remove reference_outputs to compare with the base"
            " policy."
        )
    return baseline


def check_alpaca_eval(config: AlpacaEvalConfig) -> None:
    """Refuse a configuration that would fail at the end of a run: package, annotator, outputs, calibration.

    The check contacts neither the hub nor an annotator.
    """
    _check_annotator(config.annotators_config)
    answered = answered_instructions(config)
    if config.calibration is None:
        return
    _check_calibration(Path(config.calibration))
    if not is_alpaca_eval(answered):
        raise DataError(
            f"evaluation.alpaca_eval.calibration is for AlpacaEval's own {INSTRUCTIONS} instructions, but"
            f" reference_outputs ({config.reference_outputs}) does not hold these in their order: provide the"
            " outputs of gpt4_1106_preview, or remove calibration (this project's length-controlled rate is"
            " computed for any prompts)."
        )


def find_annotator(annotator: NameOrFolder) -> Path:
    """The folder of an annotator: a local one with configs.yaml, or one of the package's own."""
    package = find_spec("alpaca_eval")
    if package is None or not package.submodule_search_locations:
        raise DataError(
            "the recipe has evaluation.alpaca_eval, but the package is not installed: pip install -c"
            " constraints.txt -e '.[alpaca-eval]' in a checkout."
        )
    package_folder = Path(next(iter(package.submodule_search_locations))) / "evaluators_configs"
    for folder in (Path(annotator).resolve(), package_folder / annotator.name):
        if (folder / "configs.yaml").is_file():
            return folder
    names = [path.parent.name for path in package_folder.glob("*/configs.yaml")]
    message = unknown_name("evaluation.alpaca_eval.annotators_config", annotator.name, names)
    raise DataError(f"{message} A local folder that holds configs.yaml works too.")


def _check_annotator(name: NameOrFolder) -> None:
    """Check the prompt templates of an annotator, of which a run keeps a copy that cannot be changed."""
    folder = find_annotator(name)
    path = folder / "configs.yaml"
    try:
        annotators = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        annotators = None
    if not isinstance(annotators, dict) or not all(isinstance(value, dict) for value in annotators.values()):
        raise DataError(
            f"{path} is not an annotators config: expected a mapping of annotators to their settings"
            " (prompt_template, fn_completions, ...)."
        )
    for annotator, settings in annotators.items():
        template = folder.parent / str(settings.get("prompt_template"))
        if not template.is_file():
            raise DataError(
                f"{path}: prompt_template of '{annotator}' is not at {template}: the package looks beside"
                f" the annotator's folder, e.g. {folder.name}/prompt.txt."
            )
        is_local = folder == Path(name).resolve()
        if is_local and not template.resolve().is_relative_to(folder):
            raise DataError(
                f"{path}: prompt_template of '{annotator}' is {template}, outside of the annotator's folder,"
                " of which a run keeps a copy: put the file into the folder."
            )


def _check_calibration(path: Path) -> None:
    """Check the columns of a calibration file, and that it has a row for each instruction."""
    import pandas as pd

    where = f"{path} (evaluation.alpaca_eval.calibration)"
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no comma-separated values"
        raise DataError(f"{where} cannot be read ({reason}): {GET_CALIBRATION}.") from None
    missing = [name for name in CALIBRATION_COLUMNS if name not in table]
    if missing:
        raise DataError(f"{where} has no column {', '.join(missing)}: {GET_CALIBRATION}.")
    if list(table["index"][:INSTRUCTIONS]) != list(range(INSTRUCTIONS)):
        raise DataError(  # the package takes instruction_difficulty by the number of the row
            f"{where} does not begin with a row for each of AlpacaEval's {INSTRUCTIONS} instructions in their"
            f" order (column index): {GET_CALIBRATION}."
        )
