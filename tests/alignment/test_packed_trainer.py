"""The packed trainer has the loss, gradient and steps of TRL's, and of one process in several."""

import json
import math
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from components.alignment import packed_trainer
from components.alignment.packed_trainer import (
    Optimization,
    PairLoss,
    Step,
    plan_steps,
    prepare_model,
    train_packed,
)
from components.models.adapters import AdapterSlot
from components.models.policy import Policy
from tests.support.data_parallel import PAIRS, train
from tests.support.dpo import load_reference, sequence_logprob, write_reference_adapter
from tests.support.trl_oracle import train_with_trl

ROOT = Path(__file__).resolve().parents[2]
REFERENCES = ["base", "sft", "round_start"]
SAME_METRICS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "grad_norm")


@pytest.fixture(scope="module")
def reference_adapter(debug, tmp_path_factory):
    """An adapter of an earlier training, as a PEFT folder."""
    return write_reference_adapter(debug.policy, tmp_path_factory.mktemp("earlier") / "adapter")


@pytest.fixture
def config_with(debug, reference_adapter):
    """A function that gives DPO's configuration with a reference; a step takes all pairs."""

    def build(reference="base", **values):
        adapter = None if reference == "base" else str(reference_adapter)
        common = {"reference": reference, "reference_adapter": adapter, "epochs": 1}
        sizes = {"batch_size": len(PAIRS), "micro_batch_size": len(PAIRS)}
        return debug.alignment.dpo.model_copy(update=common | sizes | values)

    return build


@pytest.fixture
def policy(debug):
    return Policy(debug.policy, "cpu")


def encoded(policy, pairs=PAIRS):
    return [(policy.encode(pair["prompt"]), pair["chosen_ids"], pair["rejected_ids"]) for pair in pairs]


