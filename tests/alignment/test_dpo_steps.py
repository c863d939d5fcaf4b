"""The steps of the server's DPO: the loss of equation 2, the plan of the epochs, and the steps of TRL."""

import math

import numpy as np
import pytest
import torch

from components.alignment.dpo import (
    TokenDpoLoss,
    align_policy,
    build_optimizer,
    plan_steps,
    prepare_model,
)
from components.models.adapters import AdapterSlot
from components.models.policy import Policy
from tests.support.dpo import PAIRS, REFERENCES, load_reference, sequence_logprob
from tests.support.trl_oracle import train_with_trl

ALL = np.arange(len(PAIRS))
SAME_METRICS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "grad_norm")


@pytest.fixture
def policy(debug):
    return Policy(debug.policy, "cpu")


def encoded(policy):
    return [(policy.encode(pair["prompt"]), pair["chosen_ids"], pair["rejected_ids"]) for pair in PAIRS]


def open_loss(policy, config):
    """The loss of all pairs, and the model that is trained."""
    model = prepare_model(policy, config, seed=0)
    return TokenDpoLoss(policy, model, encoded(policy), config), model


def align(policy_config, config, folder, seed=0):
    """Align a policy; the history, and the trained model."""
    policy = Policy(policy_config, "cpu")
    result = align_policy(policy, config, PAIRS, folder, [], seed)
    return result.history, policy.model


# --- The loss


@pytest.mark.parametrize("reference", REFERENCES)
def test_the_reference_is_the_model_that_the_recipe_names(debug, policy, config_with, reference):
    config = config_with(reference, micro_batch_size=1)
    loss, _ = open_loss(policy, config)
    model = load_reference(debug.policy, reference, config.reference_adapter)
    with torch.no_grad():
        for row, values in zip(encoded(policy), loss.reference, strict=True):
            prompt, *completions = row
            expected = torch.stack([sequence_logprob(model, prompt, ids) for ids in completions])
            assert torch.allclose(values, expected, atol=1e-4)


@pytest.mark.parametrize("reference", REFERENCES)
def test_loss_and_gradient_are_those_of_equation_2_computed_from_full_logits(
    debug, policy, config_with, reference
):
    config = config_with(reference, beta=0.3)
    loss, model = open_loss(policy, config)
    parameters = AdapterSlot(model).parameters
    numbers = torch.Generator().manual_seed(1)
    # Half of the gradient is zero at the initial values, so the comparison is made elsewhere.
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=numbers))
    values = loss(ALL).values
    gradients = torch.autograd.grad(values.mean(), parameters)

    frozen = load_reference(debug.policy, reference, config.reference_adapter)
    losses = []
    for prompt, chosen, rejected in encoded(policy):
        margins = [
            sequence_logprob(each, prompt, chosen) - sequence_logprob(each, prompt, rejected)
            for each in (model, frozen)
        ]
        losses.append(-torch.nn.functional.logsigmoid(0.3 * (margins[0] - margins[1].detach())))
    expected = torch.stack(losses)
    targets = torch.autograd.grad(expected.mean(), parameters)
    assert torch.allclose(values, expected, atol=1e-5)
    assert abs(expected.mean().item() - math.log(2)) > 1e-3
    for gradient, target in zip(gradients, targets, strict=True):
        assert torch.allclose(gradient, target, atol=1e-5)
    assert max(float(tensor.abs().max()) for tensor in targets) > 1e-3


# --- The steps


