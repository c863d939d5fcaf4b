"""Gaussian noise from a secret: the same secret and purpose give the same noise, and nothing else does.

Random words are the key stream of ChaCha20 with a key that is an HMAC of the secret and the purpose. Noise
on a grid is discrete Gaussian, P(k) proportional to exp(-k^2 / 2 s^2) for integers k (Canonne et al. 2020),
by inversion of a table of 128-bit integers. Its distance from the exact distribution is at most 1e-30 a
value: the tails beyond 12 s, and the table's entries times 2^-128.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from components.privacy.secrets import digest

Words = npt.NDArray[np.uint64]
TAILS = 12
"""Standard deviations on each side that a table covers."""
BITS = 128
"""Of a table's cumulative probabilities."""
GUARD = 128
"""Further bits with which they are computed, for rounding."""
CHUNK = 1 << 20
"""Values that are drawn at a time."""


class Stream:
    """Random 64-bit words of a secret for one purpose."""

    def __init__(self, secret: bytes, *purpose: str) -> None:
        """A stream; two with different parts of the purpose have nothing to do with each other."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

        key = digest(secret, *purpose)
        self._cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def words(self, count: int) -> Words:
        """The next words, [count]."""
        return np.frombuffer(self._cipher.update(bytes(8 * count)), dtype="<u8").astype(np.uint64)


def gaussian(stream: Stream, count: int, deviation: float) -> npt.NDArray[np.float64]:
    """Gaussian noise in fp64, [count], by the method of Box and Muller (1958)."""
    pairs = (count + 1) // 2
    first, second = ((stream.words(pairs) >> np.uint64(11)).astype(np.float64) for _ in range(2))
    radius = np.sqrt(-2 * np.log((first + 1) / 2**53))  # of (0, 1], so that the logarithm is finite
    angle = 2 * np.pi * second / 2**53
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return np.asarray(deviation * both[:count])


def discrete_gaussian(stream: Stream, count: int, deviation: float) -> npt.NDArray[np.int64]:
    """Discrete Gaussian noise, integers [count].

    Args:
        stream: of random words; two are taken for each value.
        count: number of values.
        deviation: s, in units of the grid, at least 1.
    """
    upper, lower = _table(deviation)
    half = len(upper) // 2
    parts = []
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        high, low = stream.words(size), stream.words(size)
        places = np.searchsorted(upper, high, side="left")
        for n in np.flatnonzero(upper[np.minimum(places, len(upper) - 1)] == high):
            while places[n] < len(upper) and (upper[places[n]], lower[places[n]]) <= (high[n], low[n]):
                places[n] += 1
        parts.append(np.minimum(places, len(upper) - 1).astype(np.int64) - half)
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


@lru_cache(maxsize=4)
def _table(deviation: float) -> tuple[Words, Words]:
    """Upper and lower words of P(X <= k) 2^128 for k from -T to T, T = 12 s rounded up."""
    if not 1 <= deviation < 2**32:
        raise ValueError(
            f"the deviation {deviation} of discrete noise is not from 1 to 2^32 cells of the grid"
        )
    reach = math.ceil(TAILS * deviation)
    weights = list(_weights(deviation, reach))  # of 0, 1, ..., T
    total = weights[0] + 2 * sum(weights[1:])
    cumulative = 0
    upper, lower = np.zeros(2 * reach + 1, dtype=np.uint64), np.zeros(2 * reach + 1, dtype=np.uint64)
    for n, k in enumerate(range(-reach, reach + 1)):
        cumulative += weights[abs(k)]
        scaled = min((cumulative << BITS) // total, (1 << BITS) - 1)
        upper[n], lower[n] = scaled >> 64, scaled & ((1 << 64) - 1)
    return upper, lower


def _weights(deviation: float, reach: int) -> Iterator[int]:
    """exp(-k^2 / 2 s^2) 2^(BITS + GUARD) for k = 0 to T, by w_k+1 = w_k q^(2 k + 1), q = exp(-1 / 2 s^2)."""
    scale = BITS + GUARD
    q = _exp_of_negative(Fraction(1, 2) / Fraction(deviation) ** 2, scale)
    square = q * q >> scale
    weight, factor = 1 << scale, q
    for _ in range(reach + 1):
        yield weight
        weight = weight * factor >> scale
        factor = factor * square >> scale


def _exp_of_negative(x: Fraction, bits: int) -> int:
    """exp(-x) 2^bits for x in [0, 1/2], by its series."""
    term = total = Fraction(1)
    n = 0
    while abs(term) * 2 ** (bits + 8) > 1:
        n += 1
        term *= -x / n
        term = Fraction(round(term * 2 ** (bits + 64)), 2 ** (bits + 64))
        total += term
    return int(total * 2**bits)
