"""Supervised training of a policy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from components.learning.dpo import pair_logprobs
from components.learning.local import LocalTraining
from components.learning.sft import train_sft

from components.config import OptimizerConfig
from tests.support.pairs import PAIRS

TRAINING = LocalTraining(steps=12, batch_size=4, optimizer=OptimizerConfig(lr=1e-2), seed=1)


@pytest.mark.slow
def test_supervised_training_makes_the_chosen_completions_more_likely(resident_policy):
    resident = resident_policy
    reference = pair_logprobs(resident, PAIRS, 4, reference=True)
    trained, metrics = train_sft(resident, PAIRS, resident.slot.initial_adapter(0), TRAINING)
    resident.slot.load(trained)
    assert (pair_logprobs(resident, PAIRS, 4)[:, 0] > reference[:, 0]).all()
    assert np.mean(metrics.losses[-3:]) < np.mean(metrics.losses[:3])


def test_the_initial_adapter_is_not_changed(resident_policy):
    initial = resident_policy.slot.initial_adapter(0)
    copy = {name: tensor.clone() for name, tensor in initial.items()}
    train_sft(resident_policy, PAIRS, initial, replace(TRAINING, steps=2))
    for name, tensor in copy.items():
        assert torch.equal(initial[name], tensor)
