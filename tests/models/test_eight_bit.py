"""8-bit weights and moments: errors without bitsandbytes, and their effects with it."""

import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from components.alignment.dpo import align_policy, prepare_model
from components.config import (
    BackboneConfig,
    DpoObjective,
    LoraConfig,
    OptimizerConfig,
    RecipeError,
    UserError,
)
from components.federation.clients.policy_trainer import PolicyTrainer
from components.federation.clients.selector_trainer import SelectorTrainer
from components.learning.loop import Training, build_optimizer
from components.learning.pair_scores import pair_logprobs
from components.models.adapters import AdapterSlot, attach_lora, export_adapter
from components.models.backbone import load_backbone
from components.models.eight_bit import check_support
from components.models.policy import Policy
from components.models.resident import ResidentPolicy
from components.models.selector import Comparison
from components.models.selector_model import Selector
from components.recipes import load_recipe
from tests.support.adapters import random_tensors
from tests.support.pairs import PAIRS
from tests.support.training import train_pairs

QUANTIZED = BackboneConfig(name="tiny-random", quantization="8bit")
POLICY = "policy.backbone.quantization=8bit"
OPTIMIZER = "federation.optimizer.name=adamw_8bit"


# --- without the library


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)


def build_policy_trainer(recipe):
    PolicyTrainer(recipe, "cpu")


@pytest.mark.parametrize(
    ("build", "overrides", "key"),
    [
        (lambda recipe: load_backbone(QUANTIZED, "cpu"), [], "backbone.quantization"),
        (build_policy_trainer, [POLICY, "federation.method=feddpo"], "backbone.quantization"),
        (build_policy_trainer, [OPTIMIZER, "federation.method=fedavg"], "federation.optimizer.name"),
        (lambda recipe: SelectorTrainer(recipe, "cpu"), [OPTIMIZER], "federation.optimizer.name"),
        (
            lambda recipe: build_optimizer([torch.nn.Parameter(torch.ones(1))], recipe.federation.optimizer),
            [OPTIMIZER],
            "optimizer.name",
        ),
    ],
)
def test_without_the_library_8_bits_are_refused_with_the_key_and_the_remedy(missing, build, overrides, key):
    recipe = load_recipe("debug", overrides)
    value, alternative = ("8bit", "none") if "backbone" in key else ("adamw_8bit", "adamw")
    with pytest.raises(UserError) as error:
        build(recipe)
    message = str(error.value)
    assert message.startswith(f"{key} is '{value}', but the library bitsandbytes cannot be imported here")
    assert "pip install -e '.[8bit]' in a checkout" in message
    assert message.endswith(f"or set {key} to '{alternative}'.")


@pytest.mark.parametrize("value", ["8bit", "adamw_8bit"])
def test_a_device_that_the_library_cannot_use_is_named_with_the_reason(monkeypatch, value):
    fail = Mock(side_effect=NameError("name 'str2optimizer8bit' is not defined\nand more"))
    library = Mock(__version__="0.1", nn=Mock(Linear8bitLt=fail), optim=Mock(AdamW8bit=fail))
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)
    words = (
        rf"^x.name is '{value}', which bitsandbytes 0.1 does not support on cpu"
        r" \(name 'str2optimizer8bit' is not defined\).*runtime.devices"
    )
    with pytest.raises(UserError, match=words):
        check_support("x.name", value, "cpu")


def test_other_values_need_no_library(missing):
    check_support("x.name", "none", "cpu")


@pytest.mark.parametrize("reference", ["sft", "round_start"])
def test_a_reference_with_an_adapter_is_refused_for_a_policy_of_8_bits(reference):
    dpo = [f"alignment.dpo.reference={reference}", "alignment.dpo.reference_adapter=somewhere"]
    with pytest.raises(RecipeError, match=f"alignment.dpo.reference '{reference}'.*8-bit.*use 'base'"):
        load_recipe("debug", [POLICY, *dpo])


# --- with the library


@pytest.fixture
def installed():
    return pytest.importorskip("bitsandbytes", reason="bitsandbytes (the extra 8bit) is not installed")


def build_quantized_policy(debug, **lora):
    lora = debug.policy.lora.model_copy(update=lora)
    values = {"backbone": QUANTIZED, "max_new_tokens": 20, "lora": lora}
    return ResidentPolicy(debug.policy.model_copy(update=values), "cpu")


@pytest.fixture
def resident(installed, debug):
    return build_quantized_policy(debug)


@pytest.mark.parametrize("layers", [None, 1])
def test_the_linear_layers_except_the_head_have_8_bits(installed, layers):
    model = load_backbone(BackboneConfig(name="tiny-random", layers=layers, quantization="8bit"), "cpu")
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if "_proj." in name} == {torch.int8}
    assert {dtype for name, dtype in dtypes.items() if "_proj." not in name} == {torch.float32}
    assert model.get_output_embeddings().weight.dtype == torch.float32
    assert len(model.model.layers) == (layers or 2)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("layers", [None, 1])
def test_a_quantized_backbone_answers_almost_as_the_exact_one(installed, layers):
    exact, quantized = (
        load_backbone(BackboneConfig(name="tiny-random", layers=layers, quantization=quantization), "cpu")
        for quantization in ("none", "8bit")
    )
    ids = torch.arange(5, 45)[None]
    with torch.inference_mode():
        expected = exact(ids).logits
        difference = (expected - quantized(ids).logits).abs().max()
    assert 0 < difference < 0.02 * expected.abs().max()


def test_the_check_does_not_change_the_global_generator(installed):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    check_support("x", "8bit", "cpu")
    check_support("x", "adamw_8bit", "cpu")
    assert torch.equal(torch.rand(2), expected)


