"""Targets of LoRA: what PEFT trains is in the adapter, is trained and saved, or the target is refused."""

import json
import re
from functools import cache, partial

import peft
import pytest
import torch

from components.alignment.dpo import align_policy
from components.config import BackboneConfig, DpoObjective, LoraConfig, OptimizerConfig, RecipeError
from components.data.records import Pair
from components.learning.loop import Training
from components.learning.reward_model import RewardTrainingConfig, TrainedReward, train_reward
from components.learning.selector_training import train_selector
from components.models.adapters import AdapterSlot, attach_lora, export_adapter, read_adapter, to_peft_config
from components.models.backbone import fetch_backbone, load_backbone
from components.models.lora_targets import TargetError, check_target_families, lora_sections
from components.models.policy import Policy
from components.models.resident import ResidentPolicy
from components.models.selector import Comparison
from components.models.selector_model import Selector
from components.models.store import AdapterError, AdapterStore
from components.recipes import load_recipe
from tests.support.adapters import random_tensors
from tests.support.lora_models import FAMILIES, build_family, write_family
from tests.support.random_models import build_random
from tests.support.training import train_pairs

LORA = LoraConfig(r=2, alpha=4, dropout=0.0)
PAIRS = [Pair(f"order {n}", "a great film", "a lovely film was great") for n in range(4)]
TRAINING = Training(steps=1, batch_size=4, optimizer=OptimizerConfig(name="adamw", lr=0.05), seed=0)
SHAPES = pytest.mark.parametrize(
    ("family", "tied"), [(family, tied) for family in FAMILIES for tied in (True, False)]
)


def with_targets(*targets) -> LoraConfig:
    return LORA.model_copy(update={"target_modules": list(targets)})


def peft_parameters(model, lora) -> set[str]:
    """Names of the parameters that PEFT alone trains."""
    wrapped = peft.get_peft_model(model, to_peft_config(lora))
    return {name.replace(".default", "") for name, p in wrapped.named_parameters() if p.requires_grad}


def module_names(model) -> list[str]:
    """The last part of the name of each module, and where it is a number, of its child."""
    return sorted({name.rpartition(".")[2] for name, _ in model.named_modules()} - {"", "0", "1"})


# --- what PEFT trains is in the adapter


@SHAPES
def test_what_peft_trains_for_a_target_is_in_the_adapter_or_the_target_is_refused(family, tied):
    build = partial(build_family, family, tied)
    refused = set()
    for target in module_names(build()):
        lora = with_targets(target)
        try:
            slot = AdapterSlot(attach_lora(build(), lora))
        except TargetError as error:
            assert target in str(error)
            refused.add(target)
        else:
            assert set(slot.names) == peft_parameters(build(), lora)
    linears = {name for name in module_names(build()) if name.endswith("proj") or name in ("c_attn", "c_fc")}
    assert set(module_names(build())) - refused == linears


@pytest.mark.parametrize(
    ("target", "part"),
    [
        ("lm_head", "lm_head is an embedding or an output layer"),
        ("model.embed_tokens", "model.embed_tokens is an embedding or an output layer"),
        ("v_porj", "v_porj matches no module of the LlamaForCausalLM: use all-linear, or some of down_proj"),
        ("layers.2.self_attn.q_proj", "matches no module"),
        ("input_layernorm", "a LlamaRMSNorm, and LoRA needs a linear layer"),
        ("mlp", "a LlamaMLP, and LoRA needs a linear layer"),
        ("mix", "mix, a Conv2d"),
        ("all-linear", "all-linear matches no module"),
    ],
)
def test_a_target_that_cannot_have_lora_is_refused_beside_others_that_can(target, part):
    model = build_family("llama", tied=False)
    model.model.layers[0].mlp.mix = torch.nn.Conv2d(1, 1, 1)
    with pytest.raises(TargetError, match=re.escape(part)):
        attach_lora(model, with_targets("q_proj", target))


def test_a_target_by_the_end_of_its_path_is_accepted():
    slot = AdapterSlot(attach_lora(build_family("llama", True), with_targets("1.self_attn.q_proj")))
    assert ["layers.1.self_attn.q_proj" in name for name in slot.names] == [True, True]


@pytest.mark.parametrize(
    ("dropout", "part"), [(0.0, "includes down_proj, which is"), (0.1, "PEFT attaches no LoRA")]
)
def test_all_linear_is_refused_where_peft_lets_it_train_experts_that_are_no_linear_layers(dropout, part):
    model = build_random("mixtral", num_local_experts=2)
    with pytest.raises((TargetError, AdapterError), match=part):
        AdapterSlot(attach_lora(model, LoraConfig(r=2, dropout=dropout)))


