"""Controlled win rates: how often response 1 would win at equal length, and at equal length and style.

The estimator follows Length-Controlled AlpacaEval (Dubois et al. 2024). Its generalized linear
model has three terms: the model, the length, and the difficulty of the instruction. The difficulty
is known only for AlpacaEval's own instructions (see components/evaluation/alpaca.py), so it is left
out here:

    logit p = theta + phi tanh(d / std d),    d = length of response 1 - length of response 2

with lengths in characters. Style control, as of LMArena and Arena-Hard-Auto (Li et al. 2024), adds a term
of the same form for each difference of style: the numbers of headings, list items and bold passages. Both
count by regular expressions; here a CommonMark parser does, so that code, whether fenced, indented or in a
line, has none. They take (a - b) / (a + b) for the normalized difference of two counts, where this model has
one form for all of its differences.

The model is fitted to soft labels (1 win, 1/2 tie, 0 loss), and the rate is p where all differences are 0.
The fit is Newton's method in NumPy rather than scikit-learn's, because the bootstrap interval needs
thousands of fits of a few coefficients, which are done in batches here.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from markdown_it import MarkdownIt

from components.evaluation.intervals import Estimate, estimate_mean, share_of
from components.evaluation.winrate import draw_units, unit_indices
from components.seeding import generator

PENALTY = 0.01
"""Weight of phi^2 / 2 against the summed log-loss.

