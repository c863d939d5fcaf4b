"""PEFT folders of other tools as the reference of DPO: used, or refused before anything trains."""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from components.alignment.dpo import align_policy, prepare_model
from components.config import BackboneConfig, LoraConfig, RecipeError
from components.models.adapters import AdapterSlot, attach_lora, export_adapter, read_adapter
from components.models.backbone import load_backbone
from components.models.peft_folder import check_adapter_folder, read_shapes
from components.models.policy import Policy
from components.models.store import AdapterError
from components.recipes import check_recipe, load_recipe
from tests.support.lora_models import build_family, write_family

TINY = BackboneConfig(name="tiny-random")
ATTENTION = ["q_proj", "v_proj"]


def save_with_peft(folder: Path, model, **options) -> Path:
    """An adapter as PEFT saves it, with random values."""
    embeddings = options.pop("save_embedding_layers", "auto")
    config = {"r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM", "target_modules": ATTENTION}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**config | options))
    generator = torch.Generator().manual_seed(0)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.05, generator=generator)
    wrapped.save_pretrained(str(folder), save_embedding_layers=embeddings)
    return folder


def with_target(module: str) -> dict[str, object]:
    return {"target_modules": ["q_proj", module], "save_embedding_layers": False}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """An adapter that recipes can use."""
    return save_with_peft(tmp_path_factory.mktemp("plain") / "adapter", load_backbone(TINY, "cpu"))


@pytest.fixture
def folder(plain, tmp_path):
    """A copy of it, which tests change."""
    return Path(shutil.copytree(plain, tmp_path / "adapter"))


def change_options(folder: Path, **values) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def validate(folder: Path, *overrides: str) -> tuple[str, ...]:
    """What `fed-rlhf check` does with a recipe that names a reference adapter."""
    dpo = [f"alignment.dpo.reference_adapter={folder}", "alignment.dpo.reference=sft"]
    return check_recipe(load_recipe("debug", [*dpo, *overrides])).unread


def test_options_without_an_effect_on_the_tensors_are_accepted(folder):
    change_options(folder, init_lora_weights="eva", eva_config={"rho": 1.0}, ensure_weight_tying=True)
    assert validate(folder) == ()


def test_an_option_is_reported_before_missing_tensors(folder):
    change_options(folder, use_rslora=True)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match="uses use_rslora, which is not supported"):
        validate(folder)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"use_rslora": True}, "uses use_rslora, which is not supported"),
        ({"use_dora": True}, "uses use_dora, which"),
        ({"target_modules": r".*\.(q_proj|v_proj)$"}, "uses target_modules "),
        ({"modules_to_save": ["lm_head"]}, "uses modules_to_save, which"),
        ({"bias": "all"}, "uses bias, which"),
        ({"lora_bias": True}, "uses lora_bias, which"),
        ({"rank_pattern": {"q_proj": 1}}, "uses rank_pattern, which"),
        ({"alpha_pattern": {"q_proj": 1}}, "uses alpha_pattern, which"),
        ({"init_lora_weights": "pissa"}, "uses init_lora_weights 'pissa', which"),
        ({"trainable_token_indices": [1]}, "uses trainable_token_indices, which"),
        ({"save_embedding_layers": True}, "lm_head.weight is no matrix A or B"),
        (with_target("embed_tokens"), "embed_tokens.lora_embedding_A is no matrix A or B"),
        (with_target("lm_head"), "lm_head.lora_A.weight is an embedding or an output layer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_adapter_with_what_recipes_do_not_have_is_refused_by_the_check(tmp_path, options, part):
    folder = save_with_peft(tmp_path / "adapter", load_backbone(TINY, "cpu"), **options)
    with pytest.raises(AdapterError) as refusal:
        validate(folder)
    assert str(refusal.value).startswith(f"alignment.dpo.reference_adapter {folder}: ")
    assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": "all-linear"},
        {"layers_to_transform": 0},
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        {"exclude_modules": ["model.layers.0.self_attn.q_proj"]},
        {"init_lora_weights": "gaussian"},
    ],
)
@pytest.mark.parametrize("reference", ["sft", "round_start"])
def test_an_adapter_of_another_selection_of_layers_is_trained_and_saved(debug, tmp_path, options, reference):
    folder = save_with_peft(tmp_path / "adapter", load_backbone(TINY, "cpu"), **options)
    validate(folder)
    policy = Policy(debug.policy, "cpu")
    values = {"reference": reference, "reference_adapter": str(folder), "epochs": 1, "lr": 0.01}
    dpo = debug.alignment.dpo.model_copy(update=values)
    pairs = [{"prompt": "order", "chosen_ids": [9, 10, 2], "rejected_ids": [11, 12, 2]}]
    saved = align_policy(policy, dpo, pairs, tmp_path / "steps", [], seed=0).adapter
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        opened = Policy(debug.policy, "cpu", saved).model(input_ids=ids).logits
        assert torch.allclose(policy.model(input_ids=ids).logits, opened, atol=1e-5)
    tensors, lora = read_adapter(saved)
    slot = AdapterSlot(attach_lora(load_backbone(TINY, "cpu"), lora))
    assert set(slot.names) == set(tensors)