def test_parameters_of_peft_that_are_no_matrices_of_linear_layers_are_refused():
    model = peft.get_peft_model(
        build_family("llama", True), peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"])
    )
    with pytest.raises(AdapterError, match="PEFT trains .*embed_tokens.lora_embedding_A.default"):
        AdapterSlot(model)


# --- recipes


@pytest.mark.parametrize("key", ["selector.lora", "policy.lora", "evaluation.judge.selector.lora"])
@pytest.mark.parametrize(
    "target", ["lm_head", "embed_tokens", "model.embed_tokens", "transformer.wte", "wpe"]
)
def test_a_recipe_with_lora_on_embeddings_or_a_head_is_refused(key, target):
    judge = ["evaluation.judge={kind: selector}"] if "judge" in key else []
    words = f"{key}.target_modules: {target} is an embedding or an output layer"
    with pytest.raises(RecipeError, match=words):
        load_recipe("debug", [*judge, f"{key}.target_modules=[q_proj,{target}]"])


def test_a_reward_may_have_lora_on_its_embeddings_and_not_on_its_output_layer():
    reward = "rewards.helpful.training.lora.target_modules"
    load_recipe("multi-objective/demo", [f"{reward}=[q_proj,embed_tokens]"])
    with pytest.raises(RecipeError, match="lora.target_modules: score is an embedding or an output"):
        load_recipe("multi-objective/demo", [f"{reward}=[q_proj,score]"])


def test_the_lora_of_every_model_of_a_recipe_is_checked():
    recipe = load_recipe("multi-objective/demo", ["evaluation.judge={kind: selector}"])
    assert {key for key, _, _ in lora_sections(recipe)} == {
        "evaluation.judge.selector.lora",
        "policy.lora",
        "rewards.helpful.training.lora",
        "selector.lora",
    }


@pytest.mark.parametrize("target", ["v_porj", "c_attn", "mlp"])
def test_a_target_that_a_known_backbone_does_not_have_is_refused_before_it_is_loaded(target):
    fetch_backbone("tiny-random")
    recipe = load_recipe("debug", [f"selector.lora.target_modules=[q_proj,{target}]"])
    with pytest.raises(TargetError, match=f"selector.lora.target_modules: {target} is no linear layer"):
        check_target_families(recipe)


