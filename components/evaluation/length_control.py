"""Length-controlled win rate: how often response 1 would win if both responses were equally long.

After Length-Controlled AlpacaEval (Dubois et al., 2024), whose generalised linear model has three terms: the model,
the length, and the difficulty of the instruction. The last is known for AlpacaEval's own instructions only (see
components/evaluation/alpaca.py for these), so for other prompts it is left out:

    logit p = theta + phi tanh(d / std d),    d = length of response 1 - length of response 2, in characters

fitted to soft labels (1 win, 1/2 tie, 0 loss); the rate is p at d = 0. The fit is Newton's method in NumPy, and not
scikit-learn's, because the interval needs thousands of fits of two coefficients, which are done at once here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from components.evaluation.winrate import Verdict
from components.seeding import generator

PENALTY = 0.01
"""Weight of phi^2 / 2 against the summed log-loss, so that phi stays finite where length alone tells wins from losses.
AlpacaEval's minimal form penalises the absolute values of both coefficients with the same weight (its C = 100)."""

CELLS = 1 << 20
"""Resamples x prompts fitted at once: 8 MB an array."""

LABELS = {Verdict.FIRST: 1.0, Verdict.TIE: 0.5, Verdict.SECOND: 0.0}


@dataclass(frozen=True)
class LengthControlled:
    """How often response 1 would win at equal length; a tie is half a win.

    Attributes:
        rate: in [0, 1]; NaN where it is not determined, see `length_controlled`.
        low, high: 95% percentile-bootstrap interval of the rate over prompts.
        uncontrolled: the mean label, which is the rate with the lengths as they are.
        effect: phi; positive where the longer response is preferred.
    """

    rate: float
    low: float
    high: float
    uncontrolled: float
    effect: float


