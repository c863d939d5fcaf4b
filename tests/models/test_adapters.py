"""Adapters: fp32 whatever the backbone is, swapped in place, strict about names, shapes and values."""

import json
import math

import pytest
import torch

from components.config import BackboneConfig, LoraConfig
from components.models.adapters import (
    AdapterError,
    AdapterSlot,
    AdapterStore,
    attach,
    check_adapter,
    export_adapter,
    read_adapter,
    stack_adapters,
    write_atomically,
)
from components.models.backbone import load_backbone

LORA = LoraConfig(r=2, alpha=4, dropout=0.0)


def resident(dtype: str = "float32", lora: LoraConfig = LORA):
    model = attach(load_backbone(BackboneConfig(name="tiny-random", dtype=dtype), "cpu"), lora)
    return model, AdapterSlot(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapter_parameters_gradients_and_what_is_read_are_fp32_on_a_backbone_of_any_dtype(dtype):
    model, slot = resident(dtype)
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {getattr(torch, dtype)}
    assert {p.dtype for p in slot.parameters} == {torch.float32}
    slot.load(slot.initial_adapter(0))
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.float().sum().backward()
    assert {p.grad.dtype for p in slot.parameters} == {torch.float32}
    assert {t.dtype for t in slot.read().values()} == {torch.float32}


def test_only_the_adapter_is_trained():
    model, slot = resident()
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in slot.parameters}
    assert len(slot.names) == 2 * 2 * 7 and slot.names == sorted(slot.names)       # A and B, layers, linear modules
    assert not any("default" in name for name in slot.names)


def test_what_is_loaded_is_read_back_and_reading_gives_a_copy(tiny_selector, random_adapter):
    slot, adapter = tiny_selector.slot, random_adapter(1)
    addresses = [p.data_ptr() for p in slot.parameters]
    slot.load(adapter)
    read = slot.read()
    assert all(torch.equal(read[n], adapter[n]) for n in slot.names) and list(read) == slot.names
    slot.load(random_adapter(2))
    assert all(torch.equal(read[n], adapter[n]) for n in slot.names)
    assert [p.data_ptr() for p in slot.parameters] == addresses, "swapped in place"
    assert not any(a is p.data for a in adapter.values() for p in slot.parameters)


def test_an_initial_adapter_is_a_function_of_the_seed_and_leaves_the_backbone_as_it_is():
    model, slot = resident()
    torch.manual_seed(1)
    first = slot.initial_adapter(7)
    torch.manual_seed(2)
    again, other = resident()[1].initial_adapter(7), slot.initial_adapter(8)
    assert all(torch.equal(first[n], again[n]) for n in slot.names)
    assert all(torch.equal(first[n], other[n]) == (".lora_B." in n) for n in slot.names)
    a = [first[n] for n in slot.names if ".lora_A." in n]
    assert all(t.abs().max() <= 1 / math.sqrt(t.shape[1]) and t.std() > 0.1 / math.sqrt(t.shape[1]) for t in a)
    assert len({t.flatten()[0].item() for t in a}) == len(a), "each tensor has numbers of its own"
    slot.load(first)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        with model.disable_adapter():
            plain = model(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, plain)


def test_attaching_leaves_the_global_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    resident()
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda a, n: a.pop(n), "is missing"),
    (lambda a, n: a.update({"other": torch.zeros(1)}), "'other' is not part of the adapter"),
    (lambda a, n: a.update({n: a[n][:1]}), "has shape"),
    (lambda a, n: a.update({n: a[n].bfloat16()}), "is torch.bfloat16, expected torch.float32"),
    (lambda a, n: a[n].view(-1)[0].fill_(float("nan")), "has 1 values that are NaN or infinite"),
    (lambda a, n: a[n].fill_(float("inf")), "NaN or infinite")])
def test_an_adapter_that_does_not_fit_is_refused_by_its_tensor_and_the_slot_stays(tiny_selector, random_adapter, change, sentence):
    slot, good, bad = tiny_selector.slot, random_adapter(1), random_adapter(2)
    name = slot.names[3]
    slot.load(good)
    change(bad, name)
    with pytest.raises(AdapterError, match=sentence) as error:
        slot.load(bad)
    assert name in str(error.value) or "other" in str(error.value)
    assert all(torch.equal(t, good[n]) for n, t in slot.read().items())


