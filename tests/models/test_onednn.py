"""Products of frozen weights by oneDNN: the same values and gradients, and where they are used."""

import copy
from functools import partial

import pytest
import torch
from torch.nn.functional import linear

from components.models import onednn
from components.models.adapters import AdapterSlot
from components.models.backbone import load_backbone
from components.models.logprobs import completion_logprobs
from components.models.onednn import multiply, use_onednn
from components.models.policy import Policy
from tests.support.adapters import random_tensors
from tests.support.recording import record_calls

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")


@pytest.fixture(autouse=True)
def products(monkeypatch):
    """Let the machine count as an AMD processor with AVX-512; gives the calls of oneDNN's operation."""
    monkeypatch.setattr(onednn, "_is_amd_with_avx512", lambda: True)
    return record_calls(monkeypatch, torch.ops.mkldnn, "_linear_pointwise", lambda x, *_: len(x))


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (0, 48), (3, 5, 48)])
def test_a_frozen_layer_has_the_same_outputs_and_gradients(shape, bias, products):
    layer = torch.nn.Linear(48, 32, bias=bias).requires_grad_(False)
    x = draw(48, *shape[:-1]).movedim(0, -1).requires_grad_()
    expected = layer(x)
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    use_onednn(layer)
    result = layer(x)
    (own,) = torch.autograd.grad(result.square().sum(), x)
    assert len(products) == 2
    assert torch.allclose(result, expected, atol=1e-5)
    assert torch.allclose(own, gradient, atol=1e-4)


def test_a_transposed_weight_is_read_in_place(products):
    x, weight = draw(5, 48), draw(48, 32)
    assert torch.allclose(multiply(x, weight.t()), x @ weight, atol=1e-5)
    assert products == [5]


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.requires_grad_(),
        lambda layer: layer.bias.requires_grad_(),
        lambda layer: layer.bfloat16(),
        lambda layer: layer.to("meta"),
    ],
)
def test_layers_that_train_are_not_in_fp32_or_not_on_a_cpu_stay(change, products):
    layer = torch.nn.Linear(4, 4).requires_grad_(False)
    use_onednn(layer)
    change(layer)
    layer(torch.ones(2, 4, dtype=layer.weight.dtype, device=layer.weight.device))
    assert products == []


def test_all_derivatives_by_the_input_are_those_of_the_layer(products):
    plain, layer = (torch.nn.Linear(4, 3).requires_grad_(False) for _ in range(2))
    layer.load_state_dict(plain.state_dict())
    use_onednn(layer)
    x = draw(5, 4)

    def derivatives(layer):
        point = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(layer(point.sin()).pow(3).sum(), point, create_graph=True)
        yield torch.autograd.grad(first.square().sum(), point)[0]
        yield torch.func.vmap(torch.func.grad(lambda row: layer(row).pow(2).sum()))(x)
        yield torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1]

    for own, expected in zip(derivatives(layer), derivatives(plain), strict=True):
        assert torch.allclose(own, expected, atol=1e-5)
    assert products


def test_autocast_computes_the_product_in_its_own_type(products):
    layer = torch.nn.Linear(4, 4).requires_grad_(False)
    use_onednn(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(2, 4)).dtype == torch.bfloat16
    assert products == []


def test_a_layer_with_a_forward_pass_of_its_own_keeps_it():
    layer = torch.nn.Linear(4, 4)
    layer.forward = partial(linear, weight=layer.weight)
    own = layer.forward
    use_onednn(layer)
    assert layer.forward is own


def test_a_copy_of_a_layer_has_its_own_weight():
    layer = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
    use_onednn(layer)
    other = copy.deepcopy(layer)
    other.weight.zero_()
    assert other(torch.ones(1, 4)).abs().sum() == 0
    assert layer(torch.ones(1, 4)).abs().sum() > 0


def test_another_processor_does_not_use_it(monkeypatch, products):
    monkeypatch.setattr(onednn, "_is_amd_with_avx512", lambda: False)
    x, weight = draw(3, 4), draw(5, 4)
    assert torch.equal(multiply(x, weight), x @ weight.t())
    assert torch.equal(multiply(x @ weight.t(), weight.t()), (x @ weight.t()) @ weight)
    layer = torch.nn.Linear(4, 4)
    use_onednn(layer)
    assert "forward" not in vars(layer)
    assert products == []


def test_every_product_of_a_backbone_with_a_frozen_weight_is_by_onednn(debug, products, monkeypatch):
    """The forward and backward passes of training, and the values without it, which differ by rounding."""

    def train():
        policy = Policy(debug.policy, "cpu")
        slot = AdapterSlot(policy.attach_lora(debug.policy.lora))
        slot.load(random_tensors(slot, seed=0, scale=0.3))
        rows = [policy.encode_texts("a paper about models", "an answer", "no")]
        logprobs = completion_logprobs(policy.model.get_base_model(), rows, 0)
        logprobs.sum().backward()
        backbone = load_backbone(debug.policy.backbone, "cpu")
        layers = sum(type(module) is torch.nn.Linear for module in backbone.modules())
        return layers, logprobs.detach(), [each.grad for each in slot.parameters]

    layers, logprobs, gradients = train()
    assert len(products) == 2 * layers - 3  # the inputs of q, k and v of the first layer need no gradient
    monkeypatch.setattr(onednn, "_is_amd_with_avx512", lambda: False)
    _, expected, others = train()
    assert torch.allclose(logprobs, expected, atol=1e-4)
    assert all(torch.allclose(own, other, atol=1e-4) for own, other in zip(gradients, others, strict=True))


def test_answers_are_those_without_onednn(debug, monkeypatch, products):
    policy = Policy(debug.policy, "cpu")
    slot = AdapterSlot(policy.attach_lora(debug.policy.lora))
    slot.load(random_tensors(slot, seed=0, scale=0.3))
    prompts = ["a paper", "another paper about models", "a third"]
    answers = [policy.generate(prompts, 1, temperature) for temperature in (0.0, 0.7)]
    count = len(products)
    assert count > 0
    monkeypatch.setattr(onednn, "_is_amd_with_avx512", lambda: False)
    assert [policy.generate(prompts, 1, temperature) for temperature in (0.0, 0.7)] == answers
    assert len(products) == count
