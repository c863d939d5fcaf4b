"""A client's own parts in a resident backbone: what they compute, where they stand, and that they are swapped and not rebuilt."""

import numpy as np
import pytest
import torch

from components.learning.policy import ResidentPolicy
from components.models.backbone import BackboneError, load_backbone
from components.models.parts import BottleneckConfig, PersonalParts, RewardHeadConfig
from components.models.personalized import Bottleneck, RewardHead, as_reference, final_norm, layer_of

ALL = PersonalParts(head=True, bottleneck=BottleneckConfig(width=4, dropout=0.0), reward=RewardHeadConfig(width=3, dropout=0.0))
IDS = torch.tensor([[1, 5, 6, 7, 8]])


@pytest.fixture(scope="module")
def config(debug):
    lora = debug.policy.lora.model_copy(update={"dropout": 0.0})
    return debug.policy.model_copy(update={"max_new_tokens": 20, "lora": lora})


@pytest.fixture(scope="module")
def resident(config):
    torch.set_num_threads(1)
    return ResidentPolicy(config, "cpu", ALL)


def some(slot, seed, scale=0.3):
    numbers = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(p.shape, generator=numbers) for name, p in zip(slot.names, slot.parameters, strict=True)}


def logits(resident):
    resident.model.eval()
    with torch.no_grad():
        return resident.model(input_ids=IDS).logits


def test_the_bottleneck_is_eq_9_on_numbers_worked_out_by_hand():
    norm = torch.nn.LayerNorm(2)
    bottleneck = Bottleneck(norm, 2, BottleneckConfig(width=1, dropout=0.0))
    with torch.no_grad():
        for module, weight, bias in ((bottleneck.encode, [[1.0, 2.0]], [0.5]), (bottleneck.decode, [[3.0], [-1.0]], [0.0, 0.25])):
            module.weight.copy_(torch.tensor(weight))
            module.bias.copy_(torch.tensor(bias))
        bottleneck.norm.weight.copy_(torch.tensor([2.0, 4.0]))
    given = torch.tensor([1.0, -0.5])
    middle = torch.nn.functional.gelu(torch.tensor(1.0 - 1.0 + 0.5))
    sums = torch.tensor([1.0 + 3 * middle, -0.5 - middle + 0.25])
    normed = (sums - sums.mean()) / (sums.var(unbiased=False) + norm.eps).sqrt()
    assert torch.allclose(bottleneck(given), torch.tensor([2.0, 4.0]) * normed, atol=1e-6)
    bottleneck.own = False
    assert torch.equal(bottleneck(given), norm(given)), "the backbone's own norm, without the bottleneck"


def test_the_reward_head_is_eq_3_on_numbers_worked_out_by_hand():
    head = RewardHead(2, RewardHeadConfig(width=2, dropout=0.0))
    with torch.no_grad():
        head.hidden.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        head.hidden.bias.copy_(torch.tensor([0.0, -1.0]))
        head.score.weight.copy_(torch.tensor([[3.0, -4.0]]))
        head.score.bias.copy_(torch.tensor([0.5]))
    assert torch.allclose(head(torch.tensor([[0.2, 0.7]])), 3 * torch.tensor([0.2]).tanh() - 4 * torch.tensor([0.4]).tanh() + 0.5)


def test_dropout_stands_before_tanh_and_after_gelu():
    torch.manual_seed(0)
    reward = RewardHead(3, RewardHeadConfig(width=2, dropout=0.999)).train()
    with torch.no_grad():
        reward.hidden.bias.fill_(5.0)
    assert {round(v, 4) for v in reward(torch.zeros(50, 3)).tolist()} == {round(float(reward.score.bias.detach()), 4)}, "tanh(0) where all is dropped"
    bottleneck = Bottleneck(torch.nn.Identity(), 3, BottleneckConfig(width=2, dropout=0.999)).train()
    given = torch.randn(50, 3)
    assert torch.allclose(bottleneck(given), given + bottleneck.decode.bias), "the residual stays"


def test_an_untrained_personal_model_is_the_reference_exactly(resident, config):
    resident.slot.load(resident.slot.initial_adapter(0))
    resident.personal.load(resident.personal.initial(0))
    plain = load_backbone(config.backbone, "cpu")
    with torch.no_grad():
        expected = plain(input_ids=IDS).logits
    assert torch.equal(logits(resident), expected)
    resident.personal.load(some(resident.personal, 1))
    resident.slot.load(some(resident.slot, 2))
    changed = logits(resident)
    assert not torch.allclose(changed, expected, atol=1e-2)
    with as_reference(resident.model):
        assert torch.equal(logits(resident), expected), "LoRA off, and the backbone's own norm and head"
    assert torch.equal(logits(resident), changed), "and back"


def test_with_a_layer_norm_of_its_own_a_literal_eq_9_is_away_from_the_reference(config):
    literal = ResidentPolicy(config, "cpu", PersonalParts(bottleneck=BottleneckConfig(width=4, norm="layer")))
    literal.personal.load(literal.personal.initial(0))
    own = logits(literal)
    with as_reference(literal.model):
        assert not torch.allclose(own, logits(literal), atol=1e-2)


