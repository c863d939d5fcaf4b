"""8 bits: refused in a sentence where they cannot be had; where bitsandbytes is installed, frozen weights of 8 bits under fp32 adapters, and moments of 8 bits."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from components.config import BackboneConfig, LoraConfig, OptimizerConfig, RecipeError
from components.federation.clients import PolicyLearner, SelectorLearner
from components.learning.local import build_optimizer
from components.learning.policy import ResidentPolicy, pair_logprobs
from components.models.adapters import AdapterSlot, attach
from components.models.backbone import load_backbone
from components.models.eight_bit import EightBitError, check
from components.models.selector import Comparison, Selector
from components.recipes import load_recipe

QUANTISED = BackboneConfig(name="tiny-random", quantization="8bit")
PAIRS = [{"prompt": f"paper {i}" + " about trees" * i, "chosen": f"it shows that {i} holds", "rejected": "no " * (i + 1), "pair_id": str(i), "client_id": "ada", "domain": ""}
         for i in range(6)]
POLICY, OPTIMIZER = "policy.backbone.quantization=8bit", "federation.optimizer.name=adamw_8bit"


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)


def test_without_the_library_every_part_that_asks_for_8_bits_says_so_before_anything_is_loaded_or_trained(missing):
    needs = r"'8bit', but the library bitsandbytes cannot be imported here .*: pip install 'fed-rlhf\[8bit\]', or set backbone.quantization to 'none'\.$"
    with pytest.raises(EightBitError, match=f"^backbone.quantization is {needs}"):
        load_backbone(QUANTISED, "cpu")
    with pytest.raises(EightBitError, match="^backbone.quantization is"):
        PolicyLearner(load_recipe("debug", [POLICY, "federation.method=feddpo"]), "cpu", "dpo")
    for build in (lambda recipe: SelectorLearner(recipe, "cpu"), lambda recipe: PolicyLearner(recipe, "cpu", "sft")):
        with pytest.raises(EightBitError, match=r"^federation.optimizer.name is 'adamw_8bit', but .* or set federation.optimizer.name to 'adamw'\.$"):
            build(load_recipe("debug", [OPTIMIZER]))
    with pytest.raises(EightBitError, match="^optimizer.name is 'adamw_8bit', but the library bitsandbytes"):
        build_optimizer([torch.nn.Parameter(torch.ones(1))], OptimizerConfig(name="adamw_8bit"))


@pytest.mark.parametrize("value", ["8bit", "adamw_8bit"])
def test_a_device_that_the_library_cannot_use_is_named_with_the_librarys_reason(monkeypatch, value):
    def fail(*_, **__):
        raise NameError("name 'str2optimizer8bit' is not defined\nand more")

    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(__version__="0.1", nn=SimpleNamespace(Linear8bitLt=fail), optim=SimpleNamespace(AdamW8bit=fail)))
    with pytest.raises(EightBitError) as error:
        check("x.name", value, "cpu")
    assert str(error.value).startswith(f"x.name is '{value}', which bitsandbytes 0.1 cannot do on cpu (name 'str2optimizer8bit' is not defined): take another device")


@pytest.mark.parametrize("reference", ["sft", "round_start"])
def test_a_reference_that_begins_with_an_adapter_is_refused_for_a_policy_of_8_bits(reference):
    with pytest.raises(RecipeError, match=f"alignment.dpo.reference '{reference}' begins with an adapter, which a policy of 8 bits would round"):
        load_recipe("debug", [POLICY, f"alignment.dpo.reference={reference}", "alignment.dpo.reference_adapter=somewhere"])


# --- with the library

@pytest.fixture
def installed():
    return pytest.importorskip("bitsandbytes", reason="bitsandbytes (the extra 8bit) is not installed")


@pytest.fixture
def resident(installed, debug):
    torch.set_num_threads(1)
    return ResidentPolicy(debug.policy.model_copy(update={"backbone": QUANTISED, "max_new_tokens": 20}), "cpu")


def random_adapter(slot: AdapterSlot, seed: int = 1, scale: float = 0.2):
    numbers = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(p.shape, generator=numbers) for n, p in zip(slot.names, slot.parameters, strict=True)}


@pytest.mark.parametrize("layers", [None, 1])
def test_the_linear_layers_but_the_head_have_8_bits_and_answer_almost_as_before(installed, layers):
    plain, quantised = (load_backbone(BackboneConfig(name="tiny-random", layers=layers, quantization=q), "cpu") for q in ("none", "8bit"))
    assert len(quantised.model.layers) == (layers or 2) and not quantised.training and not any(p.requires_grad for p in quantised.parameters())
    kinds = {name: p.dtype for name, p in quantised.named_parameters()}
    assert {kinds[name] for name in kinds if "_proj." in name} == {torch.int8}
    assert {kinds[name] for name in kinds if "_proj." not in name} == {torch.float32} and quantised.get_output_embeddings().weight.dtype == torch.float32
    ids = torch.arange(5, 45)[None]
    with torch.inference_mode():
        exact, near = plain(ids).logits, quantised(ids).logits
    assert 0 < (exact - near).abs().max() < 0.02 * exact.abs().max()


def test_the_generators_are_left_as_they_were_by_the_check(installed):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    check("x", "8bit", "cpu")
    check("x", "adamw_8bit", "cpu")
    assert torch.equal(torch.rand(2), expected)


def test_adapters_are_fp32_and_with_them_off_the_policy_is_the_quantised_backbone(resident):
    assert {p.dtype for p in resident.slot.parameters} == {torch.float32}
    assert {name for name, p in resident.model.named_parameters() if p.requires_grad} == {name for name, _ in resident.model.named_parameters() if ".lora_" in name}
    plain = load_backbone(QUANTISED, "cpu")
    resident.slot.load(random_adapter(resident.slot))
    rows = [resident.encode(p["prompt"], p["chosen"]) for p in PAIRS]
    reference = resident.score(rows, 3, reference=True)
    assert not np.allclose(reference, resident.score(rows, 3), atol=1e-2)
    resident.model = plain_peft = attach(plain, LoraConfig())      # B = 0: the backbone itself
    slot = AdapterSlot(plain_peft)
    slot.load(slot.initial_adapter(0))
    assert np.allclose(reference, resident.score(rows, 3), atol=1e-3)


def test_a_policy_of_8_bits_is_trained_after_it_was_scored_and_gives_the_same_bytes_again(installed, debug):
    recipe = load_recipe("debug", [POLICY, OPTIMIZER, "federation.method=feddpo", "federation.local_steps=6", "federation.batch_size=4", "federation.optimizer.lr=1e-2", "policy.lora.r=8"])
    trained = []
    for _ in range(2):
        learner = PolicyLearner(recipe, "cpu", "dpo")
        before = {name: p.clone() for name, p in learner.model.named_parameters() if not p.requires_grad}
        adapter, metrics = learner.train(PAIRS, learner.initial_adapter(0), 3)
        assert all(torch.equal(p, before[name]) for name, p in learner.model.named_parameters() if not p.requires_grad)
        assert metrics["loss_last"] < metrics["loss_first"] and {t.dtype for t in adapter.values()} == {torch.float32}
        trained.append(adapter)
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


def test_gradients_go_through_weights_of_8_bits_almost_as_through_the_exact_ones(resident, debug):
    exact = ResidentPolicy(debug.policy.model_copy(update={"max_new_tokens": 20}), "cpu")
    adapter, rows = random_adapter(exact.slot, scale=0.02), [exact.encode(p["prompt"], p["chosen"]) for p in PAIRS]
    gradients = []
    for one in (exact, resident):
        one.slot.load(adapter)
        one.model.eval()
        one.logprobs(rows).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in one.slot.parameters]))
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99


def test_a_selector_of_8_bits_scores_several_adapters_in_one_batch_as_one_after_the_other(installed, debug):
    selector = Selector(debug.selector.model_copy(update={"backbone": QUANTISED}), "cpu")
    adapters = [random_adapter(selector.slot, seed) for seed in range(3)]
    comparisons = [Comparison(p["prompt"], p["chosen"], p["rejected"]) for p in PAIRS]
    together = selector.ensemble_logits(comparisons, adapters)
    for adapter, logits in zip(adapters, together, strict=True):
        selector.slot.load(adapter)
        assert np.allclose(selector.logits(comparisons), logits, atol=1e-2)


def test_the_moments_of_adamw_8bit_have_8_bits_and_its_steps_are_near_those_of_adamw(installed):
    numbers = torch.Generator().manual_seed(0)
    start, slopes = torch.randn(64, 128, generator=numbers), torch.randn(5, 64, 128, generator=numbers)
    ends = {}
    for name in ("adamw", "adamw_8bit"):
        weight = torch.nn.Parameter(start.clone())
        optimizer = build_optimizer([weight], OptimizerConfig(name=name, lr=1e-2, betas=[0.9, 0.95], weight_decay=0.1))
        for slope in slopes:
            weight.grad = slope.clone()
            optimizer.step()
        ends[name] = weight.detach() - start
    assert type(optimizer).__name__ == "AdamW8bit" and {optimizer.state[weight][state].dtype for state in ("state1", "state2")} == {torch.uint8}
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95) and optimizer.param_groups[0]["weight_decay"] == 0.1
    assert torch.cosine_similarity(ends["adamw"].flatten(), ends["adamw_8bit"].flatten(), dim=0) > 0.99
    assert not torch.equal(ends["adamw"], ends["adamw_8bit"])


def test_a_policy_of_8_bits_is_aligned_with_an_adapter_that_is_fp32_while_it_is_trained(installed, debug, tmp_path):
    from components.alignment.dpo import build_trainer, completion_positions_only
    from components.models.policy import Policy

    policy = Policy(debug.policy.model_copy(update={"backbone": QUANTISED}), "cpu")
    rows = [{"prompt": p["prompt"], "chosen_ids": [40, 41, 2], "rejected_ids": [50, 2]} for p in PAIRS]
    with completion_positions_only():
        trainer = build_trainer(policy, rows, debug.alignment.dpo.model_copy(update={"lr": 1e-6, "batch_size": 2, "micro_batch_size": 2, "epochs": 1}), tmp_path, 0)
        before = {name: p.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
        trainer.train()
    after = dict(trainer.model.named_parameters())
    assert {after[name].dtype for name in before} == {torch.float32}
    assert any(not torch.equal(after[name], p) for name, p in before.items() if ".lora_A." in name), "a step of 1e-6 is lost in bf16"


def test_a_policy_of_8_bits_answers_with_an_adapter_from_a_folder(resident, tmp_path):
    from components.models.adapters import export_adapter
    from components.models.policy import Policy

    config = resident.policy.config
    folder = export_adapter(random_adapter(resident.slot), config.lora, "tiny-random", tmp_path / "adapter")
    policy = Policy(config, "cpu", folder)
    assert {p.dtype for name, p in policy.model.named_parameters() if ".lora_" in name} == {torch.float32}
    assert len(policy.generate(["paper"], 0)[0]) == 1
    assert np.isfinite(pair_logprobs(resident, PAIRS, 2)).all()
