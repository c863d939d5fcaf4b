"""Numbers as the cells of tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

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


def format_equal_length(figures: ContestFigures) -> str:
    """The win rate at equal length, a tie half a win, and its interval."""
    return format_rate(
        figures.length_controlled, figures.length_controlled_low, figures.length_controlled_high
    )


def format_counts(rate: WinRate) -> str:
    """Wins, ties and losses, and unparsable verdicts where there are some."""
    counts = f"{rate.wins}/{rate.ties}/{rate.losses}"
    return f"{counts} ({rate.unparsable} unparsable)" if rate.unparsable else counts


def format_mean(values: Sequence[float]) -> str:
    """Mean and sample standard deviation over seeds."""
    digits = 0 if np.mean(values) >= 100 else 3
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.{digits}f}"


def format_client_range(worst_and_spread: tuple[float, float] | None) -> str:
    """The worst client and the spread, in brackets; empty for metrics that are no means over clients."""
    if worst_and_spread is None:
        return ""
    worst, spread = worst_and_spread
    return f" ({worst:.3f}; {spread:.3f})"