def test_targets_of_a_backbone_that_is_not_on_this_machine_are_left_to_its_loading(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    unknown = ["policy.backbone.name=nobody/nothing", "policy.lora.target_modules=[query]"]
    check_target_families(load_recipe("debug", unknown))


# --- what is trained, saved and loaded


@pytest.fixture(scope="module")
def backbones(tmp_path_factory):
    """A function that writes a backbone of a family once."""

    @cache
    def write(family: str, tied: bool) -> BackboneConfig:
        return write_family(family, tied, tmp_path_factory.mktemp("backbone"))

    return write


IDS = torch.tensor([[5, 9, 14, 20, 33, 8]])


def full_logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def unmoved(before, after) -> list[str]:
    return [name for name in before if torch.equal(before[name], after[name])]


def assert_its_files_give_the_models_logits(trained, backbone, slot, model, folder):
    """By the store in the model's slot, by PEFT on a new backbone, and by PEFT's merging of both."""
    store = AdapterStore(folder / "store")
    slot.load(store.get(store.put(trained)))
    expected = full_logits(model)
    path = export_adapter(trained, LORA, backbone, folder / "adapter")
    opened = peft.PeftModel.from_pretrained(load_backbone(backbone, "cpu"), path)
    assert torch.allclose(full_logits(opened), expected, atol=1e-5)
    assert torch.allclose(full_logits(opened.merge_and_unload()), expected, atol=1e-4)


@SHAPES
def test_a_step_of_a_selector_moves_every_tensor_and_its_saved_adapter_gives_its_logits(
    debug, backbones, tmp_path, family, tied
):
    values = {"backbone": backbones(family, tied), "lora": LORA, "max_length": 512}
    selector = Selector(debug.selector.model_copy(update=values), "cpu")
    start = random_tensors(selector.slot, seed=0, scale=0.3)
    trained, _ = train_selector(selector, PAIRS, start, TRAINING)
    assert unmoved(start, trained) == []
    assert set(trained) == peft_parameters(build_family(family, tied), LORA)
    assert_its_files_give_the_models_logits(
        trained, values["backbone"], selector.slot, selector.model, tmp_path
    )
    ids, last = selector.collate([selector.encode(Comparison("order", "a film", "the film"))])
    with torch.no_grad():
        choices = selector.model(input_ids=ids).logits[0, last[0], list(selector.choices)]
        assert torch.allclose(selector.choice_logits(ids, last)[0], choices, atol=1e-5)


@SHAPES
def test_a_step_of_a_clients_dpo_moves_every_tensor_and_its_saved_adapter_gives_its_logits(
    debug, backbones, tmp_path, family, tied
):
    values = {"backbone": backbones(family, tied), "lora": LORA, "max_new_tokens": 30}
    resident = ResidentPolicy(debug.policy.model_copy(update=values), "cpu")
    start = random_tensors(resident.slot, seed=0, scale=0.3)
    trained = train_pairs(resident, PAIRS, start, DpoObjective(), TRAINING).adapter
    assert unmoved(start, trained) == []
    assert_its_files_give_the_models_logits(
        trained, values["backbone"], resident.slot, resident.model, tmp_path
    )


SERVER_CASES = [(family, tied, "base") for family in FAMILIES for tied in (True, False)]
SERVER_CASES += [(name, True, kind) for name in ("gpt2", "llama") for kind in ("sft", "round_start")]


@pytest.mark.parametrize(("family", "tied", "reference"), SERVER_CASES)
def test_the_servers_dpo_moves_every_tensor_and_its_saved_adapter_gives_its_logits(
    debug, backbones, tmp_path, family, tied, reference
):
    """A new adapter takes two steps, since A has no gradient while B is 0."""
    backbone = backbones(family, tied)
    config = debug.policy.model_copy(update={"backbone": backbone, "lora": LORA})
    earlier = AdapterSlot(attach_lora(load_backbone(backbone, "cpu"), LORA))
    start = random_tensors(earlier, seed=1, scale=0.3)
    adapter = str(export_adapter(start, LORA, backbone, tmp_path / "earlier"))
    dpo = debug.alignment.dpo.model_copy(
        update={
            "batch_size": 4,
            "micro_batch_size": 4,
            "lr": 0.05,
            "optimizer": "adamw_torch",
            "epochs": 1 if reference == "round_start" else 2,
            "reference": reference,
            "reference_adapter": None if reference == "base" else adapter,
        }
    )
    policy = Policy(config, "cpu")
    ids = {"chosen_ids": policy.tokenizer.encode("great"), "rejected_ids": policy.tokenizer.encode("film")}
    pairs = [{"prompt": pair.prompt} | ids for pair in PAIRS]
    folder = align_policy(policy, dpo, pairs, tmp_path / "steps", [], seed=0).adapter
    initial = start if reference == "round_start" else earlier.initial_adapter(0)
    assert unmoved(initial, AdapterSlot(policy.model).read()) == []
    expected = full_logits(policy.model)
    assert torch.allclose(full_logits(Policy(config, "cpu", folder).model), expected, atol=1e-4)
    tensors, lora = read_adapter(folder)
    resident = ResidentPolicy(config.model_copy(update={"lora": lora}), "cpu")
    resident.slot.load(tensors)
    assert torch.allclose(full_logits(resident.model), expected, atol=1e-4)


def test_a_reward_with_lora_on_its_embeddings_is_trained_and_merged(backbones):
    training = RewardTrainingConfig(
        backbone=backbones("llama", False), lora=with_targets("embed_tokens"), steps=2, batch_size=4
    )
    reward = TrainedReward(template="{prompt} {response}", training=training)
    before = load_backbone(training.backbone, "cpu").get_input_embeddings().weight
    after = train_reward(reward, PAIRS, 0, "cpu")[0].get_input_embeddings()
    assert not torch.equal(before, after.weight)
    assert type(after) is torch.nn.Embedding


# --- the number of layers


@pytest.fixture
def one_layer(backbones, tmp_path):
    """The first layer of a backbone, and the folder of an adapter for it."""
    backbone = backbones("llama", True).model_copy(update={"layers": 1})
    slot = AdapterSlot(attach_lora(load_backbone(backbone, "cpu"), LORA))
    recorded = backbone.model_copy(update={"revision": "abc"})
    return backbone, export_adapter(slot.initial_adapter(0), LORA, recorded, tmp_path)


def test_an_exported_adapter_records_the_layers_and_the_revision_of_its_backbone(one_layer):
    _, folder = one_layer
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["auto_mapping"] == {"num_hidden_layers": 1}
    assert config["revision"] == "abc"


def test_peft_opens_an_adapter_with_recorded_layers_without_a_warning(recwarn, one_layer):
    backbone, folder = one_layer
    recwarn.clear()  # of those of transformers, which come once
    peft.PeftModel.from_pretrained(load_backbone(backbone, "cpu"), folder)
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("layers", [None, 2])
def test_an_adapter_of_another_number_of_layers_is_refused(debug, one_layer, layers):
    backbone, folder = one_layer
    config = debug.policy.model_copy(update={"backbone": backbone.model_copy(update={"layers": layers})})
    with pytest.raises(AdapterError, match="trained on the first 1 layers of its backbone, and 2 are used"):
        Policy(config, "cpu", folder)
