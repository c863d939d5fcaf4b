"""The epsilon of releases, against figures of dp-accounting 0.6.0 (PLD) and by hand."""

import math

import pytest

from components.privacy.ledger import Release, accountant_of, epsilon_of, gaussian_epsilon, solve_sigma

# Rate, sigma and steps of each release, delta, and epsilon by PLD and by RDP, which is an upper bound.
FIGURES = [
    ([(0.1, 1, 1)], 1e-3, 0.6499, math.inf),
    ([(0.1, 1, 10)], 1e-3, 1.5717, math.inf),
    ([(0.1, 1, 100)], 1e-3, 4.7844, 5.6551),
    ([(0.1, 2, 100)], 1e-3, 1.5439, 1.7990),
    ([(0.5, 1, 3)], 0.1, 1.1244, 1.8995),
    ([(0.05, 0.8, 200)], 1e-4, 6.4726, 7.5100),
    ([(0.01, 1, 1000)], 1e-5, 1.8282, 2.1014),
    ([(0.25, 1.5, 50)], 1e-3, 4.6638, 5.3844),
    ([(0.02, 0.6, 500)], 1e-5, 10.2803, 11.8456),
    ([(1, 4, 10)], 1e-5, 3.3414, 3.6171),
    ([(1, 1, 1)], 1e-5, 4.3772, math.inf),
    ([(0.1, 1, 50), (0.1, 2, 50)], 1e-3, 3.5457, math.inf),
    ([(0.1, 1, 100), (1, 8, 2)], 1e-3, 4.8271, math.inf),
    ([(1 / 3, 1.5, 64)], 1e-3, 7.5860, math.inf),
    ([(8 / 96, 1.0, 64)], 1e-3, 3.0806, math.inf),
]


def gaussian(rate, sigma, steps=1):
    return Release(mechanism="gaussian", rate=rate, sigma=sigma, steps=steps)


@pytest.mark.parametrize(("releases", "delta", "pld", "rdp"), FIGURES)
def test_epsilon_is_that_of_another_accountant(releases, delta, pld, rdp):
    epsilon = epsilon_of([gaussian(*one) for one in releases], delta)
    assert pld - 1e-4 <= epsilon <= min(pld + 0.003, rdp)


def test_gaussian_epsilon_solves_its_equation():
    for mu, delta in ((0.3, 1e-2), (1.0, 1e-5), (4.0, 1e-9)):
        epsilon = gaussian_epsilon(mu, delta)
        above = math.erfc(-(mu / 2 - epsilon / mu) / math.sqrt(2)) / 2
        below = math.erfc((mu / 2 + epsilon / mu) / math.sqrt(2)) / 2
        assert above - math.exp(epsilon) * below == pytest.approx(delta, rel=1e-6)
    assert gaussian_epsilon(0.01, 0.1) == 0.0, "delta alone covers it"


def test_epsilons_of_randomised_responses_add_to_those_of_sums():
    answers = Release(mechanism="randomised-response", epsilon=0.5, steps=3)
    assert epsilon_of([answers], 0.0) == 1.5
    assert epsilon_of([answers, gaussian(1, 4, 10)], 1e-5) == pytest.approx(1.5 + 3.3414, abs=1e-4)
    assert epsilon_of([], 1e-5) == 0.0
    assert accountant_of([answers]) == "randomised response"
    assert accountant_of([answers, gaussian(1, 4)]) == "randomised response and analytic Gaussian"
    assert accountant_of([gaussian(0.1, 4), gaussian(1, 4)]) == "PRV (opacus)"


def test_a_sum_without_noise_has_no_finite_epsilon():
    assert epsilon_of([gaussian(0.1, 0)], 1e-3) == math.inf
    with pytest.raises(ValueError, match="finite"):
        gaussian(1, math.inf)


@pytest.mark.parametrize(("epsilon", "sigma"), [pytest.param(8, 0.7784, marks=pytest.mark.long), (2, 1.6739)])
def test_the_noise_for_an_epsilon(epsilon, sigma):
    found = solve_sigma(epsilon, 1e-3, 0.1, 100)
    assert found == pytest.approx(sigma, rel=2e-3)
    assert epsilon_of([gaussian(0.1, found, 100)], 1e-3) <= epsilon