def test_each_epoch_takes_every_pair_once_in_an_order_of_its_own(policy, config_with):
    config = config_with(batch_size=4, micro_batch_size=2, epochs=3, checkpoint_every=4)
    steps = list(plan_steps(encoded(policy), config, seed=0))
    assert [step.epochs_done for step in steps] == pytest.approx([4 / 7, 1, 11 / 7, 2, 18 / 7, 3])
    assert [len(step.rows) for step in steps] == [4, 3] * 3
    names = [(), ("epoch-1",), (), ("step-4", "epoch-2"), (), ("epoch-3",)]
    assert [step.checkpoints for step in steps] == names
    epochs = [np.concatenate([steps[k].rows, steps[k + 1].rows]).tolist() for k in (0, 2, 4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({frozenset(epoch[:4]) for epoch in epochs}) > 1
    orders = [[step.rows.tolist() for step in plan_steps(encoded(policy), config, seed)] for seed in (0, 1)]
    assert orders[0] == [step.rows.tolist() for step in steps]
    assert orders[1] != orders[0]


def test_pairs_of_similar_length_share_a_micro_batch(policy, config_with):
    rows = encoded(policy)
    (step,) = plan_steps(rows, config_with(micro_batch_size=3), seed=0)
    widths = [sum(map(len, rows[n])) for n in step.rows]
    assert widths == sorted(widths)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "rmsprop", "lr": 1e-3},
        {"optimizer": "adamw_torch", "lr": 1e-2, "lr_scheduler": "linear"},
        {"optimizer": "sgd", "lr": 1.0, "max_grad_norm": 1e-3},
        {"optimizer": "sgd", "lr": 0.05, "reference": "round_start"},
        {"optimizer": "sgd", "lr": 0.05, "reference": "sft"},
    ],
    ids=str,
)
def test_the_steps_are_those_of_trl(debug, config_with, tmp_path, settings):
    """A step takes all pairs, so that their order does not matter."""
    settings = {"reference": "base", **settings}
    config = config_with(settings.pop("reference"), epochs=4, **settings)
    history, model = align(debug.policy, config, tmp_path / "own")
    trl_model, trl_history = train_with_trl(Policy(debug.policy, "cpu"), PAIRS, config, tmp_path / "trl", 0)
    assert len(history) == len(trl_history) == 4
    for own, trl in zip(history, trl_history, strict=True):
        for name in SAME_METRICS:
            assert own[name] == pytest.approx(float(trl[name]), rel=5e-3, abs=1e-4)
        assert own["learning_rate"] == pytest.approx(float(trl["learning_rate"]))
    assert history[-1]["loss"] < history[0]["loss"]
    expected = AdapterSlot(trl_model).read()
    for name, tensor in AdapterSlot(model).read().items():
        assert torch.allclose(tensor, expected[name], atol=2e-4)


def test_a_training_with_dropout_is_a_function_of_the_seed(debug, config_with, tmp_path):
    lora = debug.policy.lora.model_copy(update={"dropout": 0.3})
    settings = debug.policy.model_copy(update={"lora": lora})
    histories = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(histories))
        config = config_with(batch_size=4, micro_batch_size=2, lr=1e-2)
        histories.append(align(settings, config, tmp_path, seed)[0])
    assert histories[0] == histories[1]
    assert histories[0] != histories[2]


@pytest.mark.parametrize("optimizer", ["rmsprop", "adamw_torch", "sgd"])
def test_the_optimizer_has_no_weight_decay_as_trls(config_with, optimizer):
    """PyTorch's AdamW has one by default."""
    built = build_optimizer([torch.nn.Parameter(torch.zeros(1))], config_with(optimizer=optimizer))
    assert [group["weight_decay"] for group in built.param_groups] == [0.0]


@pytest.mark.parametrize("size", [3, 4])
def test_micro_batches_in_two_threads_take_the_steps_of_whole_batches_in_one(
    debug, config_with, tmp_path, two_threads, size
):
    """The last micro-batch of three has one pair; a thread takes half of a micro-batch."""
    config = config_with(epochs=3, optimizer="sgd", lr=0.1)
    divided = config.model_copy(update={"micro_batch_size": size})
    parts, _ = align(debug.policy, divided, tmp_path / "two")
    torch.set_num_threads(1)
    whole, _ = align(debug.policy, config, tmp_path / "one")
    for one, other in zip(whole, parts, strict=True):
        assert {name: other[name] for name in SAME_METRICS} == pytest.approx(
            {name: one[name] for name in SAME_METRICS}, rel=1e-3, abs=1e-5
        )
    assert whole[-1]["loss"] < whole[0]["loss"]