def test_check_adapter_counts_what_is_missing():
    like = {"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)}
    with pytest.raises(AdapterError, match=r"tensor 'a' is missing \(2 of 3 are\)"):
        check_adapter({"c": torch.zeros(1)}, like)
    check_adapter(like, like)


def test_the_store_names_an_adapter_by_its_content(tmp_path):
    store = AdapterStore(tmp_path / "adapters")
    adapter = {"b": torch.tensor([1.0, 2.0, 3.0]), "a": torch.zeros(2, 2)}
    ref = store.put(adapter)
    assert store.put(dict(reversed(adapter.items()))) == ref == store.ref(ref.hash)
    assert store.put(adapter | {"b": torch.tensor([1.0, 2.0, 3.5])}) != ref
    assert sorted(p.name for p in store.root.iterdir()) == sorted(f"{r}.safetensors" for r in {ref.hash, store.put(adapter | {"b": torch.tensor([1.0, 2.0, 3.5])}).hash})
    read = store.get(ref)
    assert set(read) == {"a", "b"} and all(torch.equal(read[n], adapter[n]) for n in read)


def test_the_store_refuses_what_is_not_fp32(tmp_path):
    with pytest.raises(AdapterError, match=r"tensor 'a' is torch.bfloat16, but adapters are stored in float32"):
        AdapterStore(tmp_path).put({"a": torch.ones(3, dtype=torch.bfloat16)})


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "file"
    write_atomically(path, b"first")
    monkeypatch.setattr("components.models.adapters.os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(path, b"second")
    assert path.read_bytes() == b"first" and [p.name for p in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_an_exported_adapter_opens_with_peft_and_answers_as_in_the_slot(tmp_path, targets):
    from peft import PeftModel

    lora = LoraConfig(r=2, alpha=4, dropout=0.05, target_modules=targets)
    model, slot = resident(lora=lora)
    numbers = torch.Generator().manual_seed(0)
    adapter = {n: torch.randn(p.shape, generator=numbers) for n, p in zip(slot.names, slot.parameters, strict=True)}
    slot.load(adapter)
    folder = export_adapter(adapter, lora, "tiny-random", tmp_path / "adapter")
    assert sorted(p.name for p in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny-random"
    opened = PeftModel.from_pretrained(load_backbone(BackboneConfig(name="tiny-random"), "cpu"), folder).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        given, expected = opened(input_ids=ids).logits, model.eval()(input_ids=ids).logits
        assert torch.allclose(given, expected, atol=1e-6)
        with model.disable_adapter():
            assert not torch.allclose(given, model(input_ids=ids).logits, atol=1e-2)
    assert sum("lora_A" in n for n, _ in opened.named_parameters()) == len(slot.names) // 2


def test_two_stacked_adapters_are_the_sum_of_their_updates_also_where_a_module_is_in_one_alone(tmp_path):
    """s1 B1 A1 + s2 B2 A2, with ranks 1 and 2 and scales 2 and 3."""
    numbers = torch.Generator().manual_seed(0)

    def adapter(r, *layers):
        return {f"{layer}.lora_{k}.weight": torch.randn((r, 4) if k == "A" else (3, r), generator=numbers) for layer in layers for k in "AB"}

    def update(one, layer, scale):
        return scale * one[f"{layer}.lora_B.weight"] @ one[f"{layer}.lora_A.weight"] if f"{layer}.lora_A.weight" in one else torch.zeros(3, 4)

    lower, upper = adapter(1, "m.q", "m.v"), adapter(2, "m.q", "m.up")
    stacked, lora = stack_adapters((lower, LoraConfig(r=1, alpha=2)), (upper, LoraConfig(r=2, alpha=6)))
    assert (lora.r, lora.alpha, lora.target_modules) == (3, 3, ["q", "up", "v"])
    for layer in ("m.q", "m.v", "m.up"):
        assert torch.allclose(update(stacked, layer, 1.0), update(lower, layer, 2.0) + update(upper, layer, 3.0), atol=1e-6)


def test_an_adapter_folder_is_read_back_as_it_was_exported_and_what_a_recipe_does_not_know_is_refused(tmp_path):
    _, slot = resident()
    adapter = slot.initial_adapter(0)
    folder = export_adapter(adapter, LORA, "tiny-random", tmp_path / "adapter")
    tensors, lora = read_adapter(folder)
    assert (lora.r, lora.alpha, lora.dropout) == (2, 4, 0) and all(torch.equal(tensors[n], adapter[n]) for n in slot.names)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": True}))
    with pytest.raises(AdapterError, match="the adapter's LoRA uses use_rslora, which is not supported"):
        read_adapter(folder)
