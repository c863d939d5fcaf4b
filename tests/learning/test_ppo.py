"""The parts of PPO on numbers worked out by hand."""

import math

import pytest
import torch

from components.learning.ppo import approximate_kl, gae, masked_mean, policy_loss, value_loss, whiten

MASK = torch.tensor([[True, True, True], [True, False, False]])


def test_advantages_and_returns_are_those_of_the_recursion_and_end_with_the_completion():
    rewards, values = torch.tensor([[1.0, 0.0, 2.0], [5.0, 9.0, 9.0]]), torch.tensor([[0.5, 1.0, -1.0], [2.0, 7.0, 7.0]])
    advantages, returns = gae(rewards, values, MASK, 0.9, 0.5)
    third = 2.0 - -1.0
    second = (0.0 + 0.9 * -1.0 - 1.0) + 0.45 * third
    first = (1.0 + 0.9 * 1.0 - 0.5) + 0.45 * second
    assert advantages.tolist() == [pytest.approx([first, second, third]), pytest.approx([3.0, 0.0, 0.0])]
    assert returns.tolist() == [pytest.approx([first + 0.5, second + 1.0, third - 1.0]), pytest.approx([5.0, 0.0, 0.0])]


def test_with_lambda_1_the_return_is_the_discounted_sum_of_rewards_and_with_0_one_step():
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.3, -0.2, 0.7]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert gae(rewards, values, mask, 0.5, 1.0)[1].tolist() == [pytest.approx([1 + 0.5 * 2 + 0.25 * 4, 2 + 0.5 * 4, 4])]
    assert gae(rewards, values, mask, 0.5, 0.0)[1].tolist() == [pytest.approx([1 + 0.5 * -0.2, 2 + 0.5 * 0.7, 4])]


def test_the_policy_loss_is_clipped_on_the_side_that_would_gain():
    old = torch.zeros(1, 4)
    new = torch.tensor([[1.5, 1.5, 0.5, 0.5]]).log().requires_grad_()
    losses = policy_loss(new, old, torch.tensor([[2.0, -2.0, 2.0, -2.0]]), 0.2)
    assert losses.tolist() == [pytest.approx([-1.2 * 2, 1.5 * 2, -0.5 * 2, 0.8 * 2])]
    losses.sum().backward()
    assert new.grad.tolist() == [pytest.approx([0.0, 3.0, -1.0, 0.0])]


def test_at_the_old_policy_the_gradient_is_that_of_the_plain_policy_gradient():
    new = torch.randn(2, 3, requires_grad=True)
    advantages = torch.randn(2, 3)
    policy_loss(new, new.detach().clone(), advantages, 0.2).sum().backward()
    assert torch.allclose(new.grad, -advantages)


def test_the_value_loss_takes_the_larger_of_the_two_errors():
    losses = value_loss(torch.tensor([[1.0, 0.1]]), torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]]), 0.2)
    assert losses.tolist() == [pytest.approx([0.5 * (0.2 - 1) ** 2, 0.5 * 0.9**2])]


def test_means_and_whitening_see_the_tokens_that_are_there_alone():
    values = torch.tensor([[1.0, 2.0, 3.0], [6.0, 100.0, 100.0]])
    assert float(masked_mean(values, MASK)) == 3.0 and masked_mean(values, MASK, rows=True).tolist() == [2.0, 6.0]
    white = whiten(values, MASK)
    deviation = math.sqrt((4 + 1 + 0 + 9) / 4)
    assert white.tolist() == [pytest.approx([-2 / deviation, -1 / deviation, 0.0]), pytest.approx([3 / deviation, 0.0, 0.0])]
    assert whiten(torch.full((2, 3), 4.0), MASK).tolist() == [[0.0] * 3] * 2


def test_the_estimated_kl_is_never_negative_and_0_where_nothing_changed():
    new, old = torch.log(torch.tensor([[0.5, 0.25, 1.0]])), torch.log(torch.tensor([[0.25, 0.5, 1.0]]))
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert approximate_kl(new, old, mask) == pytest.approx(((2 - 1 - math.log(2)) + (0.5 - 1 - math.log(0.5))) / 3)
    assert approximate_kl(new, new, mask) == 0.0
