"""First-order meta-training: a hand-computed meta-step, the adaptation, the budget of gradients."""

import numpy as np
import pytest
import torch
from components.learning.dpo import build_dpo_loss, count_pair_tokens, pair_logprobs
from components.learning.local import LoopOptions

from components.config import OptimizerConfig
from components.learning.meta import MetaRates, adapt, group_meta_batches, train_meta
from components.learning.objectives import dpo_loss
from tests.support.adapters import random_tensors
from tests.support.pairs import PAIRS


@pytest.fixture(scope="module")
def reference(resident_policy):
    return pair_logprobs(resident_policy, PAIRS, 4, reference=True)


@pytest.fixture
def adapter(resident_policy):
    return random_tensors(resident_policy.slot, seed=1, scale=0.2)


def compute_gradients(resident, reference, indices):
    """Gradients of the mean DPO loss of some pairs, by autograd."""
    resident.model.eval()
    logprobs = resident.logprobs([resident.encode_pair(PAIRS[i]) for i in indices])
    ref = torch.from_numpy(reference[indices]).float()
    losses = dpo_loss(logprobs[:, 0], logprobs[:, 1], ref[:, 0], ref[:, 1], 0.1)
    return torch.autograd.grad(losses.mean(), resident.slot.parameters)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(12, [6, 6]), (13, [5, 4, 4]), (6, [6]), (3, [3]), (1, [1])],
)
def test_each_gradient_of_a_round_is_one_of_a_meta_step(budget, expected):
    minibatches = [np.array([n]) for n in range(budget)]
    meta_batches = group_meta_batches(minibatches, inner_steps=5)
    assert [len(step) for step in meta_batches] == expected
    assert np.concatenate([np.concatenate(step) for step in meta_batches]).tolist() == list(range(budget))


def test_a_meta_step_applies_the_gradient_after_the_inner_steps_to_the_values_before_them(
    resident_policy, reference, adapter
):
    resident = resident_policy
    inner = [np.array([0, 1]), np.array([2, 3])]
    outer = np.array([4, 5])
    resident.slot.load(adapter)
    for indices in inner:
        gradients = compute_gradients(resident, reference, indices)
        with torch.no_grad():
            for parameter, gradient in zip(resident.slot.parameters, gradients, strict=True):
                parameter -= 0.5 * gradient
    adapted = resident.slot.read()
    outer_gradients = compute_gradients(resident, reference, outer)
    resident.slot.load(adapter)
    trained, metrics = train_meta(
        resident,
        build_dpo_loss(resident, PAIRS, reference, 0.1),
        [[*inner, outer]],
        MetaRates(inner_lr=0.5, outer=OptimizerConfig(name="sgd", lr=0.1, clip=None)),
        LoopOptions(seed=3),
    )
    for name, gradient in zip(resident.slot.names, outer_gradients, strict=True):
        assert torch.allclose(trained[name], adapter[name] - 0.1 * gradient, atol=1e-6)
    assert any(not torch.allclose(adapted[name], adapter[name], atol=1e-3) for name in adapted)
    assert len(metrics.losses) == 1
    assert metrics.tokens == count_pair_tokens([resident.encode_pair(pair) for pair in PAIRS])


def test_a_step_of_the_adaptation_is_plain_gradient_descent(resident_policy, reference, adapter):
    resident = resident_policy
    resident.slot.load(adapter)
    gradients = compute_gradients(resident, reference, np.arange(6))
    adapt(
        resident,
        build_dpo_loss(resident, PAIRS, reference, 0.1),
        [np.arange(6)],
        lr=0.5,
        options=LoopOptions(seed=0),
    )
    adapted = resident.slot.read()
    for name, gradient in zip(resident.slot.names, gradients, strict=True):
        assert torch.allclose(adapted[name], adapter[name] - 0.5 * gradient, atol=1e-6)


@pytest.mark.slow
def test_the_adaptation_lowers_the_loss_of_the_pairs(resident_policy, reference, adapter):
    resident_policy.slot.load(adapter)
    loss = build_dpo_loss(resident_policy, PAIRS, reference, 0.1)
    metrics = adapt(resident_policy, loss, [np.arange(6)] * 8, lr=0.5, options=LoopOptions(seed=0))
    assert metrics.losses[-1] < metrics.losses[0]