def test_log_probabilities_and_features_are_those_of_the_personal_model(resident):
    resident.slot.load(some(resident.slot, 2))
    resident.personal.load(some(resident.personal, 3))
    rows = [resident.encode_pair({"prompt": "about trees " * n, "chosen": "it holds " * n, "rejected": "no"}) for n in (1, 2, 3)]
    base = resident.model.get_base_model()
    with torch.no_grad():
        logprobs, features = resident.logprobs_and_features(rows)
        for i, (prompt, *completions) in enumerate(rows):
            for c, completion in enumerate(completions):
                ids = torch.tensor([[*prompt, *completion]])
                states = base.base_model(input_ids=ids).last_hidden_state[0]
                after = base(input_ids=ids).logits[0].log_softmax(-1)
                assert torch.allclose(features[i, c], states[len(prompt) :].mean(0), atol=1e-4), "the mean over the response's tokens, and no others"
                assert torch.allclose(logprobs[i, c], sum(after[len(prompt) - 1 + k, token] for k, token in enumerate(completion)), atol=1e-3)
        assert torch.allclose(resident.logprobs(rows), logprobs)
        assert features.shape == (3, 2, base.config.hidden_size)


def test_parts_are_swapped_in_place_and_read_back_as_they_were(resident):
    before = [p.data_ptr() for p in resident.personal.parameters]
    first, second = some(resident.personal, 4), some(resident.personal, 5)
    resident.personal.load(first)
    one = logits(resident)
    resident.personal.load(second)
    two = logits(resident)
    resident.personal.load(first)
    assert torch.equal(logits(resident), one) and not torch.equal(one, two)
    assert [p.data_ptr() for p in resident.personal.parameters] == before
    read = resident.personal.read()
    assert read.keys() == first.keys() and all(torch.equal(read[name], first[name]) for name in first)
    assert {name.split(".")[0] for name in read} == {"bottleneck", "head", "reward"} and not any("lora" in name for name in read)
    assert all("lora_" in name for name in resident.slot.names)


def test_the_head_is_an_untied_copy_and_training_it_leaves_the_embeddings_alone(resident):
    tensors = resident.personal.initial(0)
    base = resident.model.get_base_model()
    embeddings = base.get_input_embeddings().weight
    assert torch.equal(tensors["head.weight"], embeddings), "the tiny backbone's head is tied"
    resident.personal.load({name: value + 1 for name, value in tensors.items()})
    assert torch.equal(tensors["head.weight"], embeddings) and base.get_output_embeddings().weight.data_ptr() != embeddings.data_ptr()


def test_first_parts_are_a_function_of_the_seed_and_bounded_as_pytorchs_linear_layers(resident):
    first, again, other = resident.personal.initial(0), resident.personal.initial(0), resident.personal.initial(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["reward.hidden.weight"], other["reward.hidden.weight"]) and torch.equal(first["head.weight"], other["head.weight"])
    assert first["reward.hidden.weight"].abs().max() <= 1 / np.sqrt(32) < 1.5 * first["reward.hidden.weight"].abs().max()
    assert not first["bottleneck.decode.weight"].any() and first["bottleneck.encode.weight"].any()


def test_shared_layers_part_the_lora(config):
    parted = ResidentPolicy(config, "cpu", PersonalParts(head=False, shared_layers=1))
    assert {layer_of(name) for name in parted.slot.names} == {0} and {layer_of(name) for name in parted.personal.names} == {1}
    assert sorted([*parted.slot.names, *parted.personal.names]) == parted.personal.lora.names
    with pytest.raises(BackboneError, match="2 layers are shared, but the backbone has 2"):
        ResidentPolicy(config, "cpu", PersonalParts(shared_layers=2))


def test_in_bf16_an_untrained_personal_model_gives_the_margins_of_its_reference_exactly(config):
    half = config.model_copy(update={"backbone": config.backbone.model_copy(update={"dtype": "bfloat16"})})
    resident = ResidentPolicy(half, "cpu", ALL)
    resident.slot.load(resident.slot.initial_adapter(0))
    resident.personal.load(resident.personal.initial(0))
    rows = [resident.encode_pair({"prompt": "about trees", "chosen": "it holds", "rejected": "not at all"})]
    with torch.no_grad():
        own = resident.logprobs(rows)
        with as_reference(resident.model):
            assert torch.allclose(own, resident.logprobs(rows), atol=1e-5)


def test_what_rests_takes_no_gradient_after_the_reference_was_asked_either(resident):
    for parameter in resident.slot.parameters:
        parameter.requires_grad_(False)
    try:
        with as_reference(resident.model):
            pass
        assert not any(parameter.requires_grad for parameter in resident.slot.parameters) and all(parameter.requires_grad for parameter in resident.personal.parameters)
    finally:
        for parameter in resident.slot.parameters:
            parameter.requires_grad_(True)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "qwen2", "opt"])
def test_the_last_norm_is_found_in_other_families(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 40, "num_key_value_heads": 2}
    names = {"gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40}, "opt": small | {"ffn_dim": 32, "word_embed_proj_dim": 16}}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **names.get(family, small))).eval()
    name, norm = final_norm(model)
    with torch.no_grad():
        states = []
        hook = norm.register_forward_hook(lambda module, args, output: states.append(output))
        assert torch.equal(model.base_model(input_ids=IDS).last_hidden_state, states[0])
        hook.remove()
    assert "norm" in type(norm).__name__.lower() and model.get_submodule(name) is norm


def test_a_backbone_that_ends_in_a_projection_is_refused():
    from transformers import AutoConfig, AutoModelForCausalLM

    projecting = AutoConfig.for_model("opt", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32, vocab_size=40, word_embed_proj_dim=8)
    with pytest.raises(BackboneError, match="does not end in a norm of its own"):
        final_norm(AutoModelForCausalLM.from_config(projecting).eval())
