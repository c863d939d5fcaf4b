"""AlpacaEval 2.0 (Li et al. 2023; Dubois et al. 2024) through the package alpaca_eval.

The package annotates pairs of outputs and computes the figures. This module changes three of its
defaults: the package would write its cache and weights into its own folder, download the calibration
data from the hub, and look up the difficulty of an instruction by its row number, which is correct for
AlpacaEval's own list only.

Figures have the names and units of AlpacaEval's leaderboard: percent, counts, characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
import pandas as pd

from components.config import AlpacaEvalConfig
from components.data.records import DataError
from components.environment import preserve_root_log_level
from components.evaluation.alpaca_inputs import INSTRUCTIONS, ModelOutput, find_annotator, is_alpaca_eval
from components.evaluation.length_control import fit_length_controlled_rate, style_differences
from components.results import AlpacaEvalFigures


class Annotation(TypedDict):
    """A row of the package's annotations; annotators may add further columns."""

    instruction: str
    output_1: str  # of the baseline
    generator_1: str  # name of the baseline
    output_2: str  # of the evaluated model
    generator_2: str
    annotator: str
    # From 1 (output 1 wins) to 2 (output 2 wins), 1.5 or 0 for a draw; None if the annotator's reply
    # could not be parsed.
    preference: float | None


def annotate(
    config: AlpacaEvalConfig,
    reference_outputs: Sequence[ModelOutput],
    outputs: Sequence[ModelOutput],
    cache: Path,
    seed: int,
) -> list[Annotation]:
    """Let the annotator compare outputs with the reference's for the same instructions, row by row.

    The package chooses at random, by instruction and the seed, which of the two outputs the annotator sees
    first. Pairs of the cache, a JSON file of earlier annotations, are not annotated again. The annotations
    are in the order of `outputs`, and output 1 is the reference's.
    """
    if [row.instruction for row in reference_outputs] != [row.instruction for row in outputs]:
        raise ValueError("reference outputs and outputs must be for the same instructions, row by row")
    folder = find_annotator(config.annotators_config)
    cache.parent.mkdir(parents=True, exist_ok=True)
    try:
        rows = _load_annotator(folder, cache, seed).annotate_head2head(
            [row.model_dump() for row in reference_outputs],
            [row.model_dump() for row in outputs],
            is_ordered=True,
        )
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"the annotator '{config.annotators_config}' (evaluation.alpaca_eval) stopped with"
            f" {type(error).__name__}: {reason}. Its annotations are stored in {cache}; fix the cause and"
            " resume the run."
        ) from error
    for row in rows:
        if pd.isna(row["preference"]):
            row["preference"] = None
    return cast("list[Annotation]", rows)


def _load_annotator(folder: Path, cache: Path, seed: int) -> Any:
    """The package's annotator, with the earlier annotations of the cache."""
    with preserve_root_log_level():
        from alpaca_eval.annotators import PairwiseAnnotator

    annotator = PairwiseAnnotator(annotators_config=folder, seed=seed, caching_path=None)
    # As an argument, a path would bring a warning about seeds; this cache belongs to one run,
    # and so to one seed.
    annotator.caching_path = cache
    annotator.load_()
    if annotator.df_annotations is not None:
        # pandas reads whole numbers as integers, to which the package could not add a draw.
        annotator.df_annotations = annotator.df_annotations.astype({annotator.annotation_key: float})
    return annotator


def compute_figures(
    annotations: Sequence[Annotation], resamples: int = 2000, seed: int = 0, style_control: bool = False
) -> AlpacaEvalFigures:
    """AlpacaEval's figures, by the functions of its package, and the win rate at equal length.

    With style_control there is also the rate at equal length and style.
    """
    rows = _rows_with_preference(annotations)
    if not rows:
        raise DataError(
            f"none of the {len(annotations)} annotations has a preference: the annotator's replies could not"
            " be parsed."
        )
    with preserve_root_log_level():
        from alpaca_eval.metrics import get_winrate
    figures = get_winrate(rows)
    labels = [(row["preference"] or 1.5) - 1 for row in rows]
    ours = [row["output_2"] for row in rows]
    theirs = [row["output_1"] for row in rows]
    data = labels, [len(text) for text in ours], [len(text) for text in theirs], resamples, seed
    equal_length = fit_length_controlled_rate(*data)
    further: dict[str, Any] = {}
    if style_control:
        equal_style = fit_length_controlled_rate(*data, style=style_differences(ours, theirs))
        further = {
            "equal_style_win_rate": 100 * equal_style.rate,
            "equal_style_low": 100 * equal_style.low,
            "equal_style_high": 100 * equal_style.high,
            "style_effects": {"length": equal_style.effect} | equal_style.style_effects,
        }
    lengths = [len(row["output_2"]) for row in annotations]
    return AlpacaEvalFigures(
        **{name: np.asarray(value).item() for name, value in figures.items()},
        avg_length=sum(lengths) // len(lengths),
        n_missing=len(annotations) - len(rows),
        equal_length_win_rate=100 * equal_length.rate,
        equal_length_low=100 * equal_length.low,
        equal_length_high=100 * equal_length.high,
        **further,
    )


def package_length_controlled_rate(
    annotations: Sequence[Annotation], instructions: Sequence[str], calibration: Path
) -> float:
    """AlpacaEval's length-controlled win rate (percent) by the model length_controlled_v1.

    The annotations are for all or some of AlpacaEval's instructions, which are its own list in its order, as
    in the outputs of gpt4_1106_preview. The calibration is the file df_gamed.csv;
    check_alpaca_eval checks both.
    """
    from unittest.mock import patch

    import sklearn

    with preserve_root_log_level():
        from alpaca_eval.metrics import glm_winrate
    numbers = {text.strip(): number for number, text in enumerate(instructions)}
    rows = _rows_with_preference(annotations)
    # The package takes the index of a row for the number of its instruction.
    table = pd.DataFrame(
        [dict(row) for row in rows],
        columns=["preference", "output_1", "output_2", "generator_1", "generator_2"],
        index=[numbers[row["instruction"].strip()] for row in rows],
    )
    with patch.object(glm_winrate, "hf_hub_download", lambda **_: str(calibration)), sklearn.config_context():
        figures = glm_winrate.get_length_controlled_winrate(
            table, save_weights_dir=None, is_warn_extreme_changes=False
        )
    return float(figures["length_controlled_winrate"])


def missing_rate_note(instructions: Sequence[str]) -> str:
    """Explain, for a report, why AlpacaEval's length-controlled win rate is missing."""
    if is_alpaca_eval(instructions):
        return (
            "AlpacaEval's length-controlled win rate is missing: it needs df_gamed.csv of the hub's data set"
            " tatsu-lab/alpaca_eval as a local file, named by evaluation.alpaca_eval.calibration."
        )
    return (
        "AlpacaEval's length-controlled win rate is not defined for these prompts: it is for its own"
        f" {INSTRUCTIONS} instructions."
    )


def _rows_with_preference(annotations: Sequence[Annotation]) -> list[Annotation]:
    return [row for row in annotations if row["preference"] is not None]
