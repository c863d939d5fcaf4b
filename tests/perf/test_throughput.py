"""The speed of selector training: counted FLOPs, and the table, on a shape that is fast to train."""

import json

import pytest
import torch

from components.config import BackboneConfig, LoraConfig
from components.models.adapters import attach_lora
from components.models.backbone import find_active_dropout
from components.models.memory import ModelShape
from perf import throughput
from perf.__main__ import main
from perf.throughput import Step
from tests.support.flops import flop_counter

TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
RUN = ["throughput", "tiny", "--rows", "2", "--length", "16", "--steps", "3", "--device", "cpu"]


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(throughput.SHAPES, "tiny", TINY)


def unneeded_flops(model, tokens):
    """FLOPs of the gradient of the first layer's input, which no trained weight needs.

    step_flops counts them: 2 per token and weight of the projections of the embeddings.
    """
    attention = model.model.layers[0].self_attn
    weights = 0
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
        weights += layer.base_layer.weight.numel() + layer.lora_A["default"].weight.numel()
    return tokens * 2 * weights


def test_the_flops_of_a_step_are_those_that_torch_counts():
    model = throughput.random_model(TINY, "cpu")
    model.set_attn_implementation("eager")  # torch's counter sees its products
    lora = LoraConfig(dropout=0.0)
    wrapped = attach_lora(model, lora)
    ids = torch.randint(0, 64, (2, 16))
    with flop_counter() as counter:
        wrapped.base_model.model.model(input_ids=ids).last_hidden_state.sum().backward()
    shape = ModelShape.from_config(TINY, BackboneConfig())
    expected = throughput.step_flops(shape, lora, Step("tiny", 2, 16))
    assert counter.get_total_flops() == expected - unneeded_flops(model, 32)


def test_the_table_and_its_json_have_the_same_figures(tiny, capsys):
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit, match="0"):
        main([*RUN, "--peak-tflops", "0.1"])
    out = capsys.readouterr().out
    figures = json.loads(out.splitlines()[-1])
    assert figures["tokens_per_s"] == pytest.approx(32 / figures["seconds"])
    assert figures["utilization"] == pytest.approx(figures["flops"] / figures["seconds"] / 1e11)
    cells = [line.split() for line in out.splitlines()]
    assert ["tokens_per_s", f"{figures['tokens_per_s']:,.0f}"] in cells
    assert ["layers", "3"] in cells
    assert ["length", "16"] in cells
    assert torch.get_num_threads() == threads


def test_an_unknown_peak_gives_no_utilization(tiny):
    assert throughput.measure(Step("tiny", 1, 8), 1, "cpu")["utilization"] is None


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("CPU", None)]
)
def test_the_peak_of_a_device_is_known_by_its_name(name, peak):
    assert throughput.peak_flops(name) == peak


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [("qwen2-0.5b", 494_032_768), ("gemma-2b", 2_506_172_416), ("smollm2-135m", 134_515_008)],
)
def test_the_shapes_have_the_published_numbers_of_parameters(shape, parameters):
    model = throughput.random_model(throughput.SHAPES[shape], "meta")
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert find_active_dropout(model) == []


def test_by_default_two_shapes_are_measured_at_the_papers_batch_size(monkeypatch, tiny, capsys):
    measured = []
    figures = throughput.measure(Step("tiny", 1, 8), 1, "cpu")
    monkeypatch.setattr(throughput, "measure", lambda step, *_: measured.append(step) or figures)
    with pytest.raises(SystemExit, match="0"):
        main(["throughput"])
    assert [(step.shape, step.rows) for step in measured] == [("qwen2-0.5b", 32), ("gemma-2b", 32)]


def test_the_help_names_the_default_batch_size_and_its_source(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["throughput", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Rows of a step; the default is of FedBiscuit's tables 3 and 4. [default: 32; x>=1]" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--rows", "0"], "'--rows'"), (["gpt-9"], "shape 'gpt-9' is not known; choose from qwen2-0.5b, ")],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["throughput", *arguments])
    assert message in capsys.readouterr().err
