"""Applying the language-model head directly has the results of the model's own forward pass."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from components.config import BackboneConfig
from components.models import head
from components.models.backbone import BackboneError, load_backbone
from components.models.head import apply_lm_head, check_lm_head
from components.models.logprobs import completion_logprobs
from components.models.resident import ResidentPolicy
from components.models.selector_model import Selector, choice_logits

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
MAMBA = {
    "mamba_d_ssm": 16,
    "mamba_n_heads": 2,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "gemma2": {"final_logit_softcapping": 0.3},
    "cohere": {"logit_scale": 0.2},
    "cohere2": {"logit_scale": 3.0},
    "granite": {"logits_scaling": 0.25},
    "granitemoe": {"logits_scaling": 6.0, **EXPERTS},
    "hyperclovax": {"logits_scaling": 6.0},
    "minicpm3": {
        "dim_model_base": 4,
        "q_lora_rank": 4,
        "kv_lora_rank": 4,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
    },
    "falcon_h1": {"lm_head_multiplier": 3.0, **MAMBA},
}
"""Model families, each with a value other than 1 for its transformation of the head's output."""
PLAIN = {"llama", "qwen2"}
"""Families that do not transform the head's output."""
ROWS = [([5, 6, 7], [8, 9, 2], [10, 2]), ([11, 12], [13, 2], [14, 15, 16, 17])]


def build_tiny(family, **settings):
    config = AutoConfig.for_model(family, **SMALL, **FAMILIES.get(family, {}), **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
        model.get_output_embeddings().weight.normal_()
    return model


def full_logprobs(model, ids):
    """Log-softmax of the logits of the model's own forward pass, [len(ids), V]."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    torch.set_num_threads(1)
    return build_tiny(request.param)


def test_log_probabilities_are_those_of_the_models_own_log_softmax(model):
    with torch.no_grad():
        logprobs = completion_logprobs(model, ROWS, 0)
    for row, (prompt, *completions) in zip(logprobs, ROWS, strict=True):
        for logprob, completion in zip(row, completions, strict=True):
            tokens = full_logprobs(model, [*prompt, *completion])
            expected = sum(tokens[len(prompt) - 1 + n, token] for n, token in enumerate(completion))
            assert torch.allclose(logprob, expected, atol=1e-4)


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


@pytest.fixture(scope="module")
def add_fused_lm_head():
    """TRL's patch of a model, whose import takes longer than its use."""
    from trl.trainer.utils import add_fused_lm_head

    return add_fused_lm_head


def test_trls_fused_head_has_the_same_log_probabilities(model, add_fused_lm_head):
    from tests.support.trl_oracle import completion_positions_only

    patched = build_tiny(model.config.model_type)
    add_fused_lm_head(patched)
    ids = [*ROWS[0][0], *ROWS[0][1]]
    labels = torch.tensor([ids])
    with torch.no_grad(), completion_positions_only():
        logprobs = patched(input_ids=labels, labels=labels, fused_lm_head=True).log_probs[0]
    expected = full_logprobs(model, ids)[range(len(ids) - 1), ids[1:]]
    assert torch.allclose(logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_supported_family_passes_the_check_which_changes_neither_model_nor_generator(model, dtype):
    checked = build_tiny(model.config.model_type).to(dtype)
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
    model = build_tiny("llama").to(torch.bfloat16).requires_grad_(False)
    if request.param:
        model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, 40).bfloat16(), requires_grad=False)
    return model


@pytest.fixture
def half_states():
    numbers = torch.Generator().manual_seed(0)
    return (8 * torch.randn(3, 5, 16, generator=numbers)).bfloat16().requires_grad_()


def full_precision_logits(model, states):
    bias = None if model.lm_head.bias is None else model.lm_head.bias.float()
    return torch.nn.functional.linear(states.float(), model.lm_head.weight.float(), bias)


def test_the_logits_of_a_model_of_half_precision_are_not_rounded(half_model, half_states):
    expected = full_precision_logits(half_model, half_states)
    logits = apply_lm_head(half_model, half_states)
    assert logits.dtype == torch.float32
    assert torch.allclose(logits, expected, atol=1e-5)
    assert torch.allclose(apply_lm_head(half_model, half_states, [3, 9]), expected[..., [3, 9]], atol=1e-5)
    rounded = half_model.lm_head(half_states).float()
    assert (rounded - expected).abs().max() > 1e-3


def test_the_gradient_of_unrounded_logits_is_that_of_the_product_in_fp32(half_model, half_states):
    weights = torch.linspace(-1, 1, 3 * 5 * 40).reshape(3, 5, 40)
    (gradient,) = torch.autograd.grad((apply_lm_head(half_model, half_states) * weights).sum(), half_states)
    expected = (full_precision_logits(half_model, half_states) * weights).sum()
    assert torch.equal(gradient, torch.autograd.grad(expected, half_states)[0])


def test_a_scale_in_a_configuration_that_the_model_ignores_is_not_applied():
    model = build_tiny("mpt", d_model=16, n_heads=2, n_layers=1, max_seq_len=32, logit_scale=7.0)
    check_lm_head(model, "mpt")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-2, 1.0])
def test_a_family_with_an_unsupported_cap_is_refused_for_any_size_of_its_logits(dtype, scale):
    capped = build_tiny("recurrent_gemma", lru_width=16, logits_soft_cap=30.0, block_types=["recurrent"]).to(
        dtype
    )
    capped.get_output_embeddings().weight.mul_(scale)
    words = r"backbone 'hub/it' \(recurrent_gemma\) .*head.py .*: use a backbone of another family"
    with pytest.raises(BackboneError, match=words):
        check_lm_head(capped, "hub/it")


# --- loading


def load_resident_policy(recipe, folder):
    ResidentPolicy(recipe.policy, "cpu")


def load_selector(recipe, folder):
    Selector(recipe.selector, "cpu")


def load_for_alignment(recipe, folder):
    from components.alignment.dpo import DpoPair, align_policy
    from components.models.policy import Policy

    pair = DpoPair(prompt="p", chosen_ids=[5, 2], rejected_ids=[6, 2])
    align_policy(Policy(recipe.policy, "cpu"), recipe.alignment.dpo, [pair], folder, [], 0)


@pytest.mark.parametrize("load", [load_resident_policy, load_selector, load_for_alignment])
def test_code_that_applies_the_head_refuses_an_unsupported_backbone_when_it_loads_it(
    load, debug, tmp_path, monkeypatch
):
    model_type = type(load_backbone(BackboneConfig(name="tiny-random"), "cpu"))
    forward = model_type.forward

    def double_logits(self, *args, **options):
        output = forward(self, *args, **options)
        output.logits = 2 * output.logits
        return output

    monkeypatch.setattr(model_type, "forward", double_logits)
    with pytest.raises(BackboneError, match=r"backbone 'tiny-random' \(llama\) computes its logits"):
        load(debug, tmp_path)
