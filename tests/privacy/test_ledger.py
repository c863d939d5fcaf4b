"""The epsilon of releases, against figures of dp-accounting 0.6.0 (PLD) and by hand."""

import math

import pytest

from components.privacy.ledger import Release, accountant_of, epsilon_of, gaussian_epsilon, solve_sigma

# Sigma and steps of each release, delta, and epsilon by PLD.
FIGURES = [
    ([(4, 10)], 1e-5, 3.3414),
    ([(1, 1)], 1e-5, 4.3772),
    ([(4, 10), (8, 2)], 1e-5, 3.4358),
    ([(0.8, 1), (5, 3)], 1e-3, 4.3431),
    ([(2, 1)], 0.1, 0.2865),
]


def gaussian(sigma, steps=1):
    return Release(mechanism="gaussian", sigma=sigma, steps=steps)


@pytest.mark.parametrize(("releases", "delta", "pld"), FIGURES)
def test_epsilon_is_that_of_another_accountant(releases, delta, pld):
    epsilon = epsilon_of([gaussian(*one) for one in releases], delta)
    assert epsilon == pytest.approx(pld, abs=1e-4)


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
    assert epsilon_of([answers, gaussian(4, 10)], 1e-5) == pytest.approx(1.5 + 3.3414, abs=1e-4)
    assert epsilon_of([], 1e-5) == 0.0
    assert accountant_of([answers]) == "randomised response"
    assert accountant_of([answers, gaussian(4)]) == "randomised response and analytic Gaussian"


def test_a_sum_without_noise_has_no_finite_epsilon():
    assert epsilon_of([gaussian(0)], 1e-3) == math.inf
    with pytest.raises(ValueError, match="finite"):
        gaussian(math.inf)


@pytest.mark.parametrize(("epsilon", "sigma"), [(8, 0.4800), (2, 1.4453)])
def test_the_noise_for_an_epsilon(epsilon, sigma):
    found = solve_sigma(epsilon, 1e-3)
    assert found == pytest.approx(sigma, rel=2e-3)
    assert epsilon_of([gaussian(found)], 1e-3) <= epsilon
