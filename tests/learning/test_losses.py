"""Losses on hand-computed numbers."""

import math

import pytest
import torch

from components.learning.objectives import dpo_loss, pdpo_loss, selector_loss, sft_loss


def test_the_selector_loss_is_the_cross_entropy_of_each_row():
    losses = selector_loss(torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([0, 0, 1]))
    assert losses.tolist() == pytest.approx([math.log1p(math.exp(-2)), math.log1p(math.e), math.log(2)])


def test_the_selector_loss_is_fp32_for_logits_in_bf16():
    losses = selector_loss(torch.zeros(1, 2, dtype=torch.bfloat16), torch.tensor([0]))
    assert losses.dtype == torch.float32


def test_the_sft_loss_is_the_negative_log_likelihood_per_token():
    assert sft_loss(torch.tensor([-6.0, -1.0]), torch.tensor([3, 4])).tolist() == [2.0, 0.25]


def test_the_dpo_loss_is_minus_the_log_sigmoid_of_beta_times_the_margin():
    losses = dpo_loss(
        policy_chosen=torch.tensor([-1.0, -2.0]),
        policy_rejected=torch.tensor([-3.0, -2.0]),
        ref_chosen=torch.tensor([-2.0, -2.0]),
        ref_rejected=torch.tensor([-2.0, -2.0]),
        beta=0.5,
    )
    assert losses.tolist() == pytest.approx([math.log(1 + math.exp(-1.0)), math.log(2)])


def test_the_pdpo_loss_is_eq_8():
    losses = pdpo_loss(torch.tensor([2.0, -1.0]), torch.tensor([0.5, 4.0]), 3.0, 0.5, 0.1)
    expected = [
        -math.log(1 / (1 + math.exp(-0.1 * (2 + 0.5 * 3 * 0.5)))),
        -math.log(1 / (1 + math.exp(-0.1 * (-1 + 0.5 * 3 * 4)))),
    ]
    assert losses.tolist() == pytest.approx(expected, rel=1e-6)


def test_gradients_of_the_pdpo_loss_reach_both_margins_and_not_the_scale():
    implicit = torch.tensor([0.3, -0.2], requires_grad=True)
    explicit = torch.tensor([0.1, 0.4], requires_grad=True)
    scale = torch.tensor(2.0, requires_grad=True)
    pdpo_loss(implicit, explicit, scale, 1.5, 0.1).sum().backward()
    slope = -0.1 / (1 + torch.exp(0.1 * (implicit + 1.5 * 2 * explicit))).detach()
    assert torch.allclose(implicit.grad, slope)
    assert torch.allclose(explicit.grad, 1.5 * 2 * slope)
    assert scale.grad is None
