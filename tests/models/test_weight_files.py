"""A loaded model has the weights of its files, and a model of the hub the same ones when a run is resumed."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from components.config import BackboneConfig
from components.models.backbone import BackboneError, fetch_backbone, load_backbone
from components.models.weight_files import first_other_weight, hub_snapshot
from tests.support.random_models import build_random


@pytest.fixture(params=["gpt2", "llama", "qwen2"])
def saved(request, tmp_path):
    model = build_random(request.param)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_has_the_weights_of_its_files_even_where_a_row_is_nan(saved):
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert first_other_weight(model, str(saved), None) is None
    assert first_other_weight(model.to(torch.bfloat16), str(saved), None) is None
    path = saved / "model.safetensors"
    weights = load_file(path)
    next(iter(weights.values()))[0] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert first_other_weight(model, str(saved), None) is None


@pytest.mark.parametrize("end", [0, -1])
def test_each_weight_that_is_initialized_again_is_found(saved, end):
    names = [name for name, weight in AutoModelForCausalLM.from_pretrained(saved).named_parameters()]
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(saved)
        with torch.no_grad():
            model.get_parameter(name)[end] += 0.5
        found = first_other_weight(model, str(saved), None)
        assert found is not None
        assert name.endswith(found)


def test_shards_and_a_base_model_without_its_prefix_are_compared_too(tmp_path):
    model = build_random("gpt2")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    model.transformer.save_pretrained(tmp_path / "base")
    for name in ("shards", "base"):
        folder = tmp_path / name
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert first_other_weight(loaded, str(folder), None) is None
        with torch.no_grad():
            loaded.transformer.h[0].mlp.c_fc.weight.normal_()
        assert first_other_weight(loaded, str(folder), None).endswith("mlp.c_fc.weight")


def test_a_backbone_whose_files_change_while_it_is_loaded_is_refused(tmp_path, monkeypatch):
    source = fetch_backbone("tiny-random")
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(folder)
    load_backbone(BackboneConfig(name=str(folder)), "cpu")
    load = AutoModelForCausalLM.from_pretrained

    def reset(*args, **options):
        model, loading = load(*args, **options)
        with torch.no_grad():
            model.get_input_embeddings().weight.normal_()
        return model, loading

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", reset)
    with pytest.raises(BackboneError, match=r"its weight .* is not the one of its files after transformers"):
        load_backbone(BackboneConfig(name=str(folder)), "cpu")


def test_an_embedding_that_has_changed_in_its_file_is_found(saved):
    model = AutoModelForCausalLM.from_pretrained(saved)
    path = saved / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if "embed" in name or "wte" in name)
    save_file(weights | {name: weights[name] + 1}, path, metadata={"format": "pt"})
    assert first_other_weight(model, str(saved), None) == name


def test_the_snapshot_of_the_hub_is_the_commit_in_its_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for commit in ("a" * 40, "b" * 40):
        folder = tmp_path / "models--org--name" / "snapshots" / commit
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        refs = tmp_path / "models--org--name" / "refs"
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text(commit)
        assert hub_snapshot("org/name", None) == commit
    assert hub_snapshot("org/name", "a" * 40) == "a" * 40
    assert hub_snapshot("org/other", None) == ""
    assert hub_snapshot(str(tmp_path), None) == ""
    assert hub_snapshot("tiny-random", None) == ""
