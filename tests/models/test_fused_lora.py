"""The fused LoRA linear has the values and gradients of PEFT's separate operations."""

from copy import deepcopy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from components.models import fused_lora, onednn
from components.models.fused_lora import fuse_lora

STATES = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(0))


def build(bias=True, dropout=0.0, fused=True, r=4):
    """A model of one adapted layer whose values do not depend on whether it is fused."""
    torch.manual_seed(0)
    model = get_peft_model(
        nn.Sequential(nn.Linear(24, 40, bias=bias)),
        LoraConfig(r=r, lora_alpha=6, target_modules=["0"], lora_dropout=dropout, init_lora_weights=False),
    )
    if fused:
        fuse_lora(model)
    return model.eval()


@pytest.fixture
def applications(monkeypatch):
    """Calls of the fused function."""
    calls = []
    function = fused_lora.LoraLinear

    class Recorded:
        @staticmethod
        def apply(*inputs):
            calls.append(inputs)
            return function.apply(*inputs)

    monkeypatch.setattr(fused_lora, "LoraLinear", Recorded)
    return calls


def gradients(model, states):
    states = states.clone().requires_grad_()
    weights = torch.linspace(-1, 1, 40)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    output = model(states)
    return output, torch.autograd.grad((output * weights).square().sum(), [states, *parameters])


def assert_close(actual, expected):
    assert actual.shape == expected.shape
    difference = (actual - expected).detach().abs().max()
    assert float(difference) <= 1e-6 * float(expected.detach().abs().max())


@pytest.mark.parametrize("states", [STATES, STATES[0], STATES[0, 0]], ids=["3d", "2d", "1d"])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_peft(applications, bias, states):
    output, actual = gradients(build(bias), states)
    expected_output, expected = gradients(build(bias, fused=False), states)
    assert len(applications) == 1
    assert len(actual) == 3
    assert_close(output, expected_output)
    for gradient, target in zip(actual, expected, strict=True):
        assert float(target.abs().max()) > 0
        assert_close(gradient, target)


def test_factors_alone_get_gradients_and_a_frozen_one_gets_none():
    model = build()
    layer = model.base_model.model[0]
    layer.lora_A["default"].weight.requires_grad_(False)
    (model(STATES) ** 2).sum().backward()
    assert layer.lora_A["default"].weight.grad is None
    assert layer.lora_B["default"].weight.grad.abs().max() > 0
    assert layer.get_base_layer().weight.grad is None


def test_no_rows_have_gradients_of_zero():
    output, (by_states, *by_factors) = gradients(build(), STATES[:0])
    assert output.shape == (0, 5, 40)
    assert by_states.shape == (0, 5, 24)
    assert not any(gradient.any() for gradient in by_factors)


def test_the_states_that_a_layer_reads_do_not_change():
    states = STATES.clone()
    build()(states)
    assert torch.equal(states, STATES)


def test_a_disabled_adapter_is_left_out(applications):
    model = build()
    with model.disable_adapter():
        output = model(STATES)
    assert torch.equal(output, model.base_model.model[0].get_base_layer()(STATES))
    assert applications == []


def test_active_dropout_is_peft_s_own(applications):
    outputs = []
    for fused in (True, False):
        model = build(dropout=0.5, fused=fused).train()
        torch.manual_seed(1)
        outputs.append(model(STATES))
    assert torch.equal(*outputs)
    assert applications == []
    fuse_lora(model)
    model.eval()(STATES)
    assert len(applications) == 1


def test_rows_of_several_adapters_are_peft_s_own(applications):
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["0"], init_lora_weights=False)
    outputs = []
    for fused in (True, False):
        model = build(fused=fused)
        torch.manual_seed(2)
        model.add_adapter("other", config)
        model.eval()
        with model.base_model._enable_peft_forward_hooks(adapter_names=["default", "other", "default"]):
            outputs.append(model.base_model.model(STATES))
    assert torch.equal(*outputs)
    assert applications == []


def test_autocast_and_other_types_are_peft_s_own(applications):
    model = build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(STATES).dtype == torch.bfloat16
    half = build()
    half.base_model.model[0].get_base_layer().to(torch.float16)
    half(STATES.half())
    assert applications == []


class Products(TorchDispatchMode):
    """The types of all matrix products."""

    def __init__(self):
        super().__init__()
        self.types = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.types |= {value.dtype for value in args if isinstance(value, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_all_products_of_a_bf16_layer_are_in_bf16(applications, dropout):
    results = []
    for fused in (True, False):
        model = build(dropout=dropout, fused=fused).train()
        model.base_model.model[0].get_base_layer().to(torch.bfloat16)
        torch.manual_seed(1)  # of the dropout
        with Products() as products:
            output, found = gradients(model, STATES.bfloat16())
        results.append([output, *found])
        assert products.types == ({torch.bfloat16} if fused else {torch.bfloat16, torch.float32})
    assert len(applications) == 1
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        difference = (actual - expected).detach().float().norm()
        assert difference <= 0.02 * expected.detach().float().norm()


@pytest.mark.parametrize(
    "has_onednn",
    [
        False,
        pytest.param(
            True, marks=pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")
        ),
    ],
)
def test_second_derivatives_are_those_of_peft(has_onednn, monkeypatch):
    monkeypatch.setattr(onednn, "_is_amd_with_avx512", lambda: has_onednn)

    def derivatives(model):
        states = STATES.clone().requires_grad_()
        inputs = [states, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
        first = torch.autograd.grad(model(states.sin()).pow(3).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in first), inputs)

    for actual, expected in zip(derivatives(build()), derivatives(build(fused=False)), strict=True):
        assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("is_dropped", [False, True])
def test_derivatives_are_those_of_finite_differences(is_dropped):
    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    generator = torch.Generator().manual_seed(0)
    x, weight, bias, a, b = draw(2, 3), draw(4, 3), draw(4), draw(2, 3), draw(4, 2)
    dropped = draw(2, 3).requires_grad_() if is_dropped else None
    inputs = [x.requires_grad_(), dropped, weight, bias, a.requires_grad_(), b.requires_grad_(), 1.5]
    assert torch.autograd.gradcheck(fused_lora.LoraLinear.apply, inputs)
    assert torch.autograd.gradgradcheck(fused_lora.LoraLinear.apply, inputs)


def test_a_copy_of_a_model_uses_its_own_weights():
    model = build()
    copied = deepcopy(model)
    with torch.no_grad():
        copied.base_model.model[0].lora_B["default"].weight.zero_()
        assert torch.equal(copied(STATES), copied.base_model.model[0].get_base_layer()(STATES))
        assert not torch.allclose(model(STATES), copied(STATES))
