"""DPO has the loss and the gradients of TRL."""

import math

import pytest
import torch

from components.learning.objectives import dpo_loss
from components.models.adapters import AdapterSlot
from components.models.policy import Policy
from tests.support.pairs import PAIRS
from tests.support.trl_oracle import build_trainer, completion_positions_only


@pytest.fixture(scope="module")
def trl():
    """The library, whose import takes longer than the training."""
    return pytest.importorskip("trl.trainer.dpo_trainer")


def compute_with_trl(config, dpo, adapter, rows, folder):
    """The loss of a batch of all rows by TRL's trainer, and the slot with its gradients."""
    with completion_positions_only():
        trainer = build_trainer(Policy(config, "cpu"), rows, dpo, folder, 0)
        slot = AdapterSlot(trainer.model)
        slot.load(adapter)
        loss = trainer.compute_loss(trainer.model.eval(), next(iter(trainer.get_train_dataloader())))
        loss.backward()
    return loss.item(), slot


def test_loss_and_gradients_are_those_of_trl_on_the_same_batch(debug, resident, adapter, reference, tmp_path):
    encoded = [resident.encode(*pair.texts) for pair in PAIRS]
    rows = [
        {
            "prompt": pair.prompt,
            "chosen_ids": chosen,
            "rejected_ids": rejected,
        }
        for pair, (_, chosen, rejected) in zip(PAIRS, encoded, strict=True)
    ]
    batches = {"batch_size": 6, "micro_batch_size": 6}
    dpo = debug.alignment.dpo.model_copy(update=batches | {"beta": 0.3})
    trl_loss, trl_slot = compute_with_trl(resident.policy.config, dpo, adapter, rows, tmp_path)

    chosen, rejected = resident.logprobs(encoded).T
    ref = torch.tensor(reference, dtype=torch.float32)
    loss = dpo_loss(chosen, rejected, ref[:, 0], ref[:, 1], 0.3).mean()
    gradients = torch.autograd.grad(loss, resident.slot.parameters)
    assert loss.item() == pytest.approx(trl_loss, abs=1e-5)
    assert abs(loss.item() - math.log(2)) > 1e-3
    for name, gradient, parameter in zip(trl_slot.names, gradients, trl_slot.parameters, strict=True):
        assert torch.allclose(gradient, parameter.grad, atol=1e-5), name
