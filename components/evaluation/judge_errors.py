"""Win rates that are corrected for the errors of the judge (arXiv 2511.21140).

A judge that prefers the better of two answers with probability q, whichever is ours, gives an answer
that is better in a share theta of the pairs a rate of

    p = theta q + (1 - theta) (1 - q),    so that    theta = (p + q - 1) / (2 q - 1)

with q0 = q1 = q of the paper, because every pair is judged in both orders. q is measured on the judge's
own held-out pairs. The interval has the uncertainty of both:

    Var theta = Var p / (2 q - 1)^2 + (1 - 2 p)^2 / (2 q - 1)^4 Var q

with (k + 1) / (m + 2) for q of k right ones of m pairs, and q (1 - q) / (m + 2) for its variance (Agresti
and Coull's adjustment, so that a judge without an observed error is not taken for one that makes none).

The held-out pairs of a judge are often easier than pairs of two policies' answers: q is then too large,
and the correction and the interval are too small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from components.evaluation.intervals import Estimate


def correct_rate(estimate: Estimate, right: float, pairs: float) -> list[float] | None:
    """The rate that a judge without errors would give of a mean of wins, and its 95% interval.

    They are within [0, 1], and ties are one half.

    `right` of the judge's held-out pairs are those that it gets right, of which ties count half. There is no
    rate where the judge is not better than chance, so that nothing follows.
    """
    if not is_better_than_chance(right, pairs):
        return None
    accuracy = (right + 1) / (pairs + 2)
    gain = 2 * accuracy - 1
    rate = (estimate.value + accuracy - 1) / gain
    low, high = estimate.interval()
    of_judge = abs(1 - 2 * estimate.value) / gain**2 * math.sqrt(accuracy * (1 - accuracy) / (pairs + 2))
    below = math.hypot((estimate.value - low) / gain, 1.959964 * of_judge)
    above = math.hypot((high - estimate.value) / gain, 1.959964 * of_judge)
    return [min(max(value, 0.0), 1.0) for value in (rate, rate - below, rate + above)]


def is_better_than_chance(right: float, pairs: float) -> bool:
    """Whether a judge gets more than half of its held-out pairs right."""
    return 2 * right > pairs


def judge_counts(judges: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Held-out pairs that judges got right, and all of them, over the judges of several seeds."""
    known = [one for one in judges if "judge_accuracy" in one and "judge_held_out_pairs" in one]
    right = sum(one["judge_accuracy"] * one["judge_held_out_pairs"] for one in known)
    return right, sum(one["judge_held_out_pairs"] for one in known)
