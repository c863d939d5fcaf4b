"""Adapters: fp32 on any backbone, exchanged in place, strict about names, shapes and values."""

import math
from unittest.mock import Mock

import pytest
import torch
from peft import PeftModel

from components.config import BackboneConfig, LoraConfig, TemplateFile
from components.models.adapters import AdapterSlot, attach_lora, export_adapter, read_adapter, stack_adapters
from components.models.backbone import load_backbone
from components.models.store import AdapterError, AdapterStore, check_adapter
from tests.support.adapters import random_tensors

TINY = BackboneConfig(name="tiny-random")
LORA = LoraConfig(r=2, alpha=4, dropout=0.0)


def build_model(dtype: str = "float32", lora: LoraConfig = LORA):
    model = attach_lora(load_backbone(BackboneConfig(name="tiny-random", dtype=dtype), "cpu"), lora)
    return model, AdapterSlot(model)


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# --- slots


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_adapter_alone_is_trained_and_fp32_on_a_backbone_of_any_dtype(dtype):
    model, slot = build_model(dtype)
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in slot.parameters}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {getattr(torch, dtype)}
    slot.load(slot.initial_adapter(0))
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.float().sum().backward()
    assert {p.grad.dtype for p in slot.parameters} == {torch.float32}
    assert {tensor.dtype for tensor in slot.read().values()} == {torch.float32}


def test_the_names_of_a_slot_are_sorted_and_independent_of_the_slot():
    _, slot = build_model()
    assert len(slot.names) == 2 * 2 * 7  # A and B, layers, linear modules
    assert slot.names == sorted(slot.names)
    assert not any("default" in name for name in slot.names)


def test_adapters_are_exchanged_in_place_and_read_as_copies(tiny_selector, random_adapter):
    slot = tiny_selector.slot
    addresses = [parameter.data_ptr() for parameter in slot.parameters]
    adapter = random_adapter(1)
    slot.load(adapter)
    read = slot.read()
    assert list(read) == slot.names
    slot.load(random_adapter(2))
    assert equal(read, random_adapter(1))
    assert equal(adapter, read)
    assert [parameter.data_ptr() for parameter in slot.parameters] == addresses


def test_a_subset_of_a_slot_shares_its_parameters(tiny_selector):
    slot = tiny_selector.slot
    subset = slot.subset({slot.names[3], slot.names[1]})
    assert subset.names == [slot.names[1], slot.names[3]]
    assert subset.parameters[0] is slot.parameters[1]
    assert subset.parameters[1] is slot.parameters[3]
    assert len(slot.names) == len(slot.parameters) > 2


def test_an_initial_adapter_is_a_function_of_the_seed_with_a_bounded_and_b_0():
    _, slot = build_model()
    torch.manual_seed(1)
    first = slot.initial_adapter(7)
    torch.manual_seed(2)
    assert equal(first, build_model()[1].initial_adapter(7))
    different = slot.initial_adapter(8)
    for name in slot.names:
        assert torch.equal(first[name], different[name]) == (".lora_B." in name)
        assert first[name].any() == (".lora_A." in name)
    adapter = slot.initial_adapter(7)
    tensors = [adapter[name] for name in slot.names if ".lora_A." in name]
    for tensor in tensors:
        bound = 1 / math.sqrt(tensor.shape[1])
        assert tensor.abs().max() <= bound
        assert tensor.std() > 0.1 * bound
    assert len({tensor.flatten()[0].item() for tensor in tensors}) == len(tensors)


def test_attaching_lora_does_not_change_the_global_generator():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    build_model()
    assert torch.equal(torch.rand(1), expected)


