"""What a federation has released of its clients' data, and the epsilon of all of it.

A ledger is a list of releases, each by a mechanism whose cost is known. Its epsilon, for a delta, is

    that of all Gaussian releases in which every unit takes part: exact, since they are together one release
        with mu^2 = sum of steps / sigma^2, by the analytic Gaussian mechanism (Balle and Wang 2018);
    plus the epsilons of randomised responses (Warner 1965), which need no delta.

sigma is the standard deviation of the noise over the sensitivity, the norm that one unit may add to the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

from pydantic import Field

from components.results import Result

MAX_EPSILON = 1e4
"""Above it a Gaussian release is as good as none."""


class Release(Result):
    """Sums that were released with noise, or judgements that were released by randomised response.

    Attributes:
        mechanism: how they were released.
        sigma: standard deviation of the noise of a sum over the sensitivity.
        steps: how many such sums there were.
        epsilon: of randomised response.
    """

    mechanism: Literal["gaussian", "randomised-response"]
    sigma: float = Field(0.0, ge=0, allow_inf_nan=False)
    steps: int = Field(1, ge=0)
    epsilon: float = Field(0.0, ge=0, allow_inf_nan=False)


def epsilon_of(releases: Sequence[Release], delta: float) -> float:
    """The epsilon of all releases together, infinite where a sum had no noise.

    Args:
        releases: in any order.
        delta: probability in (0, 1) with which the guarantee may fail; not used by randomised responses.
    """
    pure = sum(one.steps * one.epsilon for one in releases if one.mechanism == "randomised-response")
    gaussian = [one for one in releases if one.mechanism == "gaussian" and one.steps]
    if any(one.sigma == 0 for one in gaussian):
        return math.inf
    mu = math.sqrt(sum(one.steps / one.sigma**2 for one in gaussian))
    return pure + gaussian_epsilon(mu, delta)


def accountant_of(releases: Sequence[Release]) -> str:
    """What computes the epsilon of these releases, in words."""
    kinds = {
        "randomised response": any(one.mechanism == "randomised-response" for one in releases),
        "analytic Gaussian": any(one.mechanism == "gaussian" for one in releases),
    }
    return " and ".join(name for name, is_used in kinds.items() if is_used)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest epsilon of Gaussian noise with sensitivity / deviation mu (Balle and Wang 2018, eq. 6).

    delta = Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu)
    """
    from scipy.special import log_ndtr

    def excess(epsilon: float) -> float:
        above = math.exp(log_ndtr(mu / 2 - epsilon / mu))
        below = math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
        return above - below - delta

    return 0.0 if mu == 0 else _smallest(excess)


def _smallest(excess: Callable[[float], float]) -> float:
    """The smallest epsilon at which an excess, which falls with it, is not positive."""
    from scipy.optimize import brentq

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
        if high > MAX_EPSILON:
            return math.inf
    return float(brentq(excess, 0.0, high, xtol=1e-12, rtol=1e-14))


@lru_cache(maxsize=16)
def solve_sigma(epsilon: float, delta: float) -> float:
    """The smallest sigma, up to 1e-3 of it, with which a sum costs at most epsilon.

    Args:
        epsilon: that it may cost, above 0.
        delta: see epsilon_of.
    """
    from scipy.optimize import brentq

    def excess(sigma: float) -> float:
        return epsilon_of([Release(mechanism="gaussian", sigma=sigma)], delta) - epsilon

    low = high = 1.0
    while excess(high) > 0:
        low, high = high, 2 * high
    while excess(low) <= 0:
        low, high = low / 2, low
    found = float(brentq(excess, low, high, rtol=2e-4))
    return found if excess(found) <= 0 else found * (1 + 1e-3)
