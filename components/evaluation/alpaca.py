"""AlpacaEval 2.0 (Li et al., 2023; Dubois et al., 2024) through the package alpaca_eval, for FedBiscuit's QA task.

The package annotates pairs of outputs and computes the figures; this file gives it our answers and keeps it from what
it would do by itself: write its cache and its weights into its own folder, ask the hub for calibration, and look up
the difficulty of an instruction by its row number, which is right for AlpacaEval's own list only.

Figures have the names and units of AlpacaEval's leaderboard: percent, counts, characters.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from components.config import AlpacaEvalConfig, Recipe, unknown_name
from components.data.records import DataError
from components.data.templates import load as load_template
from components.data.templates import user_message
from components.environment import root_level_kept
from components.evaluation.length_control import length_controlled

COLUMNS = ("dataset", "instruction", "output", "generator")
"""An output in AlpacaEval's schema."""

INSTRUCTIONS = 805
INSTRUCTIONS_HASH = "7070c11faddea0f0c875e59fc63e01287d374cc66905c67b5fed8aea027d771f"
"""AlpacaEval's own list: how many, and the sha256 of the stripped instructions in their order, joined by U+001F; from
results/gpt4_1106_preview/model_outputs.json of tatsu-lab/alpaca_eval."""

CALIBRATION_COLUMNS = ("model", "index", "preference", "std_delta_len", "instruction_difficulty", "not_gamed_baseline")
"""What the package's model reads of df_gamed.csv (get_length_controlled_winrate of alpaca-eval 0.6.6)."""

KEYS = {
    "openai_completions": ("OPENAI_API_KEY", "OPENAI_API_KEYS", "OPENAI_CLIENT_CONFIG_PATH"), "anthropic_completions": ("ANTHROPIC_API_KEY",),
    "google_completions": ("GOOGLE_API_KEY",), "cohere_completions": ("COHERE_API_KEY",), "jina_chat_completions": ("JINA_CHAT_API_KEY",),
    "huggingface_api_completions": ("HUGGINGFACEHUB_API_TOKEN",)}
"""Environment variables, one of which holds an annotator's key, by the function that asks it (alpaca-eval 0.6.6)."""


class AlpacaEvalError(DataError):
    """AlpacaEval cannot be run as the recipe says."""


def instructions_of(recipe: Recipe, prompts: Sequence[str]) -> list[str]:
    """What the annotator is told that the answers are to, prompt by prompt: what a user would have asked (templates.user_message).

    AlpacaEval's own instructions (the prompt source `alpaca_eval`, or a reference that answered these) stay as they are
    whatever the policy's template: by them its outputs and its length control are found.

    Raises:
        AlpacaEvalError: the reference's outputs cannot be read.
    """
    config, source = recipe.evaluation.alpaca_eval, recipe.data.test_prompts
    reference = config.reference_outputs if config else None
    if (source is not None and source.source == "alpaca_eval") or (reference is not None and is_alpaca_eval([row["instruction"] for row in read_outputs(Path(reference))])):
        return list(prompts)
    template = load_template(recipe.policy.template, "policy")
    return [user_message(template, prompt) for prompt in prompts]


def model_outputs(instructions: Sequence[str], answers: Sequence[str], generator: str, dataset: str) -> list[dict[str, str]]:
    """Answers in AlpacaEval's schema, one row an instruction.

    Args:
        instructions, answers: texts, row by row.
        generator: name of the model.
        dataset: where the prompts are from.
    """
    return [dict(zip(COLUMNS, (dataset, instruction, answer, generator), strict=True)) for instruction, answer in zip(instructions, answers, strict=True)]