def test_the_reference_of_a_quantized_policy_is_the_quantized_backbone(resident):
    resident.slot.load(random_tensors(resident.slot, seed=1, scale=0.2))
    rows = [resident.encode(pair.prompt, pair.chosen) for pair in PAIRS]
    reference = resident.score(rows, 3, reference=True)
    assert not np.allclose(reference, resident.score(rows, 3), atol=1e-2)
    resident.model = attach_lora(load_backbone(QUANTIZED, "cpu"), LoraConfig())
    slot = AdapterSlot(resident.model)
    slot.load(slot.initial_adapter(0))  # B is 0, so this is the backbone itself
    assert np.allclose(reference, resident.score(rows, 3), atol=1e-3)


def train_quantized(debug, resident):
    """Train an adapter by DPO with 8-bit moments; returns it and the metrics."""
    optimizer = debug.federation.optimizer.model_copy(update={"name": "adamw_8bit", "lr": 1e-2})
    training = Training(steps=6, batch_size=4, optimizer=optimizer, seed=3)
    trained = train_pairs(resident, PAIRS, resident.slot.initial_adapter(0), DpoObjective(), training)
    return trained.adapter, trained.figures


def test_training_a_quantized_policy_changes_the_adapter_alone_and_to_the_same_bytes(installed, debug):
    trainable = build_quantized_policy(debug, r=8)
    frozen = {name: p.clone() for name, p in trainable.model.named_parameters() if not p.requires_grad}
    adapter, metrics = train_quantized(debug, trainable)
    assert metrics.losses[-1] < metrics.losses[0]
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    parameters = dict(trainable.model.named_parameters())
    assert all(torch.equal(parameters[name], value) for name, value in frozen.items())
    again, _ = train_quantized(debug, trainable)
    assert all(torch.equal(adapter[name], again[name]) for name in adapter)


def test_gradients_through_8_bit_weights_are_almost_those_through_the_exact_ones(resident, resident_policy):
    adapter = random_tensors(resident_policy.slot, seed=1, scale=0.02)
    rows = [resident_policy.encode(pair.prompt, pair.chosen) for pair in PAIRS]
    gradients = []
    for model in (resident_policy, resident):
        model.slot.load(adapter)
        model.model.eval()
        parts = torch.autograd.grad(model.logprobs(rows).sum(), model.slot.parameters)
        gradients.append(torch.cat([part.flatten() for part in parts]))
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99


def test_a_quantized_selector_scores_almost_as_the_exact_one(installed, debug):
    comparisons = [Comparison(*pair.texts) for pair in PAIRS]
    logits = []
    for backbone in (QUANTIZED, debug.selector.backbone):
        selector = Selector(debug.selector.model_copy(update={"backbone": backbone}), "cpu")
        selector.slot.load(random_tensors(selector.slot, seed=0, scale=0.2))
        logits.append(selector.logits(comparisons))
    assert np.abs(logits[0] - logits[1]).max() < 0.05 * np.abs(logits[1]).max()


def take_steps(name):
    """Take five steps; returns the change of the weights, the optimizer and the parameter."""
    generator = torch.Generator().manual_seed(0)
    initial = torch.randn(64, 128, generator=generator)
    gradients = torch.randn(5, 64, 128, generator=generator)
    weight = torch.nn.Parameter(initial.clone())
    config = OptimizerConfig(name=name, lr=1e-2, betas=[0.9, 0.95], weight_decay=0.1)
    optimizer = build_optimizer([weight], config)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach() - initial, optimizer, weight


def test_the_moments_of_adamw_8bit_have_8_bits_and_its_steps_are_close_to_those_of_adamw(installed):
    change, optimizer, weight = take_steps("adamw_8bit")
    assert type(optimizer).__name__ == "AdamW8bit"
    assert {optimizer.state[weight][state].dtype for state in ("state1", "state2")} == {torch.uint8}
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    exact, *_ = take_steps("adamw")
    assert torch.cosine_similarity(exact.flatten(), change.flatten(), dim=0) > 0.99
    assert not torch.equal(exact, change)


def test_the_adapter_of_a_quantized_policy_is_fp32_in_alignment(installed, debug, tmp_path):
    policy = Policy(debug.policy.model_copy(update={"backbone": QUANTIZED}), "cpu")
    ids = {"chosen_ids": [40, 41, 2], "rejected_ids": [50, 2]}
    rows = [{"prompt": pair.prompt} | ids for pair in PAIRS]
    values = {"lr": 1e-6, "batch_size": 2, "micro_batch_size": 2, "epochs": 1}
    dpo = debug.alignment.dpo.model_copy(update=values)
    initial = prepare_model(Policy(policy.config, "cpu"), dpo, 0)
    before = {name: p.clone() for name, p in initial.named_parameters() if p.requires_grad}
    align_policy(policy, dpo, rows, tmp_path, [], 0)
    after = dict(policy.model.named_parameters())
    assert {after[name].dtype for name in before} == {torch.float32}
    changed = [name for name, value in before.items() if not torch.equal(after[name], value)]
    assert any(".lora_A." in name for name in changed), "a step of 1e-6 would be lost in bf16"


def test_a_quantized_policy_answers_with_an_adapter_from_a_folder(resident, tmp_path):
    config = resident.policy.config
    adapter = random_tensors(resident.slot, seed=1, scale=0.2)
    folder = export_adapter(adapter, config.lora, BackboneConfig(name="tiny-random"), tmp_path / "adapter")
    policy = Policy(config, "cpu", folder)
    adapters = {p.dtype for name, p in policy.model.named_parameters() if ".lora_" in name}
    assert adapters == {torch.float32}
    assert len(policy.generate(["paper"], 0)[0]) == 1
    assert np.isfinite(pair_logprobs(resident, PAIRS, 2)).all()
