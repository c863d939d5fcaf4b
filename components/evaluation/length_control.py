"""Length-controlled win rate: how often response 1 would win if both responses were equally long.

The estimator follows Length-Controlled AlpacaEval (Dubois et al. 2024). Its generalized linear
model has three terms: the model, the length, and the difficulty of the instruction. The difficulty
is known only for AlpacaEval's own instructions (see components/evaluation/alpaca.py), so it is left
out here:

    logit p = theta + phi tanh(d / std d),    d = length of response 1 - length of response 2

with lengths in characters.

The model is fitted to soft labels (1 win, 1/2 tie, 0 loss), and the rate is p at d = 0. The fit is
Newton's method in NumPy rather than scikit-learn's, because the bootstrap interval needs thousands
of fits of two coefficients, which are done in batches here.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from components.evaluation.winrate import draw_rows, unit_indices
from components.seeding import generator

PENALTY = 0.01
"""Weight of phi^2 / 2 against the summed log-loss.

The penalty keeps phi finite if length alone separates wins from losses. AlpacaEval's minimal form
penalizes the absolute values of both coefficients with the same weight (its C = 100)."""

CELLS = 1 << 20
"""Number of resamples x prompts that are fitted in one batch: 8 MB per array."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LengthControlledRate:
    """How often response 1 would win at equal length; a tie is half a win."""

    rate: float  # in [0, 1]; NaN if it is not determined, see fit_length_controlled_rate
    low: float  # 95% percentile-bootstrap interval of the rate over prompts, and over seeds if several
    high: float
    uncontrolled: float  # mean label, which is the rate at the lengths as they are
    effect: float  # coefficient phi; positive if the longer response is preferred


def fit_length_controlled_rate(
    labels: Sequence[float],
    first_lengths: Sequence[int],
    second_lengths: Sequence[int],
    resamples: int = 2000,
    seed: int = 0,
    prompts: Sequence[Hashable] | None = None,
    seeds: Sequence[Hashable] | None = None,
) -> LengthControlledRate:
    """Fit the length-controlled win rate of response 1 with a 95% percentile-bootstrap interval.

    Degenerate data:

    - All labels are equal: the rate is that label, and phi is 0.
    - All lengths are equal within their pairs: the rate is the mean label, and phi is 0.
    - All differences are equal and not zero (e.g. one prompt), or there are no prompts: the effect
      of length cannot be separated from the preference, so rate and phi are NaN. Such resamples are
      left out of the interval.

    Args:
        labels: one for each prompt, in [0, 1]: 1 if response 1 won, 1/2 for a tie, or a judge's
            probability.
        first_lengths, second_lengths: lengths of responses 1 and 2 (characters).
        resamples: number of bootstrap resamples. Each is a complete estimate, including the
            standard deviation of the differences.
        seed: determines the resamples.
        prompts: prompt of each label; those of a prompt are drawn together. None: each has its own.
        seeds: seed of the run that gave each label; seeds are drawn too, see winrate.draw_rows. None: one for
            all.

    Raises:
        ValueError: the numbers of labels and lengths differ, or a label is outside [0, 1].
    """
    if not len(labels) == len(first_lengths) == len(second_lengths):
        raise ValueError(
            f"there are {len(labels)} labels, {len(first_lengths)} first lengths and {len(second_lengths)}"
            " second lengths: expected one of each for every prompt"
        )
    y = np.asarray(labels, dtype=float)
    d = np.asarray(first_lengths, dtype=float) - np.asarray(second_lengths, dtype=float)
    if not ((y >= 0) & (y <= 1)).all():
        raise ValueError("labels must lie in [0, 1]")
    n = len(y)
    if not n:
        return LengthControlledRate(*[float("nan")] * 5)
    (rate,), (effect,) = _fit_rates(y, d, np.ones((1, n)))
    units = np.array(unit_indices(range(n) if prompts is None else prompts))
    of_seeds = np.zeros(n, dtype=np.int64) if seeds is None else np.array(unit_indices(seeds))
    low, high = np.nan, np.nan
    if not np.isnan(rate):
        low, high = _bootstrap_interval(y, d, units, of_seeds, resamples, seed)
    return LengthControlledRate(float(rate), low, high, float(y.mean()), float(effect))


