"""The terms of PPO on hand-computed numbers."""

import math

import pytest
import torch

from components.learning.ppo import approximate_kl, compute_gae, masked_mean, policy_loss, value_loss, whiten

MASK = torch.tensor([[True, True, True], [True, False, False]])


def test_advantages_and_returns_follow_the_recursion_and_end_with_the_completion():
    rewards = torch.tensor([[1.0, 0.0, 2.0], [5.0, 9.0, 9.0]])
    values = torch.tensor([[0.5, 1.0, -1.0], [2.0, 7.0, 7.0]])
    advantages, returns = compute_gae(rewards, values, MASK, 0.9, 0.5)
    third = 2.0 - -1.0
    second = (0.0 + 0.9 * -1.0 - 1.0) + 0.45 * third
    first = (1.0 + 0.9 * 1.0 - 0.5) + 0.45 * second
    assert advantages[0].tolist() == pytest.approx([first, second, third])
    assert advantages[1].tolist() == pytest.approx([3.0, 0.0, 0.0])
    assert returns[0].tolist() == pytest.approx([first + 0.5, second + 1.0, third - 1.0])
    assert returns[1].tolist() == pytest.approx([5.0, 0.0, 0.0])


def test_the_policy_loss_is_clipped_where_the_ratio_would_improve_it_further():
    old = torch.zeros(1, 4)
    new = torch.tensor([[1.5, 1.5, 0.5, 0.5]]).log().requires_grad_()
    losses = policy_loss(new, old, torch.tensor([[2.0, -2.0, 2.0, -2.0]]), 0.2)
    assert losses[0].tolist() == pytest.approx([-1.2 * 2, 1.5 * 2, -0.5 * 2, 0.8 * 2])
    losses.sum().backward()
    assert new.grad[0].tolist() == pytest.approx([0.0, 3.0, -1.0, 0.0])


def test_the_value_loss_is_the_larger_error_of_the_value_and_the_clipped_value():
    new = torch.tensor([[1.0, 0.1]])
    losses = value_loss(new, torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]]), 0.2)
    assert losses[0].tolist() == pytest.approx([0.5 * (0.2 - 1) ** 2, 0.5 * 0.9**2])


VALUES = torch.tensor([[1.0, 2.0, 3.0], [6.0, 100.0, 100.0]])
"""Values with large ones at the padding of MASK."""


def test_means_are_over_tokens_and_not_over_padding():
    assert float(masked_mean(VALUES, MASK)) == 3.0
    assert masked_mean(VALUES, MASK, per_row=True).tolist() == [2.0, 6.0]


def test_whitening_is_over_tokens_and_not_over_padding():
    deviation = math.sqrt((4 + 1 + 0 + 9) / 4)
    whitened = whiten(VALUES, MASK)
    assert whitened[0].tolist() == pytest.approx([-2 / deviation, -1 / deviation, 0.0])
    assert whitened[1].tolist() == pytest.approx([3 / deviation, 0.0, 0.0])


def test_whitening_maps_equal_values_to_0():
    assert whiten(torch.full((2, 3), 4.0), MASK).tolist() == [[0.0] * 3] * 2


def test_the_estimated_kl_is_the_mean_of_ratio_minus_1_minus_log_ratio():
    new = torch.log(torch.tensor([[0.5, 0.25, 1.0]]))
    old = torch.log(torch.tensor([[0.25, 0.5, 1.0]]))
    mask = torch.ones(1, 3, dtype=torch.bool)
    expected = ((2 - 1 - math.log(2)) + (0.5 - 1 - math.log(0.5))) / 3
    assert approximate_kl(new, old, mask) == pytest.approx(expected)
