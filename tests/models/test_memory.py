"""The estimate of a step's memory, against what autograd stores in tiny models of several families."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from components.config import BackboneConfig, FrozenModel, LoraConfig
from components.models.adapters import AdapterSlot, attach_lora
from components.models.backbone import disable_dropout, truncate_layers
from components.models.checkpointing import checkpointed, enable_checkpointing
from components.models.last_layer import states_at_one_position, supports_one_position
from components.models.logprobs import completion_logprobs
from components.models.memory import (
    FAMILIES,
    ModelShape,
    ShapeError,
    StepShape,
    activation_bytes,
    inference_bytes,
    layer_bytes,
    training_bytes,
)
from tests.support.shapes import SHAPES

TOLERANCE = 0.1
"""Largest relative difference from the bytes that autograd stores."""
ROWS = 2
TOKENS = 64
IDS = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % 96
PLAIN = LoraConfig(r=4, alpha=8, dropout=0.0)
LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
SIZES = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 128},
    "llama": LLAMA,
    "qwen2": LLAMA,
    "mistral": LLAMA,
    "gemma": LLAMA | {"head_dim": 32},
}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def build(family, lora, dtype=torch.float32):
    """A tiny model with random weights and LoRA, in training mode, and its shape on the CPU."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**SIZES[family] | SPECIAL)
    disable_dropout(config)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).requires_grad_(False).eval()
    backbone = BackboneConfig(name=family, dtype=str(dtype).removeprefix("torch."))
    shape = ModelShape.from_config(config.to_dict(), backbone, on_cuda=False)
    return attach_lora(model, lora).train(), shape


@contextmanager
def stored_bytes(model):
    """Bytes of the storages that autograd keeps, without those of parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor keeps its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(size for size, _ in kept.values())


def measure(model):
    with stored_bytes(model) as stored:
        hidden = model.get_base_model().base_model(input_ids=IDS, use_cache=False).last_hidden_state
        measured = stored()
    del hidden
    return measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_those_that_autograd_stores(family, dropout, dtype):
    lora = LoraConfig(r=4, alpha=8, dropout=dropout)
    model, shape = build(family, lora, dtype)
    expected = activation_bytes(shape, lora, StepShape(ROWS, TOKENS))
    assert expected == pytest.approx(measure(model), rel=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "modules"),
    [("gpt2", ["c_attn"]), ("llama", ["q_proj", "v_proj"]), ("qwen2", ["q_proj", "down_proj"])],
)
def test_modules_without_an_adapter_store_no_input(family, modules):
    lora = LoraConfig(r=4, alpha=8, dropout=0.1, target_modules=modules)
    model, shape = build(family, lora)
    expected = activation_bytes(shape, lora, StepShape(ROWS, TOKENS))
    assert expected == pytest.approx(measure(model), rel=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_checkpointing_the_inputs_of_layers_are_stored(family):
    model, shape = build(family, PLAIN)
    enable_checkpointing(model, family)
    shape = replace(shape, checkpointing=True)
    expected = activation_bytes(shape, PLAIN, StepShape(ROWS, TOKENS))
    with checkpointed(model):
        assert expected == pytest.approx(measure(model), rel=0.25)  # positions and masks count here


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.one_position])
def test_a_last_layer_at_one_position_stores_keys_and_values(family, dropout):
    lora = LoraConfig(r=4, alpha=8, dropout=dropout)
    model, shape = build(family, lora)
    with stored_bytes(model) as stored:
        states = states_at_one_position(model.get_base_model(), IDS, torch.tensor([TOKENS - 1, TOKENS // 2]))
        measured = stored()
    del states
    expected = activation_bytes(shape, lora, StepShape(ROWS, TOKENS, one_position=True))
    assert expected == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_whose_last_layer_is_computed_at_one_position_are_those_that_support_it(family):
    model, shape = build(family, LoraConfig(r=2))
    assert supports_one_position(model.get_base_model().eval()) == shape.family.one_position


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_pairs_store_a_mask_and_repeated_keys(family):
    model, shape = build(family, PLAIN)
    row = tuple(list(range(start, start + length)) for start, length in ((1, 24), (30, 20), (60, 20)))
    with stored_bytes(model) as stored:
        logprobs = completion_logprobs(model.get_base_model(), [row, row], 0)
        measured = stored()
    del logprobs
    step = StepShape(ROWS, TOKENS, logit_positions=80, shared_prompts=True)
    expected = activation_bytes(shape, PLAIN, step) + 4 * 80 * shape.vocabulary
    assert expected == pytest.approx(measured, rel=0.25)


def test_the_values_of_an_adapter_are_counted():
    lora = LoraConfig(r=4, alpha=8, target_modules=["q_proj", "down_proj"])
    model, shape = build("llama", lora)
    assert shape.lora_values(lora) == sum(parameter.numel() for parameter in AdapterSlot(model).parameters)


@pytest.mark.parametrize("layers", [None, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_adapter_of_a_model_of_real_size_are_those_of_a_model_without_memory(family, layers):
    """The default sizes of a family, such as 7B parameters of Llama, on torch's meta device."""
    lora = LoraConfig(r=8)
    config = CONFIG_MAPPING[family]()
    backbone = BackboneConfig(name=family, layers=layers)
    shape = ModelShape.from_config(config.to_dict(), backbone)
    truncate_layers(config, backbone)
    with torch.device("meta"):
        model = attach_lora(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), lora)
    sizes = {True: 0, False: 0}
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += parameter.nbytes
    assert shape.weight_bytes == pytest.approx(sizes[False], rel=1e-3)
    assert 4 * shape.lora_values(lora) == sizes[True]


