"""A loaded model has the weights of its files, and they are numbers."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from components.config import BackboneConfig
from components.models.backbone import BackboneError, fetch_backbone, load_backbone, require_stored
from components.models.weight_files import first_other_weight
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


@pytest.mark.parametrize("old_shards", [True, False], ids=["beside old shards", "shards gone"])
def test_a_whole_file_is_compared_before_an_index_of_an_earlier_save(tmp_path, old_shards):
    folder = tmp_path / "model"
    build_random("llama").save_pretrained(folder, max_shard_size="20KB")
    kept = {path: path.read_bytes() for path in folder.glob("model*") if old_shards or "index" in path.name}
    other = build_random("llama")
    with torch.no_grad():
        for weight in other.parameters():
            weight += 1
    other.save_pretrained(folder)
    for path, content in kept.items():
        path.write_bytes(content)
    assert {"model.safetensors", "model.safetensors.index.json"} <= {path.name for path in folder.iterdir()}
    model = load_backbone(BackboneConfig(name=str(folder)), "cpu")
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": {"a": "gone.safetensors"}}'])
def test_files_that_cannot_be_read_are_refused_in_a_sentence(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(BackboneError, match=r"^a model: a file of its weights cannot be read \("):
        require_stored(build_random("llama"), "a model", str(tmp_path), None)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("part", ["layers.1.mlp.up_proj", "norm", "lm_head"])
def test_a_weight_that_is_no_number_is_named_and_not_taken_for_a_random_one(tmp_path, part, value):
    change(tmp_path, part, value)
    words = rf"its weight \S*{part}\S* has a NaN or an infinity"
    with pytest.raises(BackboneError, match=words):
        load_backbone(BackboneConfig(name=str(tmp_path)), "cpu")


def test_rows_of_an_embedding_that_no_text_reads_may_be_no_numbers_unless_it_is_the_head(tmp_path):
    change(tmp_path / "own", "embed_tokens", float("nan"))
    load_backbone(BackboneConfig(name=str(tmp_path / "own")), "cpu")
    change(tmp_path / "tied", "embed_tokens", float("nan"), tie_word_embeddings=True)
    with pytest.raises(BackboneError, match="embed_tokens.weight has a NaN"):
        load_backbone(BackboneConfig(name=str(tmp_path / "tied")), "cpu")


def change(folder, part, value, **settings):
    """Save a model with a value in the last row of a weight."""
    build_random("llama", **{"tie_word_embeddings": False} | settings).save_pretrained(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    next(weight for name, weight in weights.items() if part in name)[-1] = value
    save_file(weights, path, metadata={"format": "pt"})
