"""AlpacaEval's inputs: instructions and outputs in its schema, and checks of them before a run."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict

import yaml

from components.config import AlpacaEvalConfig, NameOrFolder, PromptsConfig, TemplateFile, unknown_name
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

CALIBRATION_COLUMNS = (
    "model",
    "index",
    "preference",
    "std_delta_len",
    "instruction_difficulty",
    "not_gamed_baseline",
)
"""Columns of df_gamed.csv that get_length_controlled_winrate of alpaca-eval 0.6.6 reads."""

KEYS = {
    "openai_completions": ("OPENAI_API_KEY", "OPENAI_API_KEYS", "OPENAI_CLIENT_CONFIG_PATH"),
    "anthropic_completions": ("ANTHROPIC_API_KEY",),
    "google_completions": ("GOOGLE_API_KEY",),
    "cohere_completions": ("COHERE_API_KEY",),
    "jina_chat_completions": ("JINA_CHAT_API_KEY",),
    "huggingface_api_completions": ("HUGGINGFACEHUB_API_TOKEN",),
}
"""Environment variables with a key, by the completion function that reads them (alpaca-eval 0.6.6).

One of a function's variables suffices."""

GET_CALIBRATION = "get df_gamed.csv from the hub's data set tatsu-lab/alpaca_eval"


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


def check_alpaca_eval(config: AlpacaEvalConfig) -> None:
    """Refuse a configuration that would fail at the end of a run.

    The check contacts neither the hub nor an annotator.

    Raises:
        AlpacaEvalError: the package is not installed, or the annotator, its key, the reference
            outputs or the calibration file are missing or damaged.
    """
    _check_annotator(config)
    reference_outputs = read_outputs(Path(config.reference_outputs)) if config.reference_outputs else []
    if config.calibration is None:
        return
    check_calibration(Path(config.calibration))
    if not is_alpaca_eval([row["instruction"] for row in reference_outputs]):
        raise AlpacaEvalError(
            f"evaluation.alpaca_eval.calibration is for AlpacaEval's own {INSTRUCTIONS} instructions, but"
            f" reference_outputs ({config.reference_outputs}) does not hold these in their order: provide the"
            " outputs of gpt4_1106_preview, or remove calibration (the rate at equal length is computed for"
            " any prompts)."
        )


def check_prompts(
    config: AlpacaEvalConfig, prompts: Sequence[str], instructions: Sequence[str] | None = None
) -> None:
    """Refuse held-out prompts that the reference has not answered.

    Args:
        config: names the reference outputs.
        prompts: held-out prompts.
        instructions: the instruction of each prompt, see annotator_instructions; None: the prompts.

    Raises:
        AlpacaEvalError: states the number of such prompts and shows one.
    """
    if config.reference_outputs is None:
        return
    reference_outputs = read_outputs(Path(config.reference_outputs))
    outputs = match_outputs(reference_outputs, prompts, prompts if instructions is None else instructions)
    unanswered = [prompt for prompt, output in zip(prompts, outputs, strict=True) if output is None]
    if unanswered:
        raise AlpacaEvalError(
            f"{config.reference_outputs} (evaluation.alpaca_eval.reference_outputs) has no output for"
            f" {len(unanswered)} of the {len(prompts)} held-out prompts, e.g. {unanswered[0][:80]!r}: provide"
            " outputs for these prompts, or remove reference_outputs to compare with the base policy."
        )


def find_annotator(annotator: NameOrFolder) -> Path:
    """Find the folder of an annotator.

    It is a local folder with configs.yaml, or one of the package's own.

    Raises:
        AlpacaEvalError: there is no such annotator, or the package is not installed.
    """
    package = find_spec("alpaca_eval")
    if package is None or not package.submodule_search_locations:
        raise AlpacaEvalError(
            "the recipe has evaluation.alpaca_eval, but the package is not installed: pip install -c"
            " constraints.txt -e '.[alpaca-eval]' in a checkout."
        )
    package_folder = Path(next(iter(package.submodule_search_locations))) / "evaluators_configs"
    for folder in (Path(annotator).resolve(), package_folder / annotator.name):
        if (folder / "configs.yaml").is_file():
            return folder
    names = [path.parent.name for path in package_folder.glob("*/configs.yaml")]
    message = unknown_name("evaluation.alpaca_eval.annotators_config", annotator.name, names)
    raise AlpacaEvalError(f"{message} A local folder that holds configs.yaml works too.")


def _check_annotator(config: AlpacaEvalConfig) -> None:
    """Check the prompt templates and the service key of an annotator."""
    folder = find_annotator(config.annotators_config)
    for name, settings in _read_annotators(folder).items():
        _check_prompt_template(config.annotators_config, folder, name, settings)
        _check_key(config.annotators_config.name, settings)


def _check_prompt_template(
    annotator: NameOrFolder, folder: Path, name: str, settings: dict[str, Any]
) -> None:
    template = folder.parent / str(settings.get("prompt_template"))
    if not template.is_file():
        raise AlpacaEvalError(
            f"{folder / 'configs.yaml'}: prompt_template of '{name}' is not at {template}: the package"
            f" looks beside the annotator's folder, e.g. {folder.name}/prompt.txt."
        )
    if folder == Path(annotator).resolve() and not template.resolve().is_relative_to(folder):
        raise AlpacaEvalError(
            f"{folder / 'configs.yaml'}: prompt_template of '{name}' is {template}, outside of the"
            " annotator's folder, of which a run keeps a copy: put the file into the folder."
        )


def _check_key(annotator: str, settings: dict[str, Any]) -> None:
    variables = KEYS.get(settings.get("fn_completions", "openai_completions"), ())
    has_own_client = "client_config_path" in (settings.get("completions_kwargs") or {})
    if variables and not has_own_client and not any(os.environ.get(name) for name in variables):
        raise AlpacaEvalError(
            f"evaluation.alpaca_eval.annotators_config '{annotator}' uses a remote service, but no key is in"
            f" the environment: set {' or '.join(variables)} (never in a recipe)."
        )


def _read_annotators(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / "configs.yaml"
    try:
        annotators = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        annotators = None
    if not isinstance(annotators, dict) or not all(isinstance(value, dict) for value in annotators.values()):
        raise AlpacaEvalError(
            f"{path} is not an annotators config: expected a mapping of annotators to their settings"
            " (prompt_template, fn_completions, ...)."
        )
    return annotators


def check_calibration(path: Path) -> None:
    """Check the columns of a calibration file, and that it has a row for each instruction.

    Raises:
        AlpacaEvalError: the file is missing or damaged.
    """
    where = f"{path} (evaluation.alpaca_eval.calibration)"
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in CALIBRATION_COLUMNS if name not in (reader.fieldnames or ())]
            indices = set() if missing else {row["index"].removesuffix(".0") for row in reader}
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise AlpacaEvalError(f"{where} cannot be read ({reason}): {GET_CALIBRATION}.") from None
    if missing:
        raise AlpacaEvalError(f"{where} has no column {', '.join(missing)}: {GET_CALIBRATION}.")
    absent = {str(number) for number in range(INSTRUCTIONS)} - indices
    if absent:
        raise AlpacaEvalError(
            f"{where} has no row for {len(absent)} of AlpacaEval's {INSTRUCTIONS} instructions (column"
            f" index): {GET_CALIBRATION}."
        )
