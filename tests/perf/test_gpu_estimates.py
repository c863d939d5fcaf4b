"""Estimated times on a GPU: numbers of products, hand-computed stages, and the recipes that they cover."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GemmaConfig, GemmaForCausalLM

from components.config import BackboneConfig, FrozenModel, LoraConfig
from components.estimates import policy_model, training_stages
from components.models import fused_lora
from components.models.adapters import attach_lora
from components.models.memory import (
    ForwardShape,
    ModelShape,
    Precision,
    StepShape,
    estimate_forward,
    step_flops,
)
from components.models.selector_model import choice_logits
from components.recipes import RECIPES, load_recipe
from perf.__main__ import main
from perf.gpu_estimates import (
    Data,
    PaperModels,
    estimates,
    paper_recipes,
    sampling_passes,
    show_estimates,
    two_digits,
)
from perf.products import Gpu, Model, Passes, Products, count_layer_products, read_configs, training_passes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "gpu-estimates.md"
ALL_LINEAR = LoraConfig(target_modules="all-linear")
PLAIN = Gpu(bf16=100, tf32=50, fp32=10, bandwidth=50, product_share=0.5, bandwidth_share=0.2, launch=0.25)


def shape_of(name):
    return ModelShape.from_config(read_configs()[name], BackboneConfig(name=name))


def model_recipes():
    """The names of the recipes whose policy is neither the embedded model nor a tiny one."""
    names = {str(path.relative_to(RECIPES).with_suffix("")) for path in RECIPES.rglob("*.yaml")}
    return {name for name in names if "/" in load_recipe(name).policy.backbone.name}


def test_every_recipe_that_names_a_model_of_the_hub_is_estimated():
    assert set(paper_recipes()) == model_recipes()


# --- products


class CountedProducts(TorchDispatchMode):
    """Matrix products by the type of what they multiply."""

    def __init__(self):
        super().__init__()
        self.numbers = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            self.numbers[args[-1].dtype] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("fused", "fp32"), [(False, 759), (True, 2)])
def test_of_the_1010_products_of_a_selectors_micro_batch_2_are_in_fp32(fused, fp32, monkeypatch):
    """They are counted in a narrow bf16 model with as many layers as Gemma-2B.

    Without the fused function, all products with factors are in fp32.
    """
    if not fused:
        monkeypatch.setattr(fused_lora, "_can_fuse", lambda *_: False)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 18, "head_dim": 16}
    config = GemmaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, vocab_size=64)
    backbone = GemmaForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
    model = attach_lora(backbone, ALL_LINEAR).train()
    with CountedProducts() as counted:
        ids, last = torch.arange(24).reshape(2, 12), torch.tensor([11, 8])
        choice_logits(model.get_base_model(), ids, last, (3, 4), one_position=True).sum().backward()
    frozen, factors = count_layer_products(
        shape_of("google/gemma-2b"), ALL_LINEAR, StepShape(2, 12, one_position=True)
    )
    head = 2
    assert frozen + factors + head == counted.numbers.total() == 1010
    assert counted.numbers[torch.float32] == (head if fused else factors + head) == fp32


@pytest.mark.parametrize("recipe", ["summarization/tldr", "personalized/imdb", "multi-objective/hh"])
def test_the_operations_of_training_are_those_of_the_estimates(recipe):
    for stage in training_stages(load_recipe(recipe), prompts=10):
        model = PaperModels().model(stage.backbone, stage.lora)
        flops = training_passes(model, stage.step).flops
        expected = step_flops(model.shape, stage.lora, stage.step)
        if stage.step.one_position:
            expected -= 4 * stage.step.rows * (model.shape.vocabulary - 2) * model.shape.hidden
        assert flops == pytest.approx(expected, rel=1e-12), stage.name


def test_a_backward_pass_for_each_objective_costs_what_one_costs():
    model = Model(shape_of("TinyLlama/TinyLlama-1.1B-Chat-v1.0"), ALL_LINEAR)
    step = StepShape(8, 640, logit_positions=1024)
    none, one, three = (training_passes(model, step, backwards).flops for backwards in (0, 1, 3))
    assert three - one == 2 * (one - none) > 0


@pytest.mark.parametrize(
    ("name", "eight_bit", "precision"),
    [
        ("google/gemma-2b", False, "bf16"),
        ("google/gemma-2b", True, "fp32"),
        ("distilbert/distilgpt2", False, "fp32"),
    ],
)
def test_factors_are_in_fp32_where_the_fused_function_is_not_used(name, eight_bit, precision):
    model = Model(shape_of(name), ALL_LINEAR, eight_bit=eight_bit)
    assert model.factor_precision == precision


def test_products_take_the_time_of_what_bounds_them():
    assert Products(1, flops=200, bytes=10).seconds(PLAIN) == {"bf16 products": 4.0}
    assert Products(1, flops=200, bytes=10, precision="tf32").seconds(PLAIN) == {"tf32 products": 8.0}
    assert Products(1, flops=200, bytes=10, precision="fp32").seconds(PLAIN) == {"fp32 products": 40.0}
    assert Products(1, flops=200, bytes=100).seconds(PLAIN) == {"bandwidth": 10.0}
    products = [Products(1, flops=200, bytes=10), Products(1, flops=50, bytes=20)]
    assert Passes(products).seconds(PLAIN) == {"bf16 products": 4.0, "bandwidth": 2.0}
    assert Passes([products[0].times(2), Products(40, 1, 1)]).seconds(PLAIN) == {"launches": 10.5}


# --- stages


def test_the_rounds_of_a_small_recipe_are_those_of_a_hand_computation():
    """3 clients with 32 pairs each take 4 gradients of 8 rows of 32 + 2 x 16 tokens, in each of 2 rounds."""
    recipe = load_recipe(
        "personalized/imdb",
        [
            "federation.method=feddpo",
            "federation.options={}",
            "federation.rate_decay=null",
            "federation.rounds=2",
            "federation.local_epochs=1",
            "federation.optimizer.accumulation=1",
            "policy.backbone.layers=1",
            "policy.lora={r: 2, alpha: 4, dropout: 0.0, target_modules: [c_fc]}",
            "policy.max_prompt_tokens=32",
            "policy.max_new_tokens=16",
        ],
    )
    rounds = next(each for each in estimates(recipe, Data(train=96)) if each.name == "rounds")
    tokens = 8 * 64
    weights = 768 * (2304 + 768 + 3072) + 3072 * 768
    layer = 2 * tokens * weights
    attention = 2 * tokens * 64 * 768
    factors = 2 * tokens * 2 * (768 + 3072)
    logits = 2 * (8 * 2 * 16) * 50257 * 768
    one = 2 * layer + 3 * attention + 3 * factors + 2 * logits
    (passes,) = rounds.passes
    assert rounds.rows == 8
    assert passes.flops == 2 * 3 * 4 * one


def test_a_decoding_step_reads_the_weights_and_the_keys_and_values_of_all_rows():
    """4 prompts of 10 tokens with 2 completions of 4 in batches of 4: 8 steps at a mean context of 12."""
    model = Model(shape_of("distilbert/distilgpt2"))
    writer = FrozenModel("policy", BackboneConfig(), rows=4, tokens=10, new_tokens=4)
    prefill, decoding = sampling_passes(model, writer, prompts=4, count=2)
    weights = 2 * 6 * 12 * 768**2  # bytes
    cache = 4 * 12 * (2 * 6 * 768 * 2)
    assert decoding.decoding_bytes == 8 * (weights + cache)
    linear = 2 * 6 * 12 * 768**2
    logits = 2 * 50257 * 768
    attention = 4 * 6 * 768
    assert decoding.flops == 8 * 4 * (linear + 12 * attention + logits)
    assert prefill.flops == 4 * 10 * (linear + 5 * attention) + 4 * logits


def test_trees_of_depth_3_have_14_thoughts_that_are_written_and_scored():
    by_name = {each.name: each for each in estimates(load_recipe("reasoning/paper"), Data())}
    evaluator = 2 * (by_name["scores of thoughts"].passes[1].products[1].flops)  # of the head, level 1
    tokens = 2400 * 2 * 1024
    assert evaluator == 2 * tokens * 2 * 152064 * 5120
    thoughts = by_name["thoughts"].passes
    assert {len(passes.products) for passes in thoughts} == {2}, "the writer has no adapter"
    levels = [passes.flops for passes in thoughts[1::2]]
    assert levels[1:] == pytest.approx([2 * levels[0], 4 * levels[0]])


def test_prompts_of_the_evaluator_have_its_full_length():
    by_name = {each.name: each for each in estimates(load_recipe("reasoning/paper"), Data())}
    prefill = by_name["scores of thoughts"].passes[0].products[0]
    shape = shape_of("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B")
    linear = shape.layers * sum(inputs * outputs for _, inputs, outputs in shape.linears)
    attention = 2 * shape.layers * 320 * shape.heads * shape.head_dim
    assert prefill.flops == pytest.approx(2 * 2400 * 2 * 640 * (linear + attention))


@pytest.mark.parametrize(
    ("setting", "precision"), [("dtype=float32", "tf32"), ("tf32=false", "fp32"), ("dtype=auto", "bf16")]
)
def test_frozen_rewards_in_fp32_use_tf32_where_their_section_does(setting, precision):
    overrides = [f"rewards.{name}.{setting}" for name in ("helpful", "harmless")]
    recipe = load_recipe("multi-objective/hh", overrides)
    rewards = next(each for each in estimates(recipe, Data()) if each.name == "rewards")
    assert {each.precision for passes in rewards.passes for each in passes.products} == {precision}


def test_stages_without_known_rows_are_left_out():
    names = [each.name for each in estimates(load_recipe("personalized/imdb"), Data())]
    assert names == ["answers", "judge"]


@pytest.mark.parametrize("name", paper_recipes())
def test_a_batch_of_completions_fits_80_gb_beside_the_weights(name):
    recipe = load_recipe(name)
    policy = policy_model(recipe)
    assert policy.rows > 16
    new_tokens = policy.new_tokens
    if recipe.evaluation.questions is not None:
        new_tokens = max(new_tokens, recipe.evaluation.questions.max_new_tokens)
    shape = PaperModels().model(policy.backbone, policy.lora).shape
    forward = ForwardShape(policy.rows, policy.tokens, new_tokens)
    precision = Precision.of(policy.backbone, on_cuda=True)
    assert estimate_forward(shape, precision, forward, policy.lora).total < 0.9 * 80e9


# --- the table


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.0034, "0.0034"), (0.996, "1.0"), (9.96, "10"), (34567.0, "35,000")]
)
def test_figures_have_two_digits(value, text):
    assert two_digits(value) == text


def test_the_page_has_the_table_of_the_command(capsys):
    show_estimates()
    assert capsys.readouterr().out in PAGE.read_text(encoding="utf-8")


def test_rates_are_options_of_the_command(capsys):
    def rounds(*options):
        with pytest.raises(SystemExit, match="0"):
            main(["gpu-estimates", "--launch", "0", "--fp32", "1e30", "--bandwidth", "1e30", *options])
        return re.findall(r"^\| rounds .* \| ([\d.,]+) \|", capsys.readouterr().out, re.MULTILINE)

    fast, slow = rounds("--bf16", "1e15"), rounds("--bf16", "1e14")
    assert fast
    for first, second in zip(fast, slow, strict=True):
        assert float(second.replace(",", "")) == pytest.approx(10 * float(first.replace(",", "")), rel=0.02)