def test_linear_layers_of_8_bits_take_a_byte_per_weight():
    _, shape = build("llama", LoraConfig(r=2), torch.bfloat16)
    embeddings = 2 * 96 * 64 * 2
    linear = shape.weight_bytes - embeddings
    assert replace(shape, is_8bit=True).weight_bytes == embeddings + linear / 2


def test_logits_are_computed_in_chunks():
    _, shape = build("llama", PLAIN)

    def logits(**options):
        steps = StepShape(1, 1, **options), StepShape(1, 1)
        with_them, without = (training_bytes(shape, PLAIN, step, "adamw") for step in steps)
        return with_them - without

    assert logits(logit_positions=10) == 4 * 3 * 10 * 96
    assert logits(logit_positions=5000) == 4 * 3 * 1024 * 96
    assert logits(logit_positions=10, entropies=True) == 4 * 5 * 10 * 96


@pytest.mark.parametrize(("optimizer", "size"), [("adamw", 8), ("adamw_8bit", 2), ("sgd", 0), ("rmsprop", 4)])
def test_the_trained_values_have_gradients_and_optimizer_state(optimizer, size):
    _, shape = build("llama", PLAIN)
    step = StepShape(1, 8)
    whole = training_bytes(shape, PLAIN, step, optimizer)
    assert training_bytes(shape, PLAIN, step, optimizer, personal=100) - whole == 100 * (4 + 2 * 4 + size)
    adapter = shape.lora_values(PLAIN) * (4 + 2 * 4 + size)
    backward = 8 * layer_bytes(shape, PLAIN, masked=False)
    assert whole == adapter + activation_bytes(shape, PLAIN, step) + backward


def test_checkpointing_and_micro_batches_lower_the_total():
    lora = LoraConfig(r=4, dropout=0.05)
    _, shape = build("llama", lora)
    whole, micro = (training_bytes(shape, lora, StepShape(rows, 512), "adamw") for rows in (32, 4))
    stored = training_bytes(replace(shape, checkpointing=True), lora, StepShape(4, 512), "adamw")
    assert whole > micro > stored


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba"}, "some/model.*'mamba'.*knows llama"),
        (
            {"model_type": "llama", "hidden_size": 64},
            "of 'some/model' has no intermediate_size",
        ),
    ],
)
def test_an_unknown_family_and_a_missing_value_are_named_and_not_guessed(config, words):
    with pytest.raises(ShapeError, match=words):
        ModelShape.from_config(config, BackboneConfig(name="some/model"))


# --- inference


def test_the_weights_of_a_deberta_classifier_are_those_of_the_model():
    from transformers import AutoModelForSequenceClassification, DebertaV2Config

    options = SHAPES["OpenAssistant/reward-model-deberta-v3-large-v2"]
    shape = ModelShape.from_config(options, BackboneConfig())
    settings = {name: value for name, value in options.items() if name != "model_type"}
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(
            DebertaV2Config(**settings, position_biased_input=False, type_vocab_size=0, share_att_key=True)
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert shape.weight_bytes == pytest.approx(2 * parameters, rel=0.01)


def test_the_cache_of_a_batch_has_as_many_columns_as_are_estimated():
    from components.models import memory
    from components.models.key_values import SPARE_COLUMNS, RowCache

    assert memory.SPARE_COLUMNS == SPARE_COLUMNS
    _, shape = build("llama", LoraConfig())
    writes, reads = (FrozenModel("policy", BackboneConfig(), 3, 50, new) for new in (20, 0))
    estimated = inference_bytes(shape, writes) - inference_bytes(shape, reads)
    cache = RowCache(shape.layers, 3, 50, 20)
    prompt = torch.zeros(shape.key_value_heads, 50, shape.head_dim)
    cache.enter(0, [(prompt, prompt)] * shape.layers)
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache._row_layers)
    assert estimated == stored + 3 * shape.layers * 2 * prompt.nbytes


def test_a_merged_adapter_of_a_policy_in_fp32_has_the_weights_of_its_layers_again():
    lora = LoraConfig(r=4, target_modules=["q_proj"])
    adapters = {}
    for dtype in (torch.float32, torch.bfloat16):
        _, shape = build("llama", lora, dtype)
        models = (FrozenModel("policy", BackboneConfig(), 1, 8, 8, one) for one in (lora, None))
        merged, plain = (inference_bytes(shape, model) for model in models)
        adapters[dtype] = merged - plain
    weights = 4 * shape.layers * shape.hidden * shape.heads * shape.head_dim
    assert adapters[torch.float32] - adapters[torch.bfloat16] == weights
