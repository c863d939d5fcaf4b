"""The last layer at one position has the states and gradients of the whole layer."""

import threading
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model

from components.concurrency import run_concurrently
from components.models.last_layer import states_at, states_at_one_position, supports_one_position
from tests.support.long_tier import with_examples
from tests.support.random_models import EXAMPLES, FAMILIES, build_random
from tests.support.recording import record_calls

OTHER_FAMILIES = ("gpt2", "gpt_neox", "phi3", "olmo2")
"""Families whose attention has other parts, or other norms of the keys."""
IDS = torch.arange(1, 25).reshape(3, 8)
LAST = torch.tensor([7, 2, 5])


@pytest.fixture(scope="module", params=with_examples([*FAMILIES, "cohere", "granite"], EXAMPLES))
def model(request):
    settings = {"residual_multiplier": 0.5} if request.param == "granite" else {}
    return build_random(request.param, **settings)


def with_lora(model, dropout=0.0):
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, lora_dropout=dropout)
    return get_peft_model(model, config)


def relative_difference(states, expected):
    return float(((states - expected).abs().max() / expected.abs().max()).detach())


def test_the_states_are_those_of_the_whole_layer_which_is_whole_again_afterwards(model):
    assert supports_one_position(model)
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
        states = states_at_one_position(model, IDS, LAST)
        assert states.shape == (3, 16)
        assert relative_difference(states, states_at(model, IDS, LAST)) < 5e-6
        assert torch.equal(model(input_ids=IDS).logits, logits)


def test_the_mlp_of_the_last_layer_reads_one_position(model, monkeypatch):
    read = []
    for layer in model.base_model.layers:
        read.append(record_calls(monkeypatch, layer.mlp, "forward", lambda states: states.shape))
    with torch.no_grad():
        states_at_one_position(model, IDS, LAST)
    assert read == [[(3, 8, 16)], [(3, 1, 16)]]


@pytest.mark.parametrize(
    ("family", "attention"),
    [("llama", "sdpa"), ("llama", "eager"), ("mistral", "sdpa"), ("gemma2", "eager")],
)
def test_the_gradients_of_the_adapter_are_those_of_the_whole_layer(family, attention):
    model = with_lora(build_random(family, attn_implementation=attention))
    base = model.get_base_model()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = torch.linspace(-1, 1, 48).reshape(3, 16)
    gradients, expected = (
        torch.autograd.grad((states(base, IDS, LAST) * weights).sum(), parameters)
        for states in (states_at_one_position, states_at)
    )
    assert len(parameters) == 2 * 2 * 7
    largest = max(float(gradient.abs().max()) for gradient in expected)
    for gradient, target in zip(gradients, expected, strict=True):
        assert float((gradient - target).abs().max()) < 5e-6 * largest
        assert float(target.abs().max()) > 0


def test_threads_select_positions_of_their_own():
    """Each waits for the others before the last layer, so all have selected by then."""
    model = build_random("llama")
    positions = [torch.tensor([n, 7 - n, 3]) for n in range(4)]
    meeting = threading.Barrier(len(positions))

    def compute(last):
        with torch.no_grad():
            return states_at_one_position(model, IDS, last)

    with torch.no_grad():
        expected = [states_at(model, IDS, last) for last in positions]
    compute(positions[0])  # the model is compared with its whole layer before its first use

    def wait(module, args):
        meeting.wait(60)

    model.base_model.layers[1].register_forward_pre_hook(wait, prepend=True)
    states = run_concurrently([partial(compute, last) for last in positions])
    for values, targets in zip(states, expected, strict=True):
        assert relative_difference(values, targets) < 5e-6


def test_dropout_of_the_adapter_is_that_of_its_rate():
    model = with_lora(build_random("llama"), dropout=0.5).train()
    base = model.get_base_model()
    torch.manual_seed(0)
    with torch.no_grad():
        drawn = torch.stack([states_at_one_position(base, IDS, LAST) for _ in range(400)])
        whole = torch.stack([states_at(base, IDS, LAST) for _ in range(400)])
    error = (drawn.var(0) / 400 + whole.var(0) / 400).sqrt()
    assert float(((drawn.mean(0) - whole.mean(0)).abs() / error).max()) < 4.5
    assert float((drawn.std(0) / whole.std(0)).median()) == pytest.approx(1, abs=0.1)


def test_a_checkpointed_layer_is_computed_whole():
    model = build_random("llama")
    with torch.no_grad():
        expected = states_at(model, IDS, LAST)
    model.gradient_checkpointing_enable()
    assert relative_difference(states_at_one_position(model.train(), IDS, LAST), expected) < 5e-6


def test_a_model_in_bf16_is_supported():
    assert supports_one_position(build_random("llama").to(torch.bfloat16))


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_other_families_are_not_supported(family):
    assert not supports_one_position(build_random(family, num_key_value_heads=4))


def test_clipped_keys_are_not_supported():
    """OLMo clips them, which few tokens need not show."""
    assert not supports_one_position(build_random("olmo", clip_qkv=100.0))


def test_a_layer_with_another_computation_is_not_supported():
    model = build_random("llama")
    attention = model.base_model.layers[-1].self_attn
    attention.k_norm = torch.nn.Identity()
    assert supports_one_position(model)
    attention.k_norm = torch.nn.LayerNorm(8)  # the attention itself does not use it
    assert not supports_one_position(model)