def read_outputs(path: Path) -> list[dict[str, str]]:
    """A model's outputs from a JSON file in AlpacaEval's schema (`dataset` may be absent, and is '' then).

    Instructions are stripped, as prompts of the source `alpaca_eval` are: five of the 805 have white space at an end.

    Raises:
        AlpacaEvalError: the file is missing or no JSON list, or a row lacks text; names the row.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AlpacaEvalError(f"{path} cannot be read ({error.strerror}): give a JSON file of outputs in AlpacaEval's schema.") from None
    except (ValueError, RecursionError):
        raise AlpacaEvalError(f"{path} is not JSON: outputs in AlpacaEval's schema are a JSON list of objects with {', '.join(COLUMNS)}.") from None
    if not isinstance(rows, list) or not rows:
        raise AlpacaEvalError(f"{path} holds no list of outputs: expected a JSON list of objects with {', '.join(COLUMNS)}.")
    read = []
    for number, row in enumerate(rows, 1):
        filled = {"dataset": ""} | (row if isinstance(row, dict) else {})
        lacking = [name for name in COLUMNS if not isinstance(filled.get(name), str)]
        if lacking:
            raise AlpacaEvalError(f"{path}, row {number}: {', '.join(lacking)} must be text; an output has {', '.join(COLUMNS)}.")
        read.append({name: filled[name] for name in COLUMNS} | {"instruction": filled["instruction"].strip()})
    return read


def is_alpaca_eval(instructions: Sequence[str]) -> bool:
    """Whether these are AlpacaEval's own instructions in their order."""
    return hashlib.sha256("\x1f".join(text.strip() for text in instructions).encode()).hexdigest() == INSTRUCTIONS_HASH


def check_alpaca_eval(config: AlpacaEvalConfig) -> None:
    """Refuse, before anything is trained, what could not be run at the end; asks neither the hub nor an annotator.

    Raises:
        AlpacaEvalError: the package is not installed, or the annotator, its key, the reference's outputs or the calibration file cannot be had.
    """
    annotator = find_annotator(config.annotators_config)
    for name, settings in _annotators(annotator).items():
        template = annotator.parent / str(settings.get("prompt_template"))
        if not template.is_file():
            raise AlpacaEvalError(f"{annotator / 'configs.yaml'}: prompt_template of '{name}' is not at {template}: the package looks beside the annotator's folder, e.g. {annotator.name}/prompt.txt.")
        completions = settings.get("fn_completions", "openai_completions")
        brings_its_own = "client_config_path" in (settings.get("completions_kwargs") or {})
        if completions in KEYS and not brings_its_own and not any(os.environ.get(name) for name in KEYS[completions]):
            raise AlpacaEvalError(
                f"evaluation.alpaca_eval.annotators_config '{config.annotators_config}' asks a service for its annotations, but no key is in the environment: "
                f"set {' or '.join(KEYS[completions])} (never a recipe).")
    reference = read_outputs(Path(config.reference_outputs)) if config.reference_outputs else []
    if config.calibration is not None:
        _check_calibration(Path(config.calibration))
        if not is_alpaca_eval([row["instruction"] for row in reference]):
            raise AlpacaEvalError(
                f"evaluation.alpaca_eval.calibration is for AlpacaEval's own {INSTRUCTIONS} instructions, but reference_outputs ({config.reference_outputs}) does not hold "
                "these in their order: give the outputs of gpt4_1106_preview, or leave calibration out (the rate at equal length is computed for any prompts).")


def answered_by(reference: Sequence[Mapping[str, str]], prompts: Sequence[str], instructions: Sequence[str]) -> list[Mapping[str, str] | None]:
    """The reference's output for each prompt, found by its instruction or by the prompt alone; None where there is none."""
    rows = {row["instruction"]: row for row in reference}
    return [rows.get(instruction.strip(), rows.get(prompt.strip())) for prompt, instruction in zip(prompts, instructions, strict=True)]


def check_prompts(config: AlpacaEvalConfig, prompts: Sequence[str], instructions: Sequence[str] | None = None) -> None:
    """Refuse held-out prompts that the reference has not answered.

    Args:
        config: names the reference.
        prompts: held-out.
        instructions: what each is for the annotator, see instructions_of; None: the prompts themselves.

    Raises:
        AlpacaEvalError: says how many, and shows one.
    """
    if config.reference_outputs is None:
        return
    found = answered_by(read_outputs(Path(config.reference_outputs)), prompts, prompts if instructions is None else instructions)
    lacking = [prompt for prompt, row in zip(prompts, found, strict=True) if row is None]
    if lacking:
        raise AlpacaEvalError(
            f"{config.reference_outputs} (evaluation.alpaca_eval.reference_outputs) has no output for {len(lacking)} of the {len(prompts)} held-out prompts, e.g. "
            f"{lacking[0][:80]!r}: give outputs for these prompts, or leave reference_outputs out to compare with the raw policy.")


