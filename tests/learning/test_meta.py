"""First-order meta-training: a hand-computed meta-step, the adaptation, the budget of gradients."""

import numpy as np
import pytest
import torch

from components.config import DpoObjective, OptimizerConfig
from components.config.local_objectives import OfflinePpoObjective
from components.learning.loop import Loss, RowLosses, Training, TrainingError, train
from components.learning.meta_learning import MetaLoss, adapt, group_meta_batches
from components.learning.objectives import dpo_loss
from components.learning.preference import count_tokens
from tests.support.pairs import PAIRS
from tests.support.training import build_loss


def compute_gradients(resident, reference, indices):
    """Gradients of the mean DPO loss of some pairs, by autograd."""
    resident.model.eval()
    logprobs = resident.logprobs([resident.encode(*PAIRS[i].texts) for i in indices])
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
    resident, reference, adapter
):
    inner = [np.array([0, 1]), np.array([2, 3])]
    outer = np.array([4, 5])
    for indices in inner:
        gradients = compute_gradients(resident, reference, indices)
        with torch.no_grad():
            for parameter, gradient in zip(resident.slot.parameters, gradients, strict=True):
                parameter -= 0.5 * gradient
    adapted = resident.slot.read()
    outer_gradients = compute_gradients(resident, reference, outer)
    resident.slot.load(adapter)
    parameters = resident.slot.parameters
    loss = MetaLoss(build_loss(resident, PAIRS, DpoObjective()), [[*inner, outer]], parameters, lr=0.5)
    sgd = OptimizerConfig(name="sgd", lr=0.1, clip=None)
    figures = train(resident.model, parameters, loss.outer_minibatches, loss, Training(1, 2, sgd, seed=3))
    metrics, trained = loss.metrics(figures), resident.slot.read()
    for name, gradient in zip(resident.slot.names, outer_gradients, strict=True):
        assert torch.allclose(trained[name], adapter[name] - 0.1 * gradient, atol=1e-6)
    assert any(not torch.allclose(adapted[name], adapter[name], atol=1e-3) for name in adapted)
    assert metrics["steps"] == 3
    assert metrics["loss"] == metrics["dpo"] == pytest.approx(figures.losses[0])
    assert metrics["tokens"] == count_tokens([resident.encode(*pair.texts) for pair in PAIRS])


def test_a_step_of_the_adaptation_is_plain_gradient_descent(resident, reference, adapter):
    gradients = compute_gradients(resident, reference, np.arange(6))
    loss = build_loss(resident, PAIRS, DpoObjective())
    adapt(resident.model, resident.slot.parameters, [np.arange(6)], loss, lr=0.5, seed=0)
    adapted = resident.slot.read()
    for name, gradient in zip(resident.slot.names, gradients, strict=True):
        assert torch.allclose(adapted[name], adapter[name] - 0.5 * gradient, atol=1e-6)


def test_the_adaptation_by_ppo_takes_all_its_steps_whatever_the_target_kl_is(resident):
    objective = OfflinePpoObjective(target_kl=1e-9)
    loss = build_loss(resident, PAIRS, objective, scores=np.array([[1.0, 0.0]] * 6))
    adapt(resident.model, resident.slot.parameters, [np.arange(6)] * 3, loss, lr=0.5, seed=0)
    assert len(loss.distances) == 3
    assert loss.distances[1] > objective.target_kl


class NotFinite(Loss):
    """A loss that is NaN."""

    def __call__(self, rows):
        return RowLosses(torch.full((len(rows),), torch.nan, requires_grad=True), 0)


def test_an_inner_step_whose_loss_is_not_finite_is_refused(resident, adapter):
    parameters = resident.slot.parameters
    with pytest.raises(TrainingError, match=r"loss is nan in an inner step: lower federation"):
        adapt(resident.model, parameters, [np.arange(2)], NotFinite(), lr=0.5, seed=0)
    assert not resident.model.training
    read = resident.slot.read()
    assert all(torch.equal(read[name], tensor) for name, tensor in adapter.items())
