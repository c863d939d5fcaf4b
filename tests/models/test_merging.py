"""An adapter that is merged for generation: the same answers, and the same weights afterwards."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model

from components.config import BackboneConfig
from components.models.adapters import AdapterSlot
from components.models.backbone import load_backbone
from components.models.merging import merged_adapter
from components.models.policy import Policy
from tests.support.adapters import random_tensors

IDS = torch.tensor([[50, 51, 52, 53]])


@pytest.fixture
def policy(debug):
    policy = Policy(debug.policy, "cpu")
    slot = AdapterSlot(policy.attach_lora(debug.policy.lora))
    slot.load(random_tensors(slot, seed=0, scale=0.3))
    return policy


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_the_merged_model_computes_the_same_logits_without_the_small_products(policy):
    expected = logits(policy.model)
    calls = []
    layer = next(module for module in policy.model.modules() if hasattr(module, "lora_A"))
    layer.lora_A["default"].register_forward_hook(lambda *_: calls.append(1))
    with merged_adapter(policy.model) as is_merged:
        merged = logits(policy.model)
    assert is_merged
    assert calls == []
    assert torch.allclose(merged, expected, atol=1e-4)
    with policy.model.disable_adapter():
        assert not torch.allclose(logits(policy.model), expected, atol=1e-2)


def test_all_weights_are_the_same_bytes_afterwards_and_after_an_error(policy):
    before, expected = weights(policy.model), logits(policy.model)
    with pytest.raises(RuntimeError, match="interrupted"), merged_adapter(policy.model):
        assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(policy.model).items())
        raise RuntimeError("interrupted")
    after = weights(policy.model)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    with merged_adapter(policy.model):
        pass
    assert torch.equal(logits(policy.model), expected)


def test_answers_are_those_of_the_separate_adapter(policy, monkeypatch):
    prompts = ["a paper", "another paper about models", "a third"]
    answers = [policy.generate(prompts, 1, temperature) for temperature in (0.0, 0.7)]
    monkeypatch.setattr("components.models.merging.merged_adapter", nullcontext)
    assert [policy.generate(prompts, 1, temperature) for temperature in (0.0, 0.7)] == answers


def test_disabled_adapters_plain_backbones_bf16_weights_and_active_dropout_are_not_merged(policy, debug):
    with policy.model.disable_adapter():
        expected = logits(policy.model)
        with merged_adapter(policy.model) as is_merged:
            assert not is_merged
            assert torch.equal(logits(policy.model), expected)
    with merged_adapter(load_backbone(debug.policy.backbone, "cpu")) as is_merged:
        assert not is_merged
    # A small difference would be lost in a bf16 weight.
    backbone = load_backbone(BackboneConfig(name="tiny-random", dtype="bfloat16"), "cpu")
    model = get_peft_model(backbone, LoraConfig(r=2, target_modules="all-linear")).eval()
    with merged_adapter(model) as is_merged:
        assert not is_merged
    with merged_adapter(policy.model.train()) as is_merged:
        assert not is_merged


def test_a_weight_that_two_layers_share_is_not_merged(debug):
    """The output layer of the tiny backbone is its embedding."""
    backbone = load_backbone(debug.policy.backbone, "cpu")
    tied = backbone.get_output_embeddings().weight is backbone.get_input_embeddings().weight
    model = get_peft_model(backbone, LoraConfig(r=2, target_modules=["lm_head", "q_proj"])).eval()
    with merged_adapter(model) as is_merged:
        assert is_merged != tied
    assert tied
