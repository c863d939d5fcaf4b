"""AlpacaEval's figures, by the package's own functions, and the win rate at equal length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from components.environment import preserve_root_log_level
from components.evaluation.alpaca.alpaca_checks import check_calibration
from components.evaluation.alpaca.alpaca_outputs import INSTRUCTIONS, AlpacaEvalError, is_alpaca_eval
from components.evaluation.alpaca.annotation import Annotation, none_if_nan
from components.evaluation.length_control import fit_length_controlled_rate
from components.results import AlpacaEvalFigures


def compute_figures(
    annotations: Sequence[Annotation], resamples: int = 2000, seed: int = 0
) -> AlpacaEvalFigures:
    """Compute AlpacaEval's figures and the win rate at equal length.

    AlpacaEval's figures are computed by the functions of its package.

    Args:
        annotations: rows of the package.
        resamples, seed: of the bootstrap interval of the rate at equal length.

    Raises:
        AlpacaEvalError: no row has a preference.
    """
    rows = _rows_with_preference(annotations)
    preferences = [preference for _, preference in rows]
    with preserve_root_log_level():
        from alpaca_eval.metrics import get_winrate
    measured = get_winrate([{"preference": preference} for preference in preferences])
    equal_length = fit_length_controlled_rate(
        [(preference or 1.5) - 1 for preference in preferences],
        [len(row["output_2"]) for row, _ in rows],
        [len(row["output_1"]) for row, _ in rows],
        resamples,
        seed,
    )
    lengths = [len(row["output_2"]) for row in annotations]
    return AlpacaEvalFigures(
        win_rate=float(measured["win_rate"]),
        standard_error=float(measured["standard_error"]),
        n_wins=int(measured["n_wins"]),
        n_wins_base=int(measured["n_wins_base"]),
        n_draws=int(measured["n_draws"]),
        n_total=int(measured["n_total"]),
        discrete_win_rate=float(measured["discrete_win_rate"]),
        avg_length=sum(lengths) // len(lengths),
        n_missing=len(annotations) - len(rows),
        equal_length_win_rate=100 * equal_length.rate,
        equal_length_low=100 * equal_length.low,
        equal_length_high=100 * equal_length.high,
    )


def package_length_controlled_rate(
    annotations: Sequence[Annotation], instructions: Sequence[str], calibration: Path
) -> float:
    """Compute AlpacaEval's length-controlled win rate by the model length_controlled_v1.

    Args:
        annotations: rows of the package, for all or some of AlpacaEval's instructions.
        instructions: AlpacaEval's own list in its order, as in the outputs of gpt4_1106_preview.
        calibration: the file df_gamed.csv.

    Returns:
        the rate in percent.

    Raises:
        AlpacaEvalError: the calibration file is missing or damaged, or an instruction is not
            AlpacaEval's.
    """
    check_calibration(calibration)
    numbers = {text.strip(): number for number, text in enumerate(instructions)}
    rows = [row for row, _ in _rows_with_preference(annotations)]
    if not is_alpaca_eval(instructions) or any(row["instruction"].strip() not in numbers for row in rows):
        raise AlpacaEvalError(
            f"AlpacaEval's length-controlled win rate is for its own {INSTRUCTIONS} instructions, but these"
            " are other instructions."
        )
    return _fit_package_model(rows, [numbers[row["instruction"].strip()] for row in rows], calibration)


def _fit_package_model(rows: Sequence[Annotation], numbers: Sequence[int], calibration: Path) -> float:
    """The package's rate (percent) of rows for the instructions with these numbers."""
    from unittest.mock import patch

    import pandas as pd
    import sklearn

    with preserve_root_log_level():
        from alpaca_eval.metrics import glm_winrate
    columns = ["preference", "output_1", "output_2", "generator_1", "generator_2"]
    # The package takes the index of a row for the number of its instruction.
    table = pd.DataFrame([dict(row) for row in rows], columns=columns, index=pd.Index(numbers))
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


def _rows_with_preference(annotations: Sequence[Annotation]) -> list[tuple[Annotation, float]]:
    """The rows with a preference, each with it as a number."""
    rows = []
    for row in annotations:
        preference = none_if_nan(row["preference"])
        if preference is not None:
            rows.append((row, float(preference)))
    if not rows:
        raise AlpacaEvalError(
            f"none of the {len(annotations)} annotations has a preference: the annotator's replies could not"
            " be parsed."
        )
    return rows
