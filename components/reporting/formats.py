"""Numbers as the cells of tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from components.evaluation.judge_errors import is_better_than_chance, judge_counts
from components.results import ContestFigures, WinRate

MISSING = "-"


def format_number(value: float | None, digits: int = 3) -> str:
    """A number, without a sign if it is rounded to 0; '-' if it is missing or not finite."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:z.{digits}f}"


def format_percent(share: float | None) -> str:
    """A share in percent; '-' if it is missing or not finite."""
    return MISSING if share is None or not math.isfinite(share) else f"{share:.1%}"


def format_rate(share: float | None, low: float | None, high: float | None) -> str:
    """A share in percent with its interval, where it has one; '-' if it is missing or not finite."""
    text = format_percent(share)
    if text == MISSING or low is None or high is None:
        return text
    return f"{text} [{format_percent(low)}, {format_percent(high)}]"


def format_equal_length(one: ContestFigures) -> str:
    """The win rate at equal length, a tie half a win, and its interval."""
    return format_rate(one.length_controlled, one.length_controlled_low, one.length_controlled_high)


def rate_cells(one: ContestFigures, judges: Sequence[Mapping[str, float]], corrected: str) -> dict[str, str]:
    """The cells of a contest with its rates beside the win rate.

    The judges' figures are of its seeds; `corrected` heads the rate without the judge's errors.
    """
    right, pairs = judge_counts(judges)
    text = format_rate(one.corrected, one.corrected_low, one.corrected_high)
    if pairs and not is_better_than_chance(right, pairs):
        text = "the judge is not better than chance"
    elif is_undecided(one):
        text += " (undecided)"
    style = format_rate(one.style_controlled, one.style_controlled_low, one.style_controlled_high)
    return {
        "at equal length [95%]": format_equal_length(one),
        "at equal length and style [95%]": style,
        "ties half": format_percent(one.ties_half),
        corrected: text,
    }


def is_undecided(one: ContestFigures) -> bool:
    """Whether the interval of the win rate without the judge's errors includes one half."""
    low, high = one.corrected_low, one.corrected_high
    return low is not None and high is not None and low <= 0.5 <= high


def format_counts(rate: WinRate) -> str:
    """Wins, ties and losses, and unparsable verdicts where there are some."""
    counts = f"{rate.wins}/{rate.ties}/{rate.losses}"
    return f"{counts} ({rate.unparsable} unparsable)" if rate.unparsable else counts


def format_mean(values: Sequence[float]) -> str:
    """Mean and sample standard deviation over seeds."""
    digits = 0 if np.mean(values) >= 100 else 3
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.{digits}f}"
