"""Numbers as the cells of tables.

NumPy, and what uses it, is imported where it is needed, since `fed-rlhf runs` does without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from components.results import ContestFigures, WinRate

if TYPE_CHECKING:
    from components.evaluation.intervals import Estimate

MISSING = "-"
ALL_TIES = "undecided: all ties"


def format_number(value: float | None, digits: int = 3) -> str:
    """A number, without a sign if it is rounded to 0; '-' if it is missing or not finite."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:z.{digits}f}"


def format_percent(share: float | None) -> str:
    """A share in percent; '-' if it is missing or not finite."""
    return MISSING if share is None or not math.isfinite(share) else f"{share:.1%}"


def format_rate(share: float | None, low: float | None, high: float | None, is_all_ties: bool = False) -> str:
    """A share in percent with its interval, where it has one; '-' if it is missing or not finite.

    Of verdicts that are all ties it is undecided, and its interval, which has no width, is left out.
    """
    text = format_percent(share)
    if text == MISSING:
        return text
    if is_all_ties:
        return f"{text} ({ALL_TIES})"
    if low is None or high is None:
        return text
    return f"{text} [{format_percent(low)}, {format_percent(high)}]"


def are_all_ties(wins: float, ties: float, losses: float) -> bool:
    """Whether there are ties and nothing else."""
    return ties > 0 and not wins and not losses


def format_figure(one: ContestFigures, name: str) -> str:
    """A rate of a contest, by its name in ContestFigures, with its interval."""
    share, low, high = (getattr(one, field) for field in (name, f"{name}_low", f"{name}_high"))
    return format_rate(share, low, high, are_all_ties(one.wins, one.ties, one.losses))


def format_share_of_wins(one: WinRate) -> str:
    """Wins among all verdicts, of which ties are none, with its interval, if that has a width."""
    low = None if one.low == one.high else one.low
    return format_rate(one.win_rate, low, one.high, are_all_ties(one.wins, one.ties, one.losses))


def rate_cells(one: ContestFigures, judges: Sequence[Mapping[str, float]], corrected: str) -> dict[str, str]:
    """The cells of a contest with its counts and its rates.

    The judges' figures are of its seeds; `corrected` heads the rate without the judge's errors.
    """
    from components.evaluation.judge_errors import is_better_than_chance, judge_counts

    right, pairs = judge_counts(judges)
    text = format_figure(one, "corrected")
    if pairs and not is_better_than_chance(right, pairs):
        text = "the judge is not better than chance"
    elif is_undecided(one) and not text.endswith(f"({ALL_TIES})"):
        text += " (undecided)"
    return {
        "wins/ties/losses": format_counts(one),
        "win rate, ties as 1/2 [95%]": format_figure(one, "ties_half"),
        "length-controlled [95%]": format_figure(one, "length_controlled"),
        "length- and style-controlled [95%]": format_figure(one, "style_controlled"),
        corrected: text,
        "share of wins [95%]": format_share_of_wins(one),
    }


def is_undecided(one: ContestFigures) -> bool:
    """Whether the interval of the win rate without the judge's errors includes one half."""
    low, high = one.corrected_low, one.corrected_high
    return low is not None and high is not None and low <= 0.5 <= high


def format_counts(rate: WinRate) -> str:
    """Wins, ties and losses, and unparsable verdicts where there are some; '-' without a verdict."""
    if not (rate.wins or rate.ties or rate.losses or rate.unparsable):
        return MISSING
    counts = f"{rate.wins}/{rate.ties}/{rate.losses}"
    return f"{counts} ({rate.unparsable} unparsable)" if rate.unparsable else counts


def format_spreads(estimate: Estimate | None) -> str:
    """Standard deviations of a figure over the seeds, and over the units of a seed."""
    if estimate is None:
        return MISSING
    return f"{format_number(estimate.between)}; {format_number(estimate.within)}"


def format_mean(values: Sequence[float]) -> str:
    """Mean and sample standard deviation over seeds."""
    import numpy as np

    digits = 0 if np.mean(values) >= 100 else 3
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.{digits}f}"