def _bootstrap_interval(
    y: Array,
    d: Array,
    units: npt.NDArray[np.int64],
    seeds: npt.NDArray[np.int64],
    resamples: int,
    seed: int,
) -> tuple[float, float]:
    numbers = generator(seed, "bootstrap", "length-controlled")
    batch = max(1, CELLS // len(y))
    rates = []
    for start in range(0, resamples, batch):
        drawn = draw_rows(units, seeds, min(batch, resamples - start), numbers)
        counts: Array = drawn[drawn.any(axis=1)].astype(np.float64)
        rates.append(_fit_rates(y, d, counts)[0])
    determined = np.concatenate(rates)
    determined = determined[~np.isnan(determined)]
    if not len(determined):
        return float("nan"), float("nan")
    low, high = np.quantile(determined, [0.025, 0.975])
    return float(low), float(high)


def _fit_rates(y: Array, d: Array, counts: Array) -> tuple[Array, Array]:
    """Rate at equal length and phi of each resample, both [B].

    y and d are [N]; counts [B, N] says how often a row is part of a resample.
    """
    total = counts.sum(1)
    mean_y = counts @ y / total
    mean_d = counts @ d / total
    spread = np.sqrt(np.maximum(counts @ d**2 - total * mean_d**2, 0) / np.maximum(total - 1, 1))
    present = counts > 0
    least_d = np.where(present, d, np.inf).min(1)
    same_d = least_d == np.where(present, d, -np.inf).max(1)
    same_y = np.where(present, y, np.inf).min(1) == np.where(present, y, -np.inf).max(1)
    rate = mean_y.copy()
    phi = np.zeros(len(counts))
    undetermined = same_d & (least_d != 0)
    rate[undetermined] = np.nan
    phi[undetermined] = np.nan
    fitted = ~same_d & ~same_y
    if fitted.any():
        x = np.tanh(d / spread[fitted, None])
        theta, phi[fitted] = _fit(y, x, counts[fitted], mean_y[fitted])
        rate[fitted] = 1 / (1 + np.exp(-theta))
    return rate, phi


def _fit(y: Array, x: Array, counts: Array, mean: Array) -> tuple[Array, Array]:
    """Fit theta and phi, both [B], by Newton's method with step halving, B fits at once.

    y is [N], x and counts are [B, N], and mean is the mean label [B]. Every fit has different
    labels and phi is penalized, so that the loss is strictly convex and has one minimum.
    """
    wins = counts * y
    sum_y = wins.sum(1)
    sum_xy = _row_sums(wins, x)

    def evaluate(theta: Array, phi: Array) -> tuple[Array, Array]:
        """Probabilities [B, N] and penalized loss [B], in a form that is precise near 0 and 1."""
        z = theta[:, None] + phi[:, None] * x
        decay = np.exp(-np.abs(z))
        log_loss = _row_sums(counts, np.maximum(z, 0) + np.log1p(decay)) - theta * sum_y - phi * sum_xy
        return np.where(z < 0, decay, 1) / (1 + decay), log_loss + PENALTY / 2 * phi**2

    theta = np.log(mean) - np.log1p(-mean)
    phi = np.zeros(len(mean))
    p, loss = evaluate(theta, phi)
    for _ in range(200):
        expected = counts * p
        gradient_theta = expected.sum(1) - sum_y
        gradient_phi = _row_sums(expected, x) - sum_xy + PENALTY * phi
        curvature = counts * p * (1 - p)
        a = curvature.sum(1)
        b = _row_sums(curvature, x)
        c = _row_sums(curvature, x, x) + PENALTY
        determinant = a * c - b**2
        step_theta = (b * gradient_phi - c * gradient_theta) / determinant
        step_phi = (b * gradient_theta - a * gradient_phi) / determinant
        decrement = -(gradient_theta * step_theta + gradient_phi * step_phi)
        # Newton's decrement is twice the loss that is left to gain.
        if decrement.max() < 1e-16:
            return theta, phi
        scale = np.ones(len(mean))
        p, new_loss = evaluate(theta + step_theta, phi + step_phi)
        while (worse := new_loss > loss + 1e-12 * np.abs(loss)).any():
            scale[worse] /= 2
            p, new_loss = evaluate(theta + scale * step_theta, phi + scale * step_phi)
        theta = theta + scale * step_theta
        phi = phi + scale * step_phi
        loss = new_loss
    raise ArithmeticError("the length-controlled fit did not converge in 200 Newton steps")


def _row_sums(*factors: Array) -> Array:
    """Sum the product of matrices [B, N] over each row."""
    sums: Array = np.einsum(",".join(["bn"] * len(factors)) + "->b", *factors)
    return sums
