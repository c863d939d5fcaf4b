"""Applying the language-model head directly has the results of the model's own forward pass."""

import pytest
import torch
from transformers import LlamaForCausalLM

from components.alignment.dpo import align_policy
from components.models import head
from components.models.backbone import BackboneError
from components.models.head import apply_lm_head, check_lm_head
from components.models.logprobs import completion_logprobs
from components.models.policy import Policy
from components.models.resident import ResidentPolicy
from components.models.selector_model import Selector, choice_logits
from tests.support.full_logits import completion_logprob, token_logprobs
from tests.support.random_models import build_random

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "gemma2": {"final_logit_softcapping": 0.3},
    "cohere": {"logit_scale": 0.2},
    "cohere2": {"logit_scale": 3.0},
    "granite": {"logits_scaling": 0.25},
    "granitemoe": {"logits_scaling": 6.0, "num_local_experts": 2, "num_experts_per_tok": 1},
    "hyperclovax": {"logits_scaling": 6.0},
    "minicpm3": {"dim_model_base": 4, "num_key_value_heads": 4, "v_head_dim": 4}
    | dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), 4),
    "falcon_h1": {"lm_head_multiplier": 3.0, "mamba_d_ssm": 16, "mamba_n_heads": 2}
    | {"mamba_d_head": 8, "mamba_d_state": 4},
}
"""Model families, each with a value other than 1 for its transformation of the head's output."""
PLAIN = {"llama", "qwen2"}
"""Families that do not transform the head's output."""
ROWS = [([5, 6, 7], [8, 9, 2], [10, 2]), ([11, 12], [13, 2], [14, 15, 16, 17])]


def build(family, **settings):
    return build_random(family, **FAMILIES.get(family, {}), **settings).requires_grad_(False)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return build(request.param)


def test_log_probabilities_are_those_of_the_models_own_log_softmax(model):
    with torch.no_grad():
        logprobs = completion_logprobs(model, ROWS, 0)
        for row, (prompt, *completions) in zip(logprobs, ROWS, strict=True):
            expected = [completion_logprob(model, prompt, completion) for completion in completions]
            assert torch.allclose(row, torch.stack(expected), atol=1e-4)


def test_the_output_of_the_head_is_transformed_in_the_families_that_do_so_alone(model):
    ids = torch.tensor([ROWS[0][0]])
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    plain = model.get_output_embeddings()(states)
    assert torch.equal(plain, apply_lm_head(model, states)) == (model.config.model_type in PLAIN)


def test_a_selectors_two_logits_are_the_models_own(model):
    ids = torch.tensor([ROWS[0][0], [7, 8, 9]])
    with torch.no_grad():
        logits = choice_logits(model, ids, torch.tensor([2, 1]), (20, 30))
        expected = model(input_ids=ids, use_cache=False).logits[[0, 1], [2, 1]][:, [20, 30]]
    assert torch.allclose(logits, expected, atol=1e-5)


def test_trls_fused_head_has_the_same_log_probabilities(model):
    from trl.trainer.utils import add_fused_lm_head

    from tests.support.trl_oracle import completion_positions_only  # TRL takes longer to import than to use

    patched = build(model.config.model_type)
    add_fused_lm_head(patched)
    ids = [*ROWS[0][0], *ROWS[0][1]]
    labels = torch.tensor([ids])
    with torch.no_grad(), completion_positions_only():
        logprobs = patched(input_ids=labels, labels=labels, fused_lm_head=True).log_probs[0]
        expected = token_logprobs(model, ids)[range(len(ids) - 1), ids[1:]]
    assert torch.allclose(logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_supported_family_passes_the_check_which_changes_neither_model_nor_generator(model, dtype):
    checked = build(model.config.model_type).to(dtype)
    weights = {name: tensor.clone() for name, tensor in checked.state_dict().items()}
    generator_state = torch.get_rng_state()
    ids = torch.tensor([[3, 4]])
    states = checked.base_model(input_ids=ids, use_cache=False).last_hidden_state
    check_lm_head(checked, "it")
    assert torch.equal(torch.get_rng_state(), generator_state)
    for name, tensor in checked.state_dict().items():
        assert torch.equal(tensor, weights[name])
    after = checked.base_model(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.equal(after, states), "the hook of the check is removed"


@pytest.fixture(params=[False, True], ids=["without-bias", "with-bias"])
def half_model(request, monkeypatch):
    """A model in bf16, whose head is multiplied in parts of seven rows."""
    monkeypatch.setattr(head, "WEIGHT_ROWS", 7)
    model = build("llama").to(torch.bfloat16)
    if request.param:
        model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, 40).bfloat16(), requires_grad=False)
    return model


def test_the_logits_of_a_model_of_half_precision_and_their_gradient_are_not_rounded(half_model):
    numbers = torch.Generator().manual_seed(0)
    states = (8 * torch.randn(3, 5, 16, generator=numbers)).bfloat16().requires_grad_()
    output = half_model.lm_head
    bias = None if output.bias is None else output.bias.float()
    expected = torch.nn.functional.linear(states.float(), output.weight.float(), bias)
    logits = apply_lm_head(half_model, states)
    assert logits.dtype == torch.float32
    assert torch.allclose(logits, expected, atol=1e-5)
    assert torch.allclose(apply_lm_head(half_model, states, [3, 9]), expected[..., [3, 9]], atol=1e-5)
    assert (output(states).float() - expected).abs().max() > 1e-3
    weights = torch.linspace(-1, 1, 3 * 5 * 40).reshape(3, 5, 40)
    gradient, target = (torch.autograd.grad((each * weights).sum(), states)[0] for each in (logits, expected))
    assert torch.equal(gradient, target)


def test_a_scale_in_a_configuration_that_the_model_ignores_is_not_applied():
    check_lm_head(build("mpt", d_model=16, n_heads=2, n_layers=1, max_seq_len=32, logit_scale=7.0), "mpt")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-2, 1.0])
def test_a_family_with_an_unsupported_cap_is_refused_for_any_size_of_its_logits(dtype, scale):
    capped = build("recurrent_gemma", lru_width=16, logits_soft_cap=30.0, block_types=["recurrent"]).to(dtype)
    capped.get_output_embeddings().weight.normal_().mul_(scale)
    words = r"backbone 'hub/it' \(recurrent_gemma\) .*head.py .*: use a backbone of another family"
    with pytest.raises(BackboneError, match=words):
        check_lm_head(capped, "hub/it")


# --- loading


def load_for_alignment(recipe, folder):
    pair = {"prompt": "p", "chosen_ids": [5, 2], "rejected_ids": [6, 2]}
    align_policy(Policy(recipe.policy, "cpu"), recipe.alignment.dpo, [pair], folder, [], 0)


@pytest.mark.parametrize(
    "load",
    [
        lambda recipe, folder: ResidentPolicy(recipe.policy, "cpu"),
        lambda recipe, folder: Selector(recipe.selector, "cpu"),
        load_for_alignment,
    ],
    ids=["policy", "selector", "alignment"],
)
def test_code_that_applies_the_head_refuses_an_unsupported_backbone_when_it_loads_it(
    load, debug, tmp_path, monkeypatch
):
    forward = LlamaForCausalLM.forward

    def double_logits(self, *args, **options):
        output = forward(self, *args, **options)
        output.logits = 2 * output.logits
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", double_logits)
    with pytest.raises(BackboneError, match=r"backbone 'tiny-random' \(llama\) computes its logits"):
        load(debug, tmp_path)
