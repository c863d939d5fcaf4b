"""Personal modules in a resident backbone: what they compute, and how they are exchanged."""

import numpy as np
import pytest
import torch

from components.config import PersonalModules
from components.config.modules import BottleneckConfig, RewardHeadConfig
from components.models.backbone import BackboneError, load_backbone
from components.models.personalized import (
    Bottleneck,
    RewardHead,
    as_reference,
    find_final_norm,
    layer_index,
)
from components.models.resident import ResidentPolicy
from tests.support.adapters import random_tensors
from tests.support.full_logits import completion_logprob
from tests.support.random_models import build_random

ALL = PersonalModules(
    bottleneck=BottleneckConfig(width=4, dropout=0.0),
    reward=RewardHeadConfig(width=3, dropout=0.0),
)
IDS = torch.tensor([[1, 5, 6, 7, 8]])


@pytest.fixture(scope="module")
def config(debug):
    return debug.policy.model_copy(update={"max_new_tokens": 20})


@pytest.fixture(scope="module")
def resident(config):
    return ResidentPolicy(config, "cpu", ALL)


def load_initial(resident):
    resident.slot.load(resident.slot.initial_adapter(0))
    resident.personal.load(resident.personal.initial_modules(0))


def load_random(resident):
    resident.slot.load(random_tensors(resident.slot, seed=2, scale=0.3))
    resident.personal.load(random_tensors(resident.personal, seed=1, scale=0.3))


def compute_logits(resident):
    resident.model.eval()
    with torch.no_grad():
        return resident.model(input_ids=IDS).logits


# --- the modules


def test_the_bottleneck_is_eq_9_on_hand_computed_numbers():
    norm = torch.nn.LayerNorm(2)
    bottleneck = Bottleneck(norm, 2, BottleneckConfig(width=1, dropout=0.0))
    with torch.no_grad():
        bottleneck.encode.weight.copy_(torch.tensor([[1.0, 2.0]]))
        bottleneck.encode.bias.copy_(torch.tensor([0.5]))
        bottleneck.decode.weight.copy_(torch.tensor([[3.0], [-1.0]]))
        bottleneck.decode.bias.copy_(torch.tensor([0.0, 0.25]))
        bottleneck.norm.weight.copy_(torch.tensor([2.0, 4.0]))
    encoded = torch.nn.functional.gelu(torch.tensor(1.0 - 1.0 + 0.5))
    sums = torch.tensor([1.0 + 3 * encoded, -0.5 - encoded + 0.25])
    normalized = (sums - sums.mean()) / (sums.var(unbiased=False) + norm.eps).sqrt()
    expected = torch.tensor([2.0, 4.0]) * normalized
    assert torch.allclose(bottleneck(torch.tensor([1.0, -0.5])), expected, atol=1e-6)


def test_the_reward_head_is_eq_3_on_hand_computed_numbers():
    head = RewardHead(2, RewardHeadConfig(width=2, dropout=0.0))
    with torch.no_grad():
        head.hidden.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        head.hidden.bias.copy_(torch.tensor([0.0, -1.0]))
        head.score.weight.copy_(torch.tensor([[3.0, -4.0]]))
        head.score.bias.copy_(torch.tensor([0.5]))
    expected = 3 * torch.tensor([0.2]).tanh() - 4 * torch.tensor([0.4]).tanh() + 0.5
    assert torch.allclose(head(torch.tensor([[0.2, 0.7]])), expected)


def test_the_reward_heads_dropout_precedes_tanh_and_that_of_the_bottleneck_keeps_the_residual():
    torch.manual_seed(0)
    head = RewardHead(3, RewardHeadConfig(width=1, dropout=0.5)).train()
    with torch.no_grad():
        head.hidden.bias.fill_(50.0)
        rewards = {round(reward, 4) for reward in head(torch.zeros(50, 3)).tolist()}
    bias, weight = head.score.bias.item(), head.score.weight.item()
    assert rewards == {round(bias, 4), round(bias + weight, 4)}, "tanh(0) and tanh(100)"
    torch.manual_seed(0)
    bottleneck = Bottleneck(torch.nn.Identity(), 3, BottleneckConfig(width=2, dropout=0.999999)).train()
    states = torch.randn(50, 3)
    assert torch.allclose(bottleneck(states), states + bottleneck.decode.bias)


# --- the reference


def test_an_untrained_model_and_the_reference_are_the_backbone_without_personal_modules(resident, config):
    with torch.no_grad():
        expected = load_backbone(config.backbone, "cpu")(input_ids=IDS).logits
    load_initial(resident)
    assert torch.equal(compute_logits(resident), expected)
    load_random(resident)
    personalized = compute_logits(resident)
    assert not torch.allclose(personalized, expected, atol=1e-2)
    with as_reference(resident.model):
        assert torch.equal(compute_logits(resident), expected)
    assert torch.equal(compute_logits(resident), personalized), "restored afterwards"


def test_with_a_layer_norm_of_its_own_an_untrained_model_differs_from_the_reference(config):
    bottleneck = BottleneckConfig(width=4, norm="layer")
    literal = ResidentPolicy(config, "cpu", PersonalModules(bottleneck=bottleneck))
    load_initial(literal)
    personalized = compute_logits(literal)
    with as_reference(literal.model):
        assert not torch.allclose(personalized, compute_logits(literal), atol=1e-2)


def test_in_bf16_an_untrained_personalized_model_has_the_log_probabilities_of_its_reference(config):
    backbone = config.backbone.model_copy(update={"dtype": "bfloat16"})
    resident = ResidentPolicy(config.model_copy(update={"backbone": backbone}), "cpu", ALL)
    load_initial(resident)
    rows = [resident.encode("about trees", "it holds", "not at all")]
    with torch.no_grad():
        personalized = resident.logprobs(rows)
        with as_reference(resident.model):
            assert torch.allclose(personalized, resident.logprobs(rows), atol=1e-5)


