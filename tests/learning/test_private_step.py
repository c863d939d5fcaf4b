"""DP-SGD with a pair as the unit: batches, clipped gradients of pairs, and noise."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from components.config import DpoObjective, OptimizerConfig
from components.config.local_objectives import SftObjective
from components.learning.loop import Loss, RowLosses, Training, gradients_of, train
from components.learning.private_step import PairAccumulator, PairProtection, add_clipped
from components.learning.selector_training import SelectorLoss
from components.learning.wrapped_losses import ProximalLoss
from components.privacy.noise import Stream
from tests.support.pairs import PAIRS
from tests.support.training import build_loss

SECRET = bytes(range(32))
DIRECTIONS = torch.tensor([[3.0, 4, 0, 0], [0, 0, 1, 0], [0, 6, 0, 8], [0, 0, 0, 0.5]])
"""Gradients of the losses of four rows."""
SGD = OptimizerConfig(name="sgd", lr=1.0, scheduler="constant", warmup_steps=0, clip=None)


def protection(pairs=4, clip=1.0, sigma=0.0, rate=0.5, secret=SECRET):
    return PairProtection(clip, sigma, rate, pairs, partial(Stream, secret, "test"))


class Products(Loss):
    """Rows whose losses have these directions as gradients; row n belongs to pair n modulo `pairs`."""

    def __init__(self, weight, pairs):
        self.weight, self.pairs = weight, pairs

    def __call__(self, rows):
        return RowLosses(DIRECTIONS[rows] @ self.weight, len(rows))

    def rows_of(self, pair):
        return np.arange(pair, 4, self.pairs)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        # (0.6, 0.8), (0, 0, 1), (0, 0.6, 0, 0.8) and (0, 0, 0, 0.5), which is not clipped
        (4, [0.6, 1.4, 1, 1.3]),
        # The means (1.5, 5, 0, 4) of rows 0 and 2, and (0, 0, 0.5, 0.25) of rows 1 and 3: both rows at once
        (2, [1.5 / 43.25**0.5, 5 / 43.25**0.5, 0.5, 4 / 43.25**0.5 + 0.25]),
    ],
)
def test_a_step_is_the_sum_of_the_pairs_clipped_gradients_over_the_expected_batch(pairs, expected):
    weight = torch.nn.Parameter(torch.zeros(4))
    accumulator = PairAccumulator(Products(weight, pairs), [weight], protection(pairs))
    value, rows = accumulator.add([np.arange(pairs)], "")
    assert (weight.grad * 0.5 * pairs).tolist() == pytest.approx(expected)
    assert (value, rows) == (0.0, 4)


def test_values_that_are_not_finite_count_as_nothing():
    total = [torch.zeros(3), torch.zeros(1)]
    norm = add_clipped(total, [torch.tensor([math.nan, 3.0, math.inf]), torch.tensor([4.0])], 1.0)
    assert norm == 5.0
    assert [tensor.tolist() for tensor in total] == [[0, pytest.approx(0.6), 0], [pytest.approx(0.8)]]
    assert add_clipped(total, [None, None], 1.0) == 0.0
    huge = [torch.zeros(1)]
    add_clipped(huge, [torch.tensor([3e38])], 1.0)
    assert huge[0].item() == pytest.approx(1.0)


def test_each_pair_is_in_a_batch_with_the_rate_independently():
    drawn = protection(pairs=50, rate=0.3).draw(2000)
    counts = np.zeros((2000, 50))
    for row, batch in zip(counts, drawn, strict=True):
        row[batch] = 1
    expected = 2000 * 0.3
    statistic = ((counts.sum(axis=0) - expected) ** 2 / (expected * 0.7)).sum()
    assert chi2.cdf(statistic, 50) < 1 - 1e-4
    assert abs(np.corrcoef(counts[:, 0], counts[:, 1])[0, 1]) < 0.1
    sizes = counts.sum(axis=1)
    assert sizes.var() == pytest.approx(50 * 0.3 * 0.7, rel=0.15), "of Poisson sampling, not of fixed batches"
    assert all(
        np.array_equal(*pair) for pair in zip(drawn, protection(pairs=50, rate=0.3).draw(2000), strict=True)
    )
    other = protection(pairs=50, rate=0.3, secret=bytes(32)).draw(2000)
    assert not all(np.array_equal(*pair) for pair in zip(drawn, other, strict=True))


def test_an_empty_batch_is_a_step_of_noise_and_each_step_has_noise_of_its_own():
    weight = torch.nn.Parameter(torch.zeros(1000))
    frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    loss = Products(weight, 4)
    accumulator = PairAccumulator(loss, [weight, frozen], protection(sigma=3.0))
    steps = []
    for _ in range(2):
        assert accumulator.add([np.array([], dtype=np.int64)], "") == (0.0, 0)
        steps.append(weight.grad.clone())
    assert steps[0].std().item() == pytest.approx(3.0 / 2, rel=0.1), "sigma C over 2 expected pairs"
    assert abs(np.corrcoef(*steps)[0, 1]) < 0.15
    assert frozen.grad is None
    again = PairAccumulator(loss, [weight, frozen], protection(sigma=3.0))
    again.add([np.array([], dtype=np.int64)], "")
    assert torch.equal(weight.grad, steps[0])


def test_the_noise_of_another_sum_is_other_noise():
    """A step that is repeated with another sum would give the difference away."""
    gradients = []
    for batch in ([0], [1]):
        weight = torch.nn.Parameter(torch.zeros(4))
        PairAccumulator(Products(weight, 4), [weight], protection(sigma=1.0)).add([np.array(batch)], "")
        gradients.append(weight.grad * 2)
    clipped = [torch.tensor([0.6, 0.8, 0, 0]), torch.tensor([0, 0, 1.0, 0])]
    noises = [gradient - own for gradient, own in zip(gradients, clipped, strict=True)]
    assert (noises[0] - noises[1]).abs().min() > 1e-3


def test_a_training_takes_as_many_steps_as_batches_and_its_optimizer_sees_noised_gradients():
    weight = torch.nn.Parameter(torch.zeros(4))
    batches = [np.arange(4), np.array([], dtype=np.int64), np.array([1])]
    model = torch.nn.Linear(1, 1)
    accumulate = protection(sigma=0.0).accumulate
    trained = train(
        model, [weight], batches, Products(weight, 4), Training(3, 4, SGD, 0), accumulate=accumulate
    )
    assert len(trained.losses) == 3
    assert (-2 * weight).tolist() == pytest.approx([0.6, 1.4, 2, 1.3])


@pytest.mark.parametrize("objective", [SftObjective(), DpoObjective()], ids=["sft", "dpo"])
def test_every_trained_tensor_of_a_policy_has_the_gradients_of_its_pairs(objective, resident):
    """Also of tensors that hooks of libraries miss: each pair's gradient is that of an ordinary backward."""
    loss = build_loss(resident, PAIRS[:4], objective)
    check_sum(loss, resident.slot.parameters)


def test_every_trained_tensor_of_a_selector_has_the_gradients_of_both_orders(tiny_selector, random_adapter):
    tiny_selector.slot.load(random_adapter(1))
    loss = SelectorLoss(tiny_selector, PAIRS[:4])
    assert loss.rows_of(2).tolist() == [2, 6]
    check_sum(ProximalLoss(loss, tiny_selector.slot.parameters, 0.1), tiny_selector.slot.parameters)


def check_sum(loss, parameters):
    """Of three pairs, of which the bound clips two at least."""
    pairs = (0, 2, 3)
    own = [gradients_of(loss(loss.rows_of(pair)).values.mean(), parameters) for pair in pairs]
    norms = [math.sqrt(sum(float(gradient.double().square().sum()) for gradient in one)) for one in own]
    bound = sorted(norms)[1] * 0.9
    PairAccumulator(loss, parameters, protection(clip=bound)).add([np.array(pairs)], "")
    for number, parameter in enumerate(parameters):
        expected = sum(min(1.0, bound / norm) * one[number] for norm, one in zip(norms, own, strict=True))
        assert expected.any()
        torch.testing.assert_close(parameter.grad * 2, expected, rtol=1e-4, atol=1e-7)
        parameter.grad = None
