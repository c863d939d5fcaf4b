"""The speed of selector training: what is counted, and the table, on a shape that takes a moment."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from components.config import LoraConfig
from components.models.adapters import attach
from components.models.backbone import active_dropout
from flows import throughput

TINY = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": True}


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(throughput.SHAPES, "tiny", TINY)


def test_the_flops_of_a_step_are_those_that_torch_counts(tiny):
    model = throughput.random_model("tiny", "cpu")
    model.set_attn_implementation("eager")  # whose products torch's counter sees
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not model.get_output_embeddings())
    wrapped = attach(model, LoraConfig(dropout=0.0))
    ids = torch.randint(0, 64, (2, 16))
    with FlopCounterMode(display=False) as counter:
        wrapped.base_model.model.model(input_ids=ids).last_hidden_state.sum().backward()
    adapter = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    expected = throughput.step_flops(model.config, linear, adapter, 2, 16)
    # not needed by the first layer's input: 2 FLOPs a token and weight of what the embeddings go into
    first = [m for name, m in model.model.layers[0].self_attn.named_children() if name in ("q_proj", "k_proj", "v_proj")]
    spared = 32 * 2 * sum(m.base_layer.weight.numel() + m.lora_A["default"].weight.numel() for m in first)
    assert counter.get_total_flops() == expected - spared


def test_the_measurement_prints_a_table_and_the_same_figures_as_json(tiny, capsys):
    threads = torch.get_num_threads()
    assert throughput.main(["--shape", "tiny", "--rows", "2", "--length", "16", "--steps", "3", "--device", "cpu", "--peak-tflops", "0.1"]) == 0
    out = capsys.readouterr().out
    measured = json.loads(out.splitlines()[-1])
    assert measured["tokens_per_s"] == pytest.approx(32 / measured["seconds"]) and measured["utilisation"] == pytest.approx(measured["flops"] / measured["seconds"] / 1e11)
    assert len(measured["costs"]) == 3 and all(0 < share < 1 for share in measured["costs"].values())
    assert list(measured["costs"].values()) == sorted(measured["costs"].values(), reverse=True)
    assert "3 layers" in out and "2 rows of 16 tokens" in out and torch.get_num_threads() == threads


def test_a_peak_that_nobody_knows_gives_no_utilisation(tiny):
    measured = throughput.measure("tiny", 1, 8, 1, "cpu")
    assert measured["utilisation"] is None and "not known" in throughput.table(measured)


@pytest.mark.parametrize(("shape", "parameters"), [("qwen2-0.5b", 494_032_768), ("gemma-2b", 2_506_172_416), ("smollm2-135m", 134_515_008)])
def test_the_shapes_have_the_published_numbers_of_parameters(shape, parameters):
    model = throughput.random_model(shape, "meta")
    assert sum(p.numel() for p in model.parameters()) == parameters and active_dropout(model) == []


def test_by_default_both_shapes_are_measured_at_the_papers_batch_size(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(throughput, "measure", lambda shape, rows, *_: asked.append((shape, rows)) or {})
    monkeypatch.setattr(throughput, "table", lambda measured: "")
    assert throughput.main([]) == 0 and asked == [("qwen2-0.5b", 32), ("gemma-2b", 32)]
    with pytest.raises(SystemExit):
        throughput.main(["--help"])
    assert "(default: 32, the batch size of FedBiscuit's tables 3 and 4)" in " ".join(capsys.readouterr().out.split())


def test_nothing_is_measured_with_no_rows(capsys):
    assert throughput.main(["--rows", "0"]) == 2 and "at least 1" in capsys.readouterr().err
