"""AlpacaEval 2.0 (Li et al. 2023; Dubois et al. 2024) through the package alpaca_eval.

The package annotates pairs of outputs and computes the figures. This folder prepares its input and
changes three of its defaults: the package would write its cache and weights into its own folder,
download the calibration data from the hub, and look up the difficulty of an instruction by its row
number, which is correct for AlpacaEval's own list only.

Figures have the names and units of AlpacaEval's leaderboard: percent, counts, characters.
"""

from components.evaluation.alpaca.alpaca_checks import check_alpaca_eval, check_prompts
from components.evaluation.alpaca.alpaca_figures import (
    compute_figures,
    missing_rate_note,
    package_length_controlled_rate,
)
from components.evaluation.alpaca.alpaca_outputs import (
    AlpacaEvalError,
    ModelOutput,
    annotator_instructions,
    is_alpaca_eval,
    match_outputs,
    model_outputs,
    read_outputs,
)
from components.evaluation.alpaca.annotation import Annotation, annotate

__all__ = [
    "AlpacaEvalError",
    "Annotation",
    "ModelOutput",
    "annotate",
    "annotator_instructions",
    "check_alpaca_eval",
    "check_prompts",
    "compute_figures",
    "is_alpaca_eval",
    "match_outputs",
    "missing_rate_note",
    "model_outputs",
    "package_length_controlled_rate",
    "read_outputs",
]
