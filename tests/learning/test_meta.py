"""First-order meta-training: a meta-step by hand, the adaptation, and what a budget of gradients is enough for."""

import numpy as np
import pytest
import torch

from components.config import OptimizerConfig
from components.learning.meta import adapt, meta_batches, train_meta
from components.learning.objectives import dpo_loss
from components.learning.policy import ResidentPolicy, dpo_rows, pair_logprobs
from tests.learning.test_pdpo import PAIRS


@pytest.fixture(scope="module")
def resident(debug):
    torch.set_num_threads(1)
    lora = debug.policy.lora.model_copy(update={"dropout": 0.0})
    return ResidentPolicy(debug.policy.model_copy(update={"max_new_tokens": 20, "lora": lora}), "cpu")


@pytest.fixture(scope="module")
def reference(resident):
    return pair_logprobs(resident, PAIRS, 4, reference=True)


@pytest.fixture
def adapter(resident):
    numbers = torch.Generator().manual_seed(1)
    return {n: 0.2 * torch.randn(p.shape, generator=numbers) for n, p in zip(resident.slot.names, resident.slot.parameters, strict=True)}


def gradients(resident, reference, indices):
    resident.model.eval()
    logprobs = resident.logprobs([resident.encode_pair(PAIRS[i]) for i in indices])
    known = torch.from_numpy(reference[indices]).float()
    return torch.autograd.grad(dpo_loss(logprobs[:, 0], logprobs[:, 1], known[:, 0], known[:, 1], 0.1).mean(), resident.slot.parameters)


def test_a_budget_of_minibatches_becomes_meta_steps_of_inner_ones_and_an_outer_one():
    assert [len(step) for step in meta_batches(10, 2, 12, 5, 0)] == [6, 6] and len(meta_batches(10, 2, 17, 5, 0)) == 2
    assert [len(step) for step in meta_batches(10, 2, 3, 5, 0)] == [6], "at least one"
    drawn = np.concatenate([indices for step in meta_batches(10, 2, 12, 5, 0) for indices in step])
    assert sorted(drawn[:10]) == list(range(10)), "no row is drawn again before all were"


def test_a_meta_step_is_the_gradient_after_the_inner_steps_taken_from_before_them(resident, reference, adapter):
    batches = [[np.array([0, 1]), np.array([2, 3]), np.array([4, 5])]]
    resident.slot.load(adapter)
    for indices in batches[0][:2]:
        found = gradients(resident, reference, indices)
        with torch.no_grad():
            for parameter, gradient in zip(resident.slot.parameters, found, strict=True):
                parameter -= 0.5 * gradient
    inner = resident.slot.read()
    outer = gradients(resident, reference, batches[0][2])
    expected = {name: adapter[name] - 0.1 * gradient for name, gradient in zip(resident.slot.names, outer, strict=True)}
    resident.slot.load(adapter)
    trained, curve = train_meta(resident, dpo_rows(resident, PAIRS, reference, 0.1), batches, 0.5, OptimizerConfig(name="sgd", lr=0.1, clip=None), 3)
    assert all(torch.allclose(trained[name], expected[name], atol=1e-6) for name in expected)
    assert any(not torch.allclose(inner[name], adapter[name], atol=1e-3) for name in inner) and len(curve.losses) == 1
    assert curve.tokens == sum(2 * len(p) + len(c) + len(r) for p, c, r in map(resident.encode_pair, PAIRS)), "of all steps"


def test_the_adaptation_is_plain_gradient_descent_and_leaves_the_pairs_better(resident, reference, adapter):
    resident.slot.load(adapter)
    before = gradients(resident, reference, np.arange(6))
    adapt(resident, dpo_rows(resident, PAIRS, reference, 0.1), [np.arange(6)], 0.5, 0)
    once = resident.slot.read()
    assert all(torch.allclose(once[name], adapter[name] - 0.5 * gradient, atol=1e-6) for name, gradient in zip(resident.slot.names, before, strict=True))
    resident.slot.load(adapter)
    curve = adapt(resident, dpo_rows(resident, PAIRS, reference, 0.1), [np.arange(6)] * 8, 0.5, 0)
    assert curve.losses[-1] < curve.losses[0]