def open_loss(policy, config, pairs=PAIRS):
    from accelerate import Accelerator

    model = prepare_model(policy, config, seed=0)
    return PairLoss(policy, model, encoded(policy, pairs), config, Accelerator(cpu=True)), model


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
def test_loss_and_gradient_of_a_step_are_those_of_equation_2_computed_from_full_logits(
    debug, policy, config_with, reference
):
    config = config_with(reference, beta=0.3)
    loss, model = open_loss(policy, config)
    numbers = torch.Generator().manual_seed(1)
    # Half of the gradient is zero at the initial values, so the comparison is made elsewhere.
    with torch.no_grad():
        for parameter in loss.parameters:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=numbers))
    figures = loss.accumulate(Step(1, 1, 1.0, True, [[0, 1, 2], [3, 4], [5, 6]]))

    frozen = load_reference(debug.policy, reference, config.reference_adapter)
    losses = []
    for prompt, chosen, rejected in encoded(policy):
        margins = [
            sequence_logprob(each, prompt, chosen) - sequence_logprob(each, prompt, rejected)
            for each in (model, frozen)
        ]
        losses.append(-torch.nn.functional.logsigmoid(0.3 * (margins[0] - margins[1].detach())))
    expected = torch.stack(losses).mean()
    gradient = torch.autograd.grad(expected, loss.parameters)
    assert figures["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert abs(expected.item() - math.log(2)) > 1e-3
    for parameter, target in zip(loss.parameters, gradient, strict=True):
        assert torch.allclose(parameter.grad, target, atol=1e-5)
    assert max(float(tensor.abs().max()) for tensor in gradient) > 1e-3


@pytest.mark.parametrize("reference", REFERENCES)
def test_training_starts_at_the_reference(policy, config_with, reference):
    loss, _ = open_loss(policy, config_with(reference))
    figures = loss.accumulate(Step(1, 1, 1.0, True, [[0, 1, 2, 3, 4, 5, 6]]))
    assert figures["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert figures["rewards/margins"] == pytest.approx(0, abs=1e-6)


# --- The steps


def test_each_epoch_takes_every_pair_once_in_an_order_of_its_own(policy, config_with):
    config = config_with(batch_size=4, micro_batch_size=2, epochs=3)
    steps = list(plan_steps(encoded(policy), config, seed=0))
    assert [step.number for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step.ends_epoch for step in steps] == [False, True] * 3
    assert [step.epochs_done for step in steps] == pytest.approx([4 / 7, 1, 11 / 7, 2, 18 / 7, 3])
    assert [[len(rows) for rows in step.micro_batches] for step in steps] == [[2, 2], [2, 1]] * 3
    epochs = [
        [n for step in steps if step.epoch == k for rows in step.micro_batches for n in rows]
        for k in (1, 2, 3)
    ]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({frozenset(epoch[:4]) for epoch in epochs}) > 1
    assert list(plan_steps(encoded(policy), config, seed=0)) == steps
    assert list(plan_steps(encoded(policy), config, seed=1)) != steps


def test_pairs_of_similar_length_share_a_micro_batch(policy, config_with):
    rows = encoded(policy)
    (step,) = plan_steps(rows, config_with(micro_batch_size=3), seed=0)
    widths = [sum(map(len, rows[n])) for micro_batch in step.micro_batches for n in micro_batch]
    assert widths == sorted(widths)


@pytest.mark.slow
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
    trained = [
        trainer(Policy(debug.policy, "cpu"), PAIRS, config, tmp_path / trainer.__name__, 0)
        for trainer in (train_packed, train_with_trl)
    ]
    histories = [result.history for result in trained]
    assert len(histories[0]) == len(histories[1]) == 4
    for packed, trl in zip(*histories, strict=True):
        for name in SAME_METRICS:
            assert packed[name] == pytest.approx(float(trl[name]), rel=5e-3, abs=1e-4)
    assert histories[0][-1]["loss"] < histories[0][0]["loss"]
    adapters = [AdapterSlot(result.model).read() for result in trained]
    for name, tensor in adapters[0].items():
        assert torch.allclose(tensor, adapters[1][name], atol=2e-4)


@pytest.mark.slow
def test_the_loss_of_a_step_is_the_mean_over_its_pairs(debug, policy, config_with, tmp_path):
    """Seven pairs in micro-batches of three: the last micro-batch has one pair."""
    whole, parts = (
        train_packed(
            Policy(debug.policy, "cpu"),
            PAIRS,
            config_with(micro_batch_size=size, lr=1e-2, epochs=3),
            tmp_path,
            0,
        ).history
        for size in (7, 3)
    )
    for one, other in zip(whole, parts, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_a_training_with_dropout_is_a_function_of_the_seed(debug, config_with, tmp_path):
    lora = debug.policy.lora.model_copy(update={"dropout": 0.3})
    settings = debug.policy.model_copy(update={"lora": lora})
    histories = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(histories))
        config = config_with(batch_size=4, micro_batch_size=2, lr=1e-2)
        histories.append(train_packed(Policy(settings, "cpu"), PAIRS, config, tmp_path, seed).history)
    assert histories[0] == histories[1]
    assert histories[0] != histories[2]


@pytest.mark.parametrize("optimizer", ["rmsprop", "adamw_torch", "sgd"])
def test_the_optimizer_has_no_weight_decay_as_trls(policy, config_with, tmp_path, optimizer):
    """PyTorch's AdamW has one by default."""
    config = config_with(optimizer=optimizer)
    loss, _ = open_loss(policy, config)
    optimization = Optimization(loss, packed_trainer._training_arguments(policy, config, tmp_path), 1)
    assert [group["weight_decay"] for group in optimization._optimizer.param_groups] == [0.0]


def test_the_gradient_is_not_divided_by_a_setting_of_the_launch(policy, config_with, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert packed_trainer._build_accelerator(policy).gradient_accumulation_steps == 1


def test_an_adapter_that_is_trained_further_leaves_a_frozen_copy(policy, config_with, tmp_path):
    before = prepare_model(Policy(policy.config, "cpu"), config_with("round_start"), 0)
    initial = AdapterSlot(before).read()
    model = train_packed(policy, PAIRS, config_with("round_start", lr=1e-2), tmp_path, 0).model
    assert "ref" in model.peft_config
    copied = AdapterSlot(model, "ref").read()
    trained = AdapterSlot(model).read()
    assert all(torch.equal(copied[name], initial[name]) for name in initial)
    assert any(not torch.equal(trained[name], initial[name]) for name in initial)


# --- Two micro-batches at a time


def test_two_micro_batches_at_a_time_have_the_gradient_of_one_at_a_time(policy, config_with, two_threads):
    loss, _ = open_loss(policy, config_with("sft"))
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in loss.parameters:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=numbers))
    step = Step(1, 1, 1.0, True, [[0, 1, 2], [3, 4], [5, 6]])
    computed, compute = [], loss._losses

    def record(indices):
        computed.append((threading.get_ident(), torch.get_num_threads(), indices))
        return compute(indices)

    loss._losses = record
    figures = loss.accumulate(step)
    assert {share for _, share, _ in computed[:2]} == {1}
    assert len({thread for thread, _, _ in computed[:2]} | {threading.get_ident()}) == 3
    assert sorted(indices for _, _, indices in computed) == step.micro_batches
    gradients = [parameter.grad for parameter in loss.parameters]

    torch.set_num_threads(1)
    for parameter in loss.parameters:
        parameter.grad = None
    assert loss.accumulate(step) == pytest.approx(figures, rel=1e-4, abs=1e-6)
    assert {thread for thread, _, _ in computed[3:]} == {threading.get_ident()}
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    for gradient, parameter in zip(gradients, loss.parameters, strict=True):
        assert float((gradient - parameter.grad).abs().max()) < 1e-5 * largest
    assert largest > 1e-3


# --- Several processes


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(tmp_path):
    """One process has no batch of the reference, and none of each epoch's second step."""
    alone = train(tmp_path / "alone")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.data_parallel", str(tmp_path)],
            cwd=ROOT,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    shared = json.loads((tmp_path / "history.json").read_text())
    assert len(shared) == len(alone) == 4
    for one, two in zip(alone, shared, strict=True):
        for name in SAME_METRICS:
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-4)
    assert alone[-1]["loss"] < alone[0]["loss"]