def test_frozen_parameters_stay_frozen_after_the_reference_was_used(config):
    resident = ResidentPolicy(config, "cpu", ALL)
    for parameter in resident.slot.parameters:
        parameter.requires_grad_(False)
    with as_reference(resident.model):
        pass
    assert not any(parameter.requires_grad for parameter in resident.slot.parameters)
    assert all(parameter.requires_grad for parameter in resident.personal.parameters)


# --- log-probabilities and features


@pytest.fixture
def rows(resident):
    load_random(resident)
    return [resident.encode("about trees " * n, "it holds " * n, "no") for n in (1, 2, 3)]


@pytest.mark.parametrize("pooling", ["response", "sequence"])
def test_log_probabilities_and_mean_hidden_states_are_those_of_the_personalized_model(
    resident, rows, pooling
):
    base = resident.model.get_base_model()
    with torch.no_grad():
        logprobs, features = resident.logprobs_and_features(rows, pooling)
        assert torch.allclose(resident.logprobs(rows), logprobs)
        for i, (prompt, *completions) in enumerate(rows):
            for c, completion in enumerate(completions):
                expected = completion_logprob(base, prompt, completion)
                assert torch.allclose(logprobs[i, c], expected, atol=1e-3)
                ids = torch.tensor([[*prompt, *completion]])
                states = base.base_model(input_ids=ids).last_hidden_state[0]
                pooled = states[len(prompt) :] if pooling == "response" else states
                assert torch.allclose(features[i, c], pooled.mean(0), atol=1e-4)
    assert features.shape == (3, 2, base.config.hidden_size)


# --- the slot


def test_personal_modules_are_exchanged_in_place_and_read_back(resident):
    addresses = [parameter.data_ptr() for parameter in resident.personal.parameters]
    first, second = (random_tensors(resident.personal, seed, scale=0.3) for seed in (4, 5))
    resident.personal.load(first)
    first_logits = compute_logits(resident)
    resident.personal.load(second)
    assert not torch.equal(compute_logits(resident), first_logits)
    resident.personal.load(first)
    assert torch.equal(compute_logits(resident), first_logits)
    assert [parameter.data_ptr() for parameter in resident.personal.parameters] == addresses
    read = resident.personal.read()
    assert read.keys() == first.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in first.items())


def test_personal_modules_and_the_shared_adapter_are_in_different_slots(resident):
    assert {name.split(".")[0] for name in resident.personal.names} == {"bottleneck", "head", "reward"}
    assert not any("lora" in name for name in resident.personal.names)
    assert all("lora_" in name for name in resident.slot.names)


def test_the_head_is_an_untied_copy_of_the_backbones(resident):
    tensors = resident.personal.initial_modules(0)
    base = resident.model.get_base_model()
    embeddings = base.get_input_embeddings().weight
    assert torch.equal(tensors["head.weight"], embeddings), "the tiny backbone's head is tied"
    resident.personal.load({name: tensor + 1 for name, tensor in tensors.items()})
    assert torch.equal(tensors["head.weight"], embeddings)
    assert base.get_output_embeddings().weight.data_ptr() != embeddings.data_ptr()


def test_initial_modules_are_a_function_of_the_seed_with_the_bounds_of_pytorch(resident):
    first, again, different = (resident.personal.initial_modules(seed) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["reward.hidden.weight"], different["reward.hidden.weight"])
    assert torch.equal(first["head.weight"], different["head.weight"])
    bound = 1 / np.sqrt(32)
    assert bound / 1.5 < first["reward.hidden.weight"].abs().max() <= bound
    assert not first["bottleneck.decode.weight"].any()
    assert first["bottleneck.encode.weight"].any()


def test_lora_tensors_are_divided_by_the_shared_layers_which_may_not_be_all(config):
    resident = ResidentPolicy(config, "cpu", PersonalModules(shared_layers=1))
    assert {layer_index(name) for name in resident.slot.names} == {0}
    private = [name for name in resident.personal.names if not name.startswith("head.")]
    assert {layer_index(name) for name in private} == {1}
    assert sorted([*resident.slot.names, *private]) == resident.personal.lora.names
    with pytest.raises(BackboneError, match="2 layers are shared, but the backbone has 2"):
        ResidentPolicy(config, "cpu", PersonalModules(shared_layers=2))


def test_a_lora_tensor_without_a_layer_is_refused_by_name():
    with pytest.raises(BackboneError, match="'embeddings.lora_A.weight' belongs to no layer"):
        layer_index("embeddings.lora_A.weight")


# --- the last norm


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gpt2", {}),
        ("llama", {}),
        ("gpt_neox", {}),
        ("qwen2", {}),
        ("opt", {"word_embed_proj_dim": 16}),
    ],
)
def test_the_last_norm_is_found_in_other_families(family, settings):
    model = build_random(family, **settings)
    name, norm = find_final_norm(model)
    outputs = []
    hook = norm.register_forward_hook(lambda module, args, output: outputs.append(output))
    with torch.no_grad():
        states = model.base_model(input_ids=IDS).last_hidden_state
    hook.remove()
    assert torch.equal(states, outputs[0])
    assert "norm" in type(norm).__name__.lower()
    assert model.get_submodule(name) is norm


def test_a_backbone_that_ends_with_a_projection_is_refused():
    with pytest.raises(BackboneError, match="does not end with a norm"):
        find_final_norm(build_random("opt", word_embed_proj_dim=8))
