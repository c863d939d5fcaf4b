"""Applying the language-model head by oneself gives what the model's own forward pass gives, or is refused."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from components.config import BackboneConfig
from components.learning.policy import ResidentPolicy, completion_logprobs
from components.models.backbone import BackboneError, load_backbone
from components.models.head import check_head, head_logits
from components.models.selector import Selector, choice_logits

SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
MAMBA = {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 4}
FAMILIES = {
    "llama": {}, "qwen2": {}, "gemma2": {"final_logit_softcapping": 0.3}, "cohere": {"logit_scale": 0.2}, "cohere2": {"logit_scale": 3.0},
    "granite": {"logits_scaling": 0.25}, "granitemoe": {"logits_scaling": 6.0, **EXPERTS}, "hyperclovax": {"logits_scaling": 6.0},
    "minicpm3": {"dim_model_base": 4, "q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4},
    "falcon_h1": {"lm_head_multiplier": 3.0, **MAMBA}}
"""Families of models, with what each does to the head's output set to something that is not one."""
PLAIN = {"llama", "qwen2"}
ROWS = [([5, 6, 7], [8, 9, 2], [10, 2]), ([11, 12], [13, 2], [14, 15, 16, 17])]


def tiny(family, **more):
    config = AutoConfig.for_model(family, **SMALL, **FAMILIES.get(family, {}), **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
        model.get_output_embeddings().weight.normal_()
    return model


def own_logprobs(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny(request.param)


def test_log_probabilities_are_those_of_the_models_own_log_softmax(model):
    with torch.no_grad():
        found = completion_logprobs(model, ROWS, 0, "cpu")
    expected = [[sum(own_logprobs(model, [*prompt, *completion])[len(prompt) - 1 + n, token] for n, token in enumerate(completion)) for completion in completions]
                for prompt, *completions in ROWS]
    assert torch.allclose(found, torch.tensor(expected), atol=1e-4)
    states = model.base_model(input_ids=torch.tensor([ROWS[0][0]]), use_cache=False).last_hidden_state
    same = torch.equal(model.get_output_embeddings()(states), head_logits(model, states))
    assert same == (model.config.model_type in PLAIN), "what the head gives is changed where the family changes it, and nowhere else"


def test_a_selectors_two_logits_are_the_models_own(model):
    ids = torch.tensor([ROWS[0][0], [7, 8, 9]])
    with torch.no_grad():
        assert torch.allclose(choice_logits(model, ids, torch.tensor([2, 1]), (20, 30)), model(input_ids=ids, use_cache=False).logits[[0, 1], [2, 1]][:, [20, 30]], atol=1e-5)


def test_trls_fused_head_gives_the_same(model):
    from trl.trainer.utils import add_fused_lm_head

    from components.alignment.dpo import completion_positions_only

    patched = tiny(model.config.model_type)
    add_fused_lm_head(patched)
    ids = [*ROWS[0][0], *ROWS[0][1]]
    with torch.no_grad(), completion_positions_only():
        found = patched(input_ids=torch.tensor([ids]), labels=torch.tensor([ids]), fused_lm_head=True).log_probs[0]
    assert torch.allclose(found, own_logprobs(model, ids)[range(len(ids) - 1), ids[1:]], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_family_that_is_known_is_let_in_and_nothing_of_it_or_of_a_generator_is_changed(model, dtype):
    copied = tiny(model.config.model_type).to(dtype)
    weights, numbers = {name: tensor.clone() for name, tensor in copied.state_dict().items()}, torch.get_rng_state()
    states = copied.base_model(input_ids=torch.tensor([[3, 4]]), use_cache=False).last_hidden_state
    check_head(copied, "it")
    assert torch.equal(torch.get_rng_state(), numbers) and all(torch.equal(tensor, weights[name]) for name, tensor in copied.state_dict().items())
    assert torch.equal(copied.base_model(input_ids=torch.tensor([[3, 4]]), use_cache=False).last_hidden_state, states), "the hook is gone"


def test_a_configuration_that_names_a_scale_which_its_model_does_not_use_is_no_scale():
    check_head(tiny("mpt", d_model=16, n_heads=2, n_layers=1, max_seq_len=32, logit_scale=7.0), "mpt")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_family_whose_cap_is_not_known_is_refused_whatever_the_size_of_its_logits(dtype):
    for size in (1e-2, 1.0):
        capped = tiny("recurrent_gemma", lru_width=16, logits_soft_cap=30.0, block_types=["recurrent"]).to(dtype)
        capped.get_output_embeddings().weight.mul_(size)
        with pytest.raises(BackboneError, match=r"backbone 'hub/it' \(recurrent_gemma\) makes its logits from .*head.py does not know, .*: use a backbone of another family"):
            check_head(capped, "hub/it")


def test_whoever_applies_the_head_refuses_such_a_backbone_when_it_is_loaded(debug, tmp_path, monkeypatch):
    from components.alignment.dpo import align_policy

    kind = type(load_backbone(BackboneConfig(name="tiny-random"), "cpu"))
    forward = kind.forward

    def doubled(self, *args, **more):
        output = forward(self, *args, **more)
        output.logits = 2 * output.logits
        return output

    monkeypatch.setattr(kind, "forward", doubled)
    pair = {"prompt": "p", "chosen_ids": [5, 2], "rejected_ids": [6, 2]}
    for load in (lambda: ResidentPolicy(debug.policy, "cpu"), lambda: Selector(debug.selector, "cpu"),
                 lambda: align_policy(debug.policy, debug.alignment.dpo, [pair], tmp_path, "cpu", 0, [])):
        with pytest.raises(BackboneError, match=r"backbone 'tiny-random' \(llama\) makes its logits"):
            load()