# --- checks


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda adapter, name: adapter.pop(name), "is missing"),
        (lambda adapter, name: adapter.update(other=torch.zeros(1)), "'other' is not part of the adapter"),
        (lambda adapter, name: adapter.update({name: adapter[name][:1]}), "has shape"),
        (lambda adapter, name: adapter.update({name: adapter[name].bfloat16()}), "bfloat16, expected"),
        (lambda adapter, name: adapter[name].view(-1)[0].fill_(torch.nan), "has 1 values that are NaN"),
        (lambda adapter, name: adapter[name].fill_(torch.inf), "NaN or infinite"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_its_tensor_and_the_slot_keeps_its_values(
    tiny_selector, random_adapter, change, words
):
    slot = tiny_selector.slot
    name = slot.names[3]
    slot.load(random_adapter(1))
    invalid = random_adapter(2)
    change(invalid, name)
    with pytest.raises(AdapterError, match=words) as error:
        slot.load(invalid)
    assert name in str(error.value) or "other" in str(error.value)
    assert equal(slot.read(), random_adapter(1))


def test_the_error_of_a_missing_tensor_counts_all_that_are_missing():
    expected = dict.fromkeys("abc", torch.zeros(1))
    with pytest.raises(AdapterError, match=r"tensor 'a' is missing \(2 of 3 are\)"):
        check_adapter({"c": torch.zeros(1)}, expected)


# --- the store


ADAPTER = {"b": torch.tensor([1.0, 2.0, 3.0]), "a": torch.zeros(2, 2)}


@pytest.fixture
def store(tmp_path):
    return AdapterStore(tmp_path / "adapters")


def test_an_adapter_is_stored_under_the_hash_of_its_content_and_read_back(store):
    digest = store.put(ADAPTER)
    assert equal(store.get(digest), {name: ADAPTER[name] for name in ("a", "b")})
    assert store.put(dict(reversed(ADAPTER.items()))) == digest
    assert store.size(digest) == store.path(digest).stat().st_size > 28
    different = store.put(ADAPTER | {"b": torch.tensor([1.0, 2.0, 3.5])})
    assert {path.name for path in store.root.iterdir()} == {
        f"{digest}.safetensors",
        f"{different}.safetensors",
    }
    assert different != digest


def test_an_adapter_is_stored_in_fp32_and_completely_or_not_at_all(store, monkeypatch):
    with pytest.raises(AdapterError, match=r"tensor 'a' is torch.bfloat16, but .* float32"):
        store.put({"a": torch.ones(3, dtype=torch.bfloat16)})
    monkeypatch.setattr("components.io.os.replace", Mock(side_effect=OSError("full")))
    with pytest.raises(OSError, match="full"):
        store.put(ADAPTER)
    assert list(store.root.iterdir()) == []


# --- PEFT folders


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_an_exported_adapter_is_read_back_and_answers_in_peft_as_in_the_slot(tmp_path, targets):
    lora = LoraConfig(r=2, alpha=4, dropout=0.05, target_modules=targets)
    model, slot = build_model(lora=lora)
    adapter = random_tensors(slot, seed=0, scale=1.0)
    slot.load(adapter)
    folder = export_adapter(adapter, lora, TINY, tmp_path / "adapter", TemplateFile("own", "Q: {prompt}\nA:"))
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "prompt_template.txt",
    ]
    assert (folder / "prompt_template.txt").read_text() == "Q: {prompt}\nA:\n"
    assert '"base_model_name_or_path": "tiny-random"' in (folder / "adapter_config.json").read_text()
    tensors, read = read_adapter(folder)
    assert equal(tensors, adapter)
    assert (read.r, read.alpha, read.dropout) == (2, 4, 0.05)
    opened = PeftModel.from_pretrained(load_backbone(TINY, "cpu"), folder).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        logits = opened(input_ids=ids).logits
        assert torch.allclose(logits, model.eval()(input_ids=ids).logits, atol=1e-6)
        with model.disable_adapter():
            assert not torch.allclose(logits, model(input_ids=ids).logits, atol=1e-2)
    assert sum("lora_A" in name for name, _ in opened.named_parameters()) == len(slot.names) // 2


def random_lora(r, *layers):
    generator = torch.Generator().manual_seed(r)
    adapter = {}
    for layer in layers:
        adapter[f"{layer}.lora_A.weight"] = torch.randn((r, 4), generator=generator)
        adapter[f"{layer}.lora_B.weight"] = torch.randn((3, r), generator=generator)
    return adapter


def compute_update(adapter, layer, scale):
    """s B A of a layer; 0 if the adapter does not have it."""
    if f"{layer}.lora_A.weight" not in adapter:
        return torch.zeros(3, 4)
    return scale * adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"]


@pytest.mark.parametrize("layer", ["m.q", "m.v", "m.up"])
def test_two_stacked_adapters_are_the_sum_of_their_updates(layer):
    """s1 B1 A1 + s2 B2 A2, with ranks 1 and 2 and scales 2 and 3; one of them has m.v and m.up."""
    lower = random_lora(1, "m.q", "m.v")
    upper = random_lora(2, "m.q", "m.up")
    stacked, lora = stack_adapters((lower, LoraConfig(r=1, alpha=2)), (upper, LoraConfig(r=2, alpha=6)))
    assert (lora.r, lora.alpha) == (3, 3)
    assert lora.target_modules == ["q", "up", "v"]
    expected = compute_update(lower, layer, 2.0) + compute_update(upper, layer, 3.0)
    assert torch.allclose(compute_update(stacked, layer, 1.0), expected, atol=1e-6)