def test_a_missing_folder_is_refused_by_the_check(tmp_path):
    with pytest.raises(RecipeError, match="reference_adapter: there is no file or folder .*nowhere"):
        validate(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "word"),
    [(content, "damaged") for content in (b"", b"\x05", b"\xff" * 16, b"\x02" + b"\0" * 7 + b"[]")]
    + [(b"\x02" + b"\0" * 7 + b"x{", "damaged"), (None, "missing there")],
)
def test_a_file_of_tensors_that_is_damaged_or_missing_is_refused_by_the_check(folder, content, word):
    path = folder / "adapter_model.safetensors"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(AdapterError, match=f"adapter_model.safetensors is {word}"):
        validate(folder)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "adapter_config.json cannot be read"),
        ("[]", "adapter_config.json has peft_type None"),
        ('{"peft_type": "IA3"}', "adapter_config.json has peft_type 'IA3'"),
    ],
)
def test_a_configuration_of_something_else_is_refused_by_the_check(folder, content, part):
    (folder / "adapter_config.json").write_text(content)
    with pytest.raises(AdapterError, match=part):
        validate(folder)


def test_a_factor_without_its_other_one_is_refused_by_the_check(folder):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    del tensors[min(tensors).replace("lora_A", "lora_B")]
    save_file(tensors, path)
    with pytest.raises(AdapterError, match="layers.0.self_attn.q_proj.lora_B.weight is missing"):
        validate(folder)


def test_a_rank_that_is_not_the_configured_one_is_refused_by_the_check(folder):
    change_options(folder, r=4)
    with pytest.raises(AdapterError, match="which is not of rank r = 4"):
        validate(folder)


def test_the_shapes_are_read_from_the_header_alone(plain):
    path = plain / "adapter_model.safetensors"
    assert read_shapes(path) == {name: tuple(tensor.shape) for name, tensor in load_file(path).items()}


# --- the backbone


def test_an_adapter_of_another_backbone_is_refused_by_the_check_or_before_the_model_trains(
    debug, tmp_path, monkeypatch
):
    folder = save_with_peft(tmp_path / "adapter", build_family("llama", tied=True))
    words = "q_proj with 16 inputs and 16 outputs, and the backbone .* has no such layer"
    with pytest.raises(AdapterError, match=words):
        validate(folder)
    monkeypatch.setattr("components.models.memory.FAMILIES", {})  # as of a family that is not known
    dpo = debug.alignment.dpo.model_copy(update={"reference": "sft", "reference_adapter": str(folder)})
    with pytest.raises(AdapterError, match=words):
        prepare_model(Policy(debug.policy, "cpu"), dpo, 0)


def test_an_adapter_of_more_layers_than_the_recipe_uses_is_refused_by_the_check(plain):
    with pytest.raises(AdapterError, match="layers.1.self_attn.q_proj with 32 inputs"):
        validate(plain, "policy.backbone.layers=1")


def test_an_adapter_with_another_record_of_layers_is_refused_by_the_check(tmp_path):
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.zeros(2, 32), name.format("B"): torch.zeros(32, 2)}
    lora = LoraConfig(r=2, alpha=4, target_modules=["q_proj"])
    folder = export_adapter(tensors, lora, TINY.model_copy(update={"layers": 1}), tmp_path / "adapter")
    validate(folder, "policy.backbone.layers=1")
    with pytest.raises(AdapterError, match="trained on the first 1 layers of its backbone, and 2 are used"):
        validate(folder)


@pytest.mark.parametrize("family", ["gpt2", "gemma", "qwen2"])
def test_an_adapter_of_a_familys_own_backbone_fits(tmp_path, family):
    backbone = write_family(family, True, tmp_path / "backbone")
    folder = save_with_peft(tmp_path / "adapter", load_backbone(backbone, "cpu"), target_modules="all-linear")
    assert check_adapter_folder(folder, "key", backbone)


def test_a_method_without_alignment_on_the_server_does_not_use_the_reference_adapter(tmp_path):
    with pytest.raises(AdapterError):
        validate(tmp_path)
    validate(tmp_path, "federation.method=drift", "federation.options={}")
