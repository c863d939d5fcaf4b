"""Checks before a run: AlpacaEval's annotator, its key, reference outputs, and calibration."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from components.config import AlpacaEvalConfig, NameOrFolder, unknown_name
from components.evaluation.alpaca.alpaca_outputs import (
    INSTRUCTIONS,
    AlpacaEvalError,
    is_alpaca_eval,
    match_outputs,
    read_outputs,
)

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
            " constraints.txt 'fed-rlhf[alpaca-eval]'."
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