The penalty keeps phi finite if length alone separates wins from losses. AlpacaEval's minimal form
penalizes the absolute values of both coefficients with the same weight (its C = 100)."""

CELLS = 1 << 20
"""Number of resamples x prompts that are fitted in one batch: 8 MB per array."""

STYLE = {"headings": "heading_open", "list_items": "list_item_open", "bold": "strong_open"}
"""Differences of style by name, and the token of the parser that each counts."""
_PARSER = MarkdownIt("commonmark")

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LengthControlledRate:
    """How often response 1 would win at equal length, and style where it counts; a tie is half a win."""

    rate: float  # in [0, 1]; NaN if it is not determined, see fit_length_controlled_rate
    low: float  # 95% percentile-bootstrap interval of the rate over prompts
    high: float
    uncontrolled: float  # mean label, which is the rate at the lengths as they are
    effect: float  # coefficient phi; positive if the longer response is preferred
    style_effects: dict[str, float] = field(default_factory=dict)  # the same of each difference of style


def fit_length_controlled_rate(
    labels: Sequence[float],
    first_lengths: Sequence[int],
    second_lengths: Sequence[int],
    resamples: int = 2000,
    seed: int = 0,
    prompts: Sequence[Hashable] | None = None,
    style: Mapping[str, Sequence[int]] | None = None,
) -> LengthControlledRate:
    """Fit the length-controlled win rate of response 1 with a 95% percentile-bootstrap interval.

    Degenerate data:

    - All labels are equal: the rate is that label, and all phi are 0.
    - A difference is 0 in all pairs: its phi is 0. Where all are, the rate is the mean label.
    - All values of a difference are equal and not zero (e.g. one prompt), or there are no prompts: its
      effect cannot be separated from the preference, so rate and phi are NaN. Such resamples are left
      out of the interval.

    Args:
        labels: one for each prompt, in [0, 1]: 1 if response 1 won, 1/2 for a tie, or a judge's
            probability.
        first_lengths, second_lengths: lengths of responses 1 and 2 (characters).
        resamples: each is a complete estimate, including the standard deviation of the differences.
        prompts: prompt of each label; those of a prompt are drawn together. None: each has its own.
        style: further differences, of response 1 less response 2, by name; one for each prompt.
    """
    if not len(labels) == len(first_lengths) == len(second_lengths):
        raise ValueError(
            f"there are {len(labels)} labels, {len(first_lengths)} first lengths and {len(second_lengths)}"
            " second lengths: expected one of each for every prompt"
        )
    names = list(style or {})
    y = np.asarray(labels, dtype=float)
    d = _differences(first_lengths, second_lengths, style)
    if not ((y >= 0) & (y <= 1)).all():
        raise ValueError("labels must lie in [0, 1]")
    n = len(y)
    if not n:
        nan = float("nan")
        return LengthControlledRate(nan, nan, nan, nan, nan, dict.fromkeys(names, nan))
    (rate,), effects = _fit_rates(y, d, np.ones((1, n)))
    low, high = np.nan, np.nan
    if not np.isnan(rate):
        units = np.array(unit_indices(range(n) if prompts is None else prompts))
        low, high = _bootstrap_interval(y, d, units, resamples, seed)
    effect, *of_style = effects[:, 0].tolist()
    return LengthControlledRate(
        float(rate), low, high, float(y.mean()), effect, dict(zip(names, of_style, strict=True))
    )


def estimate_equal_length(
    labels: Sequence[float],
    first_lengths: Sequence[int],
    second_lengths: Sequence[int],
    prompts: Sequence[Hashable],
    seeds: Sequence[Hashable],
    style: Mapping[str, Sequence[int]] | None = None,
) -> Estimate | None:
    """The same rate over the labels of at least two seeds, with the variance over seeds and prompts.

    theta is the solution of the score equations, so that its deviation is in first order the sum over the
    rows of [I^-1 (1, x)]_theta (y - p), where I is the information of all coefficients; these sums by seed
    and prompt are the values whose components of variance are estimated (components.evaluation.intervals).
    Each label has a prompt and a seed. None where the rate is not determined, or fewer than two seeds have
    labels.
    """
    y = np.asarray(labels, dtype=float)
    if len(set(seeds)) < 2:
        return None
    d = _differences(first_lengths, second_lengths, style)
    (rate,), effects = _fit_rates(y, d, np.ones((1, len(y))))
    if np.isnan(rate):
        return None
    if rate in (0.0, 1.0):
        return Estimate(float(rate), (), 0.0, is_share=True, sure=len(set(prompts)))
    x = np.stack([np.tanh(one / one.std(ddof=1)) if one.any() else np.zeros(len(y)) for one in d])
    p = 1 / (1 + np.exp(-(np.log(rate) - np.log1p(-rate) + (effects * x).sum(0))))
    weights = p * (1 - p)
    information = np.empty((len(x) + 1, len(x) + 1))
    information[0, 0] = weights.sum()
    information[0, 1:] = information[1:, 0] = [weights @ one for one in x]
    information[1:, 1:] = [[weights @ (one * other) for other in x] for one in x] + PENALTY * np.eye(len(x))
    moves = np.linalg.solve(information, np.stack([np.ones(len(y)), *x]))[0] * (y - p)
    own: dict[Hashable, dict[str, float]] = {seed: {} for seed in seeds}
    for seed, prompt, move in zip(seeds, prompts, moves, strict=True):
        own[seed][str(prompt)] = own[seed].get(str(prompt), 0.0) + float(move)
    slope = float(rate * (1 - rate))
    scaled = [
        {"": {unit: move * slope * len(own) * len(units) for unit, move in units.items()}}
        for units in own.values()
    ]
    linear = estimate_mean(scaled)
    return share_of(float(rate), linear, linear.between)


def _differences(
    first_lengths: Sequence[int], second_lengths: Sequence[int], style: Mapping[str, Sequence[int]] | None
) -> Array:
    """The differences of length and style of N pairs, [K, N]."""
    length = np.asarray(first_lengths, dtype=float) - np.asarray(second_lengths, dtype=float)
    return np.stack([length, *(np.asarray(values, dtype=float) for values in (style or {}).values())])


def _bootstrap_interval(
    y: Array,
    d: Array,
    units: npt.NDArray[np.int64],
    resamples: int,
    seed: int,
) -> tuple[float, float]:
    numbers = generator(seed, "bootstrap", "length-controlled")
    batch = max(1, CELLS // len(y))
    rates = []
    for start in range(0, resamples, batch):
        drawn = draw_units(units, min(batch, resamples - start), numbers)
        rates.append(_fit_rates(y, d, drawn.astype(np.float64))[0])
    determined = np.concatenate(rates)
    determined = determined[~np.isnan(determined)]
    if not len(determined):
        return float("nan"), float("nan")
    low, high = np.quantile(determined, [0.025, 0.975])
    return float(low), float(high)


def _fit_rates(y: Array, d: Array, counts: Array) -> tuple[Array, Array]:
    """Rate at differences of zero [B], and phi of each of K differences [K, B], of each resample.

    y is [N] and d [K, N]; counts [B, N] says how often a row is part of a resample.
    """
    total = counts.sum(1)
    mean_y = counts @ y / total
    present = counts > 0
    same_y = np.where(present, y, np.inf).min(1) == np.where(present, y, -np.inf).max(1)
    least_d = np.stack([np.where(present, one, np.inf).min(1) for one in d])
    same_d = least_d == np.stack([np.where(present, one, -np.inf).max(1) for one in d])
    rate = mean_y.copy()
    phi = np.zeros((len(d), len(counts)))
    undetermined = (same_d & (least_d != 0)).any(0)
    rate[undetermined] = np.nan
    phi[:, undetermined] = np.nan
    fitted = ~same_d.all(0) & ~same_y & ~undetermined
    if fitted.any():
        x = np.zeros((len(d), int(fitted.sum()), len(y)))
        for one, of_one, constant in zip(x, d, same_d[:, fitted], strict=True):
            mean_d = counts @ of_one / total
            squares = counts @ of_one**2 - total * mean_d**2
            spread = np.sqrt(np.maximum(squares, 0) / np.maximum(total - 1, 1))[fitted]
            one[~constant] = np.tanh(of_one / spread[~constant, None])
        theta, phi[:, fitted] = _fit(y, x, counts[fitted], mean_y[fitted])
        rate[fitted] = 1 / (1 + np.exp(-theta))
    return rate, phi


def _fit(y: Array, x: Array, counts: Array, mean: Array) -> tuple[Array, Array]:
    """Fit theta [B] and phi [K, B] by Newton's method with step halving, B fits at once.

    y is [N], x [K, B, N], counts [B, N], and mean is the mean label [B]. Every fit has different
    labels and phi is penalized, so that the loss is strictly convex and has one minimum.
    """
    wins = counts * y
    sums = np.stack([wins.sum(1), *(_row_sums(wins, one) for one in x)])

    def evaluate(coefficients: Array) -> tuple[Array, Array]:
        """Probabilities [B, N] and penalized loss [B], in a form that is precise near 0 and 1."""
        theta, phi = coefficients[0], coefficients[1:]
        z = theta[:, None] + np.einsum("kb,kbn->bn", phi, x)
        decay = np.exp(-np.abs(z))
        log_loss = _row_sums(counts, np.maximum(z, 0) + np.log1p(decay))
        for own, own_sum in zip(coefficients, sums, strict=True):
            log_loss -= own * own_sum
        return np.where(z < 0, decay, 1) / (1 + decay), log_loss + PENALTY / 2 * (phi**2).sum(0)

    coefficients = np.zeros((len(x) + 1, len(mean)))  # theta, then phi
    coefficients[0] = np.log(mean) - np.log1p(-mean)
    p, loss = evaluate(coefficients)
    for _ in range(200):
        expected = counts * p
        gradient = np.stack([expected.sum(1), *(_row_sums(expected, one) for one in x)]) - sums
        gradient[1:] += PENALTY * coefficients[1:]
        step = _newton_step(counts * p * (1 - p), x, gradient)
        decrement = -(gradient * step).sum(0)
        # Newton's decrement is twice the loss that is left to gain.
        if decrement.max() < 1e-16:
            return coefficients[0], coefficients[1:]
        scale = np.ones(len(mean))
        p, new_loss = evaluate(coefficients + step)
        while (worse := new_loss > loss + 1e-12 * np.abs(loss)).any():
            scale[worse] /= 2
            p, new_loss = evaluate(coefficients + scale * step)
        coefficients = coefficients + scale * step
        loss = new_loss
    raise ArithmeticError("the length-controlled fit did not converge in 200 Newton steps")


def _newton_step(curvature: Array, x: Array, gradient: Array) -> Array:
    """The step of all coefficients [K + 1, B], by the curvature [B, N] of the log-loss in z."""
    hessian = np.empty((curvature.shape[0], len(x) + 1, len(x) + 1))
    hessian[:, 0, 0] = curvature.sum(1)
    for i, one in enumerate(x, 1):
        hessian[:, 0, i] = hessian[:, i, 0] = _row_sums(curvature, one)
        for j, other in enumerate(x[:i], 1):
            hessian[:, i, j] = hessian[:, j, i] = _row_sums(curvature, one, other) + PENALTY * (i == j)
    if len(x) > 1:
        return -np.linalg.solve(hessian, gradient.T[:, :, None])[:, :, 0].T.astype(np.float64)
    # The two coefficients of the rate at equal length in closed form.
    a, b, c = hessian[:, 0, 0], hessian[:, 0, 1], hessian[:, 1, 1]
    of_theta, of_phi = gradient
    return np.stack([b * of_phi - c * of_theta, b * of_theta - a * of_phi]) / (a * c - b**2)


def _row_sums(*factors: Array) -> Array:
    """Sum the product of matrices [B, N] over each row."""
    sums: Array = np.einsum(",".join(["bn"] * len(factors)) + "->b", *factors)
    return sums


def count_style(text: str) -> dict[str, int]:
    """How many headings, list items and bold passages a text has, by the names of STYLE."""
    tokens = _PARSER.parse(text)
    kinds = [one.type for token in tokens for one in (token, *(token.children or ()))]
    return {name: kinds.count(kind) for name, kind in STYLE.items()}


def style_differences(ours: Sequence[str], theirs: Sequence[str]) -> dict[str, list[int]]:
    """Counts of our answer less those of theirs, of N pairs, by the names of STYLE."""
    pairs = [(count_style(our), count_style(their)) for our, their in zip(ours, theirs, strict=True)]
    return {name: [our[name] - their[name] for our, their in pairs] for name in STYLE}