def length_controlled(labels: Sequence[float], ours: Sequence[int], theirs: Sequence[int], resamples: int = 2000, seed: int = 0) -> LengthControlled:
    """Length-controlled win rate of response 1 with a 95% percentile-bootstrap interval.

    Where the data do not determine the fit:
    - all labels the same: no length tells them apart, so the rate is that label and phi is 0;
    - all differences zero: nothing has to be controlled for, so the rate is the mean label and phi is 0;
    - all differences the same and not zero (as with one prompt), or no prompts: what is due to length cannot be known,
      so rate and phi are NaN. Resamples in which that happens are left out of the interval.

    Args:
        labels: one a prompt, in [0, 1]: 1 where response 1 won, 1/2 for a tie, or a judge's probability.
        ours, theirs: lengths of responses 1 and 2 (characters).
        resamples: of the bootstrap; each is a whole estimate, the standard deviation of the differences included.
        seed: the resamples are a function of it.

    Raises:
        ValueError: the columns differ in length, or a label is outside [0, 1].
    """
    if not len(labels) == len(ours) == len(theirs):
        raise ValueError(f"{len(labels)} labels, {len(ours)} lengths of ours and {len(theirs)} of theirs: there must be one of each a prompt")
    y, d = np.asarray(labels, dtype=float), np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float)
    if not ((y >= 0) & (y <= 1)).all():
        raise ValueError("labels must lie in [0, 1]")
    n = len(y)
    if not n:
        return LengthControlled(*[float("nan")] * 5)
    (rate,), (effect,) = _rates(y, d, np.ones((1, n)))
    numbers = generator(seed, "bootstrap", "length-controlled")
    rates, step = [], max(1, CELLS // n)
    for start in range(0, resamples, step):
        rates.append(_rates(y, d, numbers.multinomial(n, np.full(n, 1 / n), size=min(step, resamples - start)).astype(float))[0])
    known = np.concatenate(rates)
    known = known[~np.isnan(known)]
    low, high = np.quantile(known, [0.025, 0.975]) if len(known) and not np.isnan(rate) else (np.nan, np.nan)
    return LengthControlled(float(rate), float(low), float(high), float(y.mean()), float(effect))


def control_length(verdicts: Sequence[Verdict], ours: Sequence[str], theirs: Sequence[str], resamples: int = 2000, seed: int = 0) -> LengthControlled:
    """Length-controlled win rate of the first responses from a judge's verdicts; what is unparsable is left out.

    Args:
        verdicts: one for each prompt.
        ours, theirs: the texts that were judged; their lengths are in characters, as they stand.
        resamples, seed: of the bootstrap.
    """
    return control_lengths(verdicts, [len(text) for text in ours], [len(text) for text in theirs], resamples, seed)


def control_lengths(verdicts: Sequence[Verdict], ours: Sequence[int], theirs: Sequence[int], resamples: int = 2000, seed: int = 0) -> LengthControlled:
    """The same, of texts whose lengths (characters) are known."""
    rows = [(LABELS[verdict], one, other) for verdict, one, other in zip(verdicts, ours, theirs, strict=True) if verdict in LABELS]
    labels, first, second = zip(*rows, strict=True) if rows else ((), (), ())
    return length_controlled(labels, first, second, resamples, seed)


def _rates(y: np.ndarray, d: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rate at equal length and phi of each resample; y and d [N], counts [B, N] how often a row is in each."""
    total = counts.sum(1)
    mean_y, mean_d = counts @ y / total, counts @ d / total
    spread = np.sqrt(np.maximum(counts @ d**2 - total * mean_d**2, 0) / np.maximum(total - 1, 1))
    present = counts > 0
    least_d = np.where(present, d, np.inf).min(1)
    same_d = least_d == np.where(present, d, -np.inf).max(1)
    same_y = np.where(present, y, np.inf).min(1) == np.where(present, y, -np.inf).max(1)
    rate, phi = mean_y.copy(), np.zeros(len(counts))
    unknown = same_d & (least_d != 0)
    rate[unknown] = phi[unknown] = np.nan
    fitted = ~same_d & ~same_y
    if fitted.any():
        x = np.tanh(d / spread[fitted, None])
        theta, phi[fitted] = _fit(y, x, counts[fitted], mean_y[fitted])
        rate[fitted] = 1 / (1 + np.exp(-theta))
    return rate, phi


def _fit(y: np.ndarray, x: np.ndarray, counts: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Newton's method with halved steps for B fits at once: y [N], x and counts [B, N], mean label [B]; theta and phi [B].

    Different labels are present in each fit and phi is penalised, so the loss is strictly convex and has one minimum.
    """
    theta, phi = np.log(mean) - np.log1p(-mean), np.zeros(len(mean))
    wins = counts * y
    sum_y, sum_xy = wins.sum(1), np.einsum("bn,bn->b", wins, x)

    def evaluate(theta: np.ndarray, phi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The probabilities and the penalised loss; precise for tiny probabilities too, which a judge's own may be."""
        z = theta[:, None] + phi[:, None] * x
        decay = np.exp(-np.abs(z))
        loss = np.einsum("bn,bn->b", counts, np.maximum(z, 0) + np.log1p(decay)) - theta * sum_y - phi * sum_xy + PENALTY / 2 * phi**2
        return np.where(z < 0, decay, 1) / (1 + decay), loss

    p, loss = evaluate(theta, phi)
    for _ in range(200):
        expected, curvature = counts * p, counts * p * (1 - p)
        by_theta, by_phi = expected.sum(1) - sum_y, np.einsum("bn,bn->b", expected, x) - sum_xy + PENALTY * phi
        a, b, c = curvature.sum(1), np.einsum("bn,bn->b", curvature, x), np.einsum("bn,bn,bn->b", curvature, x, x) + PENALTY
        det = a * c - b**2
        to_theta, to_phi, share = (b * by_phi - c * by_theta) / det, (b * by_theta - a * by_phi) / det, np.ones(len(mean))
        if -(by_theta * to_theta + by_phi * to_phi).min() < 1e-16:  # Newton's decrement: twice the loss that is left to gain
            return theta, phi
        p, reached = evaluate(theta + to_theta, phi + to_phi)
        while (worse := reached > loss + 1e-12 * np.abs(loss)).any():
            share[worse] /= 2
            p, reached = evaluate(theta + share * to_theta, phi + share * to_phi)
        theta, phi, loss = theta + share * to_theta, phi + share * to_phi, reached
    raise ArithmeticError("the length-controlled fit did not settle in 200 Newton steps")

