"""Correlated noise over the rounds: banded square-root factors (Choquette-Choo et al. 2023).

The noise z_t of round t solves sum_j c_j z_(t-j) = w_t for independent Gaussian w_t, with the first b
coefficients of the square root of the matrix of ones, c_j = binom(2 j, j) / 4^j (Fichtenberger et al.
2023). What the server knows after all rounds is C x + w for the clients' sums x and the Toeplitz matrix C
of the c_j, up to a transformation that has no data. If a client takes part at most once in b rounds, and k
times in all, its contributions of norm 1 change C x by at most sqrt(k) |c|, because its columns of C do not
overlap, also if later sums depend on earlier results (Denisov et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


def coefficients(bands: int) -> list[float]:
    """c_0 to c_(b-1): 1, 1/2, 3/8, 5/16, ..."""
    return [math.comb(2 * j, j) / 4**j for j in range(bands)]


def participations(rounds: int, separation: int) -> int:
    """k, how often a client takes part at most: once in `separation` rounds."""
    return math.ceil(rounds / separation)


def sensitivity(bands: int, rounds: int) -> float:
    """How far one client with contributions of norm 1, at most once in `bands` rounds, moves C x.

    It is sqrt(k) |c|, or less where the last column of its k ends with the rounds.
    """
    squares = [c * c for c in coefficients(bands)]
    whole = participations(rounds, bands) - 1
    return math.sqrt(whole * sum(squares) + sum(squares[: rounds - whole * bands]))


def correlated(fresh: Vector, earlier: Sequence[Vector], bands: int) -> Vector:
    """z_t = w_t - sum_(j >= 1) c_j z_(t-j).

    Args:
        fresh: w_t [n].
        earlier: z_(t-1), z_(t-2), ..., as many of the last b - 1 as there are, [n] each.
        bands: b.
    """
    noise = fresh.copy()
    for c, previous in zip(coefficients(bands)[1:], earlier, strict=False):
        noise -= c * previous
    return noise