def find_annotator(name: str) -> Path:
    """The folder of an annotator: the package's own of that name, or a local one that holds configs.yaml.

    Raises:
        AlpacaEvalError: there is none, or the package is not installed.
    """
    package = find_spec("alpaca_eval")
    if package is None or not package.submodule_search_locations:
        raise AlpacaEvalError("the recipe has evaluation.alpaca_eval, but the package is not installed: pip install -c constraints.txt 'fed-rlhf[alpaca-eval]'.")
    own = Path(next(iter(package.submodule_search_locations))) / "evaluators_configs"
    for folder in (own / name, Path(name).resolve()):
        if (folder / "configs.yaml").is_file():
            return folder
    known = [path.parent.name for path in own.glob("*/configs.yaml")]
    raise AlpacaEvalError(f"{unknown_name('evaluation.alpaca_eval.annotators_config', name, known)} A local folder that holds configs.yaml works too.")


def annotate(config: AlpacaEvalConfig, reference: Sequence[Mapping[str, str]], outputs: Sequence[Mapping[str, str]], cache: Path, seed: int) -> list[dict[str, Any]]:
    """Let the annotator compare outputs with the reference's; which of the two it sees first is random by instruction.

    Args:
        config: names the annotator.
        reference, outputs: rows in AlpacaEval's schema for the same instructions, row by row.
        cache: JSON file of annotations that were paid for already; the pairs in it are not asked again.
        seed: of the package's order of the two outputs.

    Returns:
        the package's rows in the order of `outputs`: `preference` from 1 (the reference wins) to 2 (`outputs` wins), None where
        the annotator's words could not be parsed; output_1, generator_1 are the reference's.

    Raises:
        AlpacaEvalError: the annotator cannot be asked.
    """
    if [row["instruction"] for row in reference] != [row["instruction"] for row in outputs]:
        raise ValueError("reference and outputs must be for the same instructions, row by row")
    folder = find_annotator(config.annotators_config)
    with root_level_kept():
        from alpaca_eval.annotators import PairwiseAnnotator
    cache.parent.mkdir(parents=True, exist_ok=True)
    try:
        annotator = PairwiseAnnotator(annotators_config=folder, seed=seed, caching_path=None)
        annotator.caching_path = cache  # given above, it brings a warning about seeds; a cache here is of one run and so of one seed
        annotator.load_()
        if annotator.df_annotations is not None:  # whole numbers are read as integers, beside which the package could put no draw
            annotator.df_annotations = annotator.df_annotations.astype({annotator.annotation_key: float})
        rows = annotator.annotate_head2head([dict(row) for row in reference], [dict(row) for row in outputs], is_ordered=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise AlpacaEvalError(
            f"the annotator '{config.annotators_config}' (evaluation.alpaca_eval) stopped with {type(error).__name__}: {reason}. What it has annotated is kept in {cache}; "
            "go on with --resume once that is mended.") from error
    return [row | {"preference": None if row["preference"] != row["preference"] else row["preference"]} for row in rows]


def figures(annotations: Sequence[Mapping[str, Any]], resamples: int = 2000, seed: int = 0) -> dict[str, float]:
    """AlpacaEval's figures, by the package's own functions, and the rate at equal length, which is this project's.

    Args:
        annotations: the package's rows; `preference` in [1, 2], 1.5 or 0 for a draw, None where there is none.
        resamples, seed: of the bootstrap interval of the rate at equal length.

    Returns:
        win_rate, standard_error, discrete_win_rate (percent), n_wins, n_wins_base, n_draws, n_total (rows that have a preference), avg_length
        (characters, over all rows), n_missing, and equal_length_win_rate, equal_length_low, equal_length_high (percent, see
        components/evaluation/length_control.py).

    Raises:
        AlpacaEvalError: no row has a preference.
    """
    rows = _annotated(annotations)
    with root_level_kept():
        from alpaca_eval.metrics import get_winrate
    measured = get_winrate([{"preference": float(row["preference"])} for row in rows])
    even = length_controlled(
        [(float(row["preference"]) or 1.5) - 1 for row in rows], [len(row["output_2"]) for row in rows], [len(row["output_1"]) for row in rows], resamples, seed)
    lengths = [len(row["output_2"]) for row in annotations]
    return {name: value.item() if hasattr(value, "item") else value for name, value in measured.items()} | {
        "avg_length": sum(lengths) // len(lengths), "n_missing": len(annotations) - len(rows), "equal_length_win_rate": 100 * even.rate,
        "equal_length_low": 100 * even.low, "equal_length_high": 100 * even.high}


def length_controlled_winrate(annotations: Sequence[Mapping[str, Any]], instructions: Sequence[str], calibration: Path) -> float:
    """AlpacaEval's length-controlled win rate (percent), by the package's own model (length_controlled_v1) and its calibration.

    Args:
        annotations: as `figures` takes them; of all of AlpacaEval's instructions, or of some.
        instructions: AlpacaEval's own list in its order, as the outputs of gpt4_1106_preview have it.
        calibration: df_gamed.csv.

    Raises:
        AlpacaEvalError: the calibration file is missing or another one, or an instruction is not AlpacaEval's.
    """
    _check_calibration(calibration)
    numbers = {text.strip(): number for number, text in enumerate(instructions)}
    rows = _annotated(annotations)
    if not is_alpaca_eval(instructions) or any(row["instruction"].strip() not in numbers for row in rows):
        raise AlpacaEvalError(f"AlpacaEval's length-controlled win rate is for its own {INSTRUCTIONS} instructions, and these are others.")
    from unittest.mock import patch

    import pandas as pd
    import sklearn

    with root_level_kept():
        from alpaca_eval.metrics import glm_winrate
    table = pd.DataFrame(
        [{name: row[name] for name in ("preference", "output_1", "output_2", "generator_1", "generator_2")} for row in rows],
        index=pd.Index([numbers[row["instruction"].strip()] for row in rows]))  # the package takes the row number for the instruction
    with patch.object(glm_winrate, "hf_hub_download", lambda **_: str(calibration)), sklearn.config_context():
        return float(glm_winrate.get_length_controlled_winrate(table, save_weights_dir=None, is_warn_extreme_changes=False)["length_controlled_winrate"])


def without_calibration(instructions: Sequence[str]) -> str:
    """The sentence that stands where AlpacaEval's length-controlled win rate would, had it been asked for."""
    if is_alpaca_eval(instructions):
        return ("AlpacaEval's length-controlled win rate is missing: it needs df_gamed.csv of the hub's data set tatsu-lab/alpaca_eval as a local file, "
                "named by evaluation.alpaca_eval.calibration.")
    return f"AlpacaEval's length-controlled win rate is not defined for these prompts: it is for its own {INSTRUCTIONS} instructions."


def _annotators(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / "configs.yaml"
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        read = None
    if not isinstance(read, dict) or not all(isinstance(settings, dict) for settings in read.values()):
        raise AlpacaEvalError(f"{path} is not an annotators config: expected a mapping of annotators to their settings (prompt_template, fn_completions, ...).")
    return read


def _annotated(annotations: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    rows = [row for row in annotations if row["preference"] is not None and row["preference"] == row["preference"]]
    if not rows:
        raise AlpacaEvalError(f"none of the {len(annotations)} annotations has a preference: the annotator's words could not be parsed.")
    return rows


def _check_calibration(path: Path) -> None:
    where = f"{path} (evaluation.alpaca_eval.calibration)"
    get_it = "get df_gamed.csv from the hub's data set tatsu-lab/alpaca_eval"
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            lacking = [name for name in CALIBRATION_COLUMNS if name not in (reader.fieldnames or ())]
            known = {row["index"].removesuffix(".0") for row in reader} if not lacking else set()
    except (OSError, UnicodeDecodeError) as error:
        raise AlpacaEvalError(f"{where} cannot be read ({getattr(error, 'strerror', None) or 'not text'}): {get_it}.") from None
    if lacking:
        raise AlpacaEvalError(f"{where} has no column {', '.join(lacking)}: {get_it}.")
    absent = {str(number) for number in range(INSTRUCTIONS)} - known
    if absent:
        raise AlpacaEvalError(f"{where} has no row for {len(absent)} of AlpacaEval's {INSTRUCTIONS} instructions (column index): {get_it}.")
