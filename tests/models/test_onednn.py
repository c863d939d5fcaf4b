"""Linear layers that oneDNN computes: the same results, and the layers as they were afterwards."""

from contextlib import nullcontext

import pytest
import torch

from components.models.adapters import AdapterSlot
from components.models.onednn import onednn_products
from components.models.policy import Policy
from tests.support.adapters import random_tensors
from tests.support.recording import record_calls

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")


@pytest.fixture(autouse=True)
def avx512(monkeypatch):
    """Let the CPU count as one with AVX-512; oneDNN itself uses what there is."""
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (0, 48), (3, 5, 48)])
def test_a_layer_has_the_same_outputs_by_onednn(shape, bias, monkeypatch):
    layer = torch.nn.Linear(48, 32, bias=bias).requires_grad_(False)
    x = torch.randn(48, *shape[:-1], generator=torch.Generator().manual_seed(0)).movedim(0, -1)
    expected = layer(x)
    calls = record_calls(monkeypatch, torch.nn.functional, "linear", lambda *_: 1)
    with onednn_products(layer) as is_used, torch.inference_mode():
        result = layer(x)
    assert is_used
    assert calls == []
    assert torch.allclose(result, expected, atol=1e-5)


def test_the_layers_are_the_same_afterwards_and_after_an_error():
    layer = torch.nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="interrupted"), onednn_products(layer):
        assert "forward" in vars(layer)
        raise RuntimeError("interrupted")
    assert "forward" not in vars(layer)
    assert layer(torch.ones(1, 4)).requires_grad


def test_answers_are_those_without_onednn(debug, monkeypatch):
    policy = Policy(debug.policy, "cpu")
    slot = AdapterSlot(policy.attach_lora(debug.policy.lora))
    slot.load(random_tensors(slot, seed=0, scale=0.3))
    prompts = ["a paper", "another paper about models", "a third"]
    answers = [policy.generate(prompts, 1, temperature) for temperature in (0.0, 0.7)]
    monkeypatch.setattr("components.models.onednn.onednn_products", lambda model: nullcontext())
    assert [policy.generate(prompts, 1, temperature) for temperature in (0.0, 0.7)] == answers


def test_layers_of_another_type_or_with_a_forward_pass_of_their_own_stay():
    offloaded = torch.nn.Linear(4, 4)
    offloaded.forward = forward = lambda x: x
    with onednn_products(torch.nn.ModuleList([offloaded, torch.nn.Linear(4, 4).bfloat16()])) as is_used:
        assert not is_used
        assert offloaded.forward is forward


def test_a_processor_without_avx512_does_not_use_it(monkeypatch):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    with onednn_products(torch.nn.Linear(4, 4)) as is_used:
        assert not is_used
