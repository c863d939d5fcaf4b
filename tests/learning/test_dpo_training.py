"""DPO training of a policy: implicit rewards, and parity with TRL."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from components.learning.dpo import implicit_margins, pair_logprobs, train_dpo
from components.learning.local import LocalTraining

from components.config import OptimizerConfig
from components.learning.objectives import dpo_loss
from components.models.adapters import AdapterSlot
from components.models.policy import Policy
from tests.support.adapters import random_tensors
from tests.support.pairs import PAIRS
from tests.support.trl_oracle import build_trainer, completion_positions_only

TRAINING = LocalTraining(steps=12, batch_size=4, optimizer=OptimizerConfig(lr=1e-2), seed=1)


@pytest.fixture(scope="module")
def reference(resident_policy):
    return pair_logprobs(resident_policy, PAIRS, 4, reference=True)


def test_implicit_margins_are_differences_of_log_ratios():
    assert implicit_margins(np.array([[-1.0, -3.0]]), np.array([[-2.0, -2.5]])).tolist() == [1.5]


def compute_with_trl(config, dpo, adapter, rows, folder):
    """The loss of a batch of all rows by TRL's trainer, and the slot with its gradients."""
    with completion_positions_only():
        trainer = build_trainer(Policy(config, "cpu"), rows, dpo, folder, 0)
        slot = AdapterSlot(trainer.model)
        slot.load(adapter)
        loss = trainer.compute_loss(trainer.model.eval(), next(iter(trainer.get_train_dataloader())))
        loss.backward()
    return loss.item(), slot


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_trl_on_the_same_batch(debug, resident_policy, reference, tmp_path):
    resident = resident_policy
    adapter = random_tensors(resident.slot, seed=1, scale=0.2)
    encoded = [resident.encode_pair(pair) for pair in PAIRS]
    rows = [
        {
            "prompt": pair["prompt"],
            "chosen_ids": chosen,
            "rejected_ids": rejected,
        }
        for pair, (_, chosen, rejected) in zip(PAIRS, encoded, strict=True)
    ]
    batches = {"batch_size": 6, "micro_batch_size": 6}
    dpo = debug.alignment.dpo.model_copy(update=batches | {"beta": 0.3})
    trl_loss, trl_slot = compute_with_trl(resident.policy.config, dpo, adapter, rows, tmp_path)

    resident.slot.load(adapter)
    chosen, rejected = resident.logprobs(encoded).T
    ref = torch.tensor(reference, dtype=torch.float32)
    loss = dpo_loss(chosen, rejected, ref[:, 0], ref[:, 1], 0.3).mean()
    gradients = torch.autograd.grad(loss, resident.slot.parameters)
    assert loss.item() == pytest.approx(trl_loss, abs=1e-5)
    assert abs(loss.item() - math.log(2)) > 1e-3
    for name, gradient, parameter in zip(trl_slot.names, gradients, trl_slot.parameters, strict=True):
        assert torch.allclose(gradient, parameter.grad, atol=1e-5), name


@pytest.mark.slow
def test_training_makes_the_implicit_rewards_prefer_the_chosen_completions(resident_policy, reference):
    resident = resident_policy
    initial = resident.slot.initial_adapter(0)
    trained, metrics = train_dpo(resident, PAIRS, initial, reference, 0.5, TRAINING)
    resident.slot.load(trained)
    assert (implicit_margins(pair_logprobs(resident, PAIRS, 4), reference) > 0).all()
    assert metrics.losses[0] == pytest.approx(math.log(2), abs=1e-4), "training starts at the reference"


def test_the_initial_adapter_is_not_changed(resident_policy, reference):
    initial = resident_policy.slot.initial_adapter(0)
    copy = {name: tensor.clone() for name, tensor in initial.items()}
    train_dpo(resident_policy, PAIRS, initial, reference, 0.5, replace(TRAINING, steps=2))
    for name, tensor in copy.items():
        assert torch.equal(initial[name], tensor)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes(resident_policy, reference):
    initial = resident_policy.slot.initial_adapter(0)
    training = replace(TRAINING, steps=4)
    first, _ = train_dpo(resident_policy, PAIRS, initial, reference, 0.5, training)
    second, _ = train_dpo(resident_policy, PAIRS, initial, reference, 0.5, training)
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor)
