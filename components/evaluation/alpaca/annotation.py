"""Annotation of pairs of outputs by AlpacaEval's annotators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

from components.config import AlpacaEvalConfig
from components.environment import preserve_root_log_level
from components.evaluation.alpaca.alpaca_checks import find_annotator
from components.evaluation.alpaca.alpaca_outputs import AlpacaEvalError, ModelOutput


class Annotation(TypedDict):
    """A row of the package's annotations; annotators may add further columns.

    Attributes:
        instruction: the instruction that was answered.
        output_1, generator_1: output of the baseline, and its name.
        output_2, generator_2: output of the evaluated model, and its name.
        annotator: name of the annotator.
        preference: from 1 (output 1 wins) to 2 (output 2 wins), 1.5 or 0 for a draw; None if the
            annotator's reply could not be parsed.
    """

    instruction: str
    output_1: str
    generator_1: str
    output_2: str
    generator_2: str
    annotator: str
    preference: float | None


def annotate(
    config: AlpacaEvalConfig,
    reference_outputs: Sequence[ModelOutput],
    outputs: Sequence[ModelOutput],
    cache: Path,
    seed: int,
) -> list[Annotation]:
    """Let the annotator compare outputs with the reference's.

    The package chooses at random, by instruction, which of the two outputs the annotator sees
    first.

    Args:
        config: names the annotator.
        reference_outputs, outputs: for the same instructions, row by row.
        cache: JSON file of earlier annotations; pairs in it are not annotated again.
        seed: determines the package's order of the two outputs.

    Returns:
        annotations in the order of `outputs`; output 1 is the reference's.

    Raises:
        AlpacaEvalError: the annotator failed.
    """
    if [row["instruction"] for row in reference_outputs] != [row["instruction"] for row in outputs]:
        raise ValueError("reference outputs and outputs must be for the same instructions, row by row")
    folder = find_annotator(config.annotators_config)
    cache.parent.mkdir(parents=True, exist_ok=True)
    try:
        rows = _load_annotator(folder, cache, seed).annotate_head2head(
            [dict(row) for row in reference_outputs], [dict(row) for row in outputs], is_ordered=True
        )
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise AlpacaEvalError(
            f"the annotator '{config.annotators_config}' (evaluation.alpaca_eval) stopped with"
            f" {type(error).__name__}: {reason}. Its annotations are stored in {cache}; fix the cause and"
            " resume the run."
        ) from error
    return [cast("Annotation", row | {"preference": none_if_nan(row["preference"])}) for row in rows]


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


def none_if_nan(value: float | None) -> float | None:
    """A preference, with None for the package's NaN."""
    return None if value != value else value
