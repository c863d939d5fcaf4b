"""Memory of a training step with LoRA on a frozen causal language model, and of its inference, by its shape.

    peak = weights + LoRA + gradients + optimizer state + activations + one layer's backward pass + logits

The activations are what autograd stores for the backward pass in the layers as transformers and PEFT
compute them, a term for each operation. Frozen layers store no input (Hu et al. 2021, LoRA, section
4.2), so the terms of Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer
Models, section 4.1), which count the inputs of trained layers, do not apply. With checkpointing a
layer stores its input alone (Chen et al. 2016). Attention is computed by kernels that store queries,
keys, values, outputs and one sum per row, but no scores (Dao et al. 2022, FlashAttention).

    inference = weights + keys and values + one layer's forward pass over the inputs + logits

The forward pass of a layer is taken as what autograd would store of it, which is an upper bound. When
prompts enter a batch, their own keys and values exist beside those of the batch
(components/models/continuous_batch.py).

Not counted are the CUDA context, fragmentation of the allocator, cuBLAS workspaces and the columns
that LLM.int8() keeps in 16 bits. No figure is measured here; tests/models/test_memory.py compares the
stored activations with those that autograd stores in tiny models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from components.config import BackboneConfig, FrozenModel, LoraConfig, UserError

FP32 = 4  # bytes of a value of an adapter, its gradient, a moment of AdamW, and a logit
LOGIT_POSITIONS = 1024  # in the language-model head at once; HEAD_CHUNK in components/models/logprobs.py
LOGIT_COPIES = 3  # logits, their gradient, and the exponentials of the softmax in between
SPARE_COLUMNS = 64  # of the cache of keys and values; as in components/models/key_values.py
ENTROPY_COPIES = 5  # of an entropy: also the probabilities and their products with the logits
# Bytes of the optimizer's state per trained value. Adafactor's is a row and a column per matrix.
OPTIMIZER_BYTES = {
    "adamw": 8,
    "adamw_torch": 8,
    "adamw_8bit": 2,
    "rmsprop": 4,
    "adagrad": 4,
    "adafactor": 0,
    "sgd": 0,
}


class ShapeError(UserError, ValueError):
    """The configuration of a model from which its memory cannot be computed."""


@dataclass(frozen=True)
class Family:
    """How the layers of a family of models are computed."""

    linears: tuple[str, ...]  # projections of the attention's heads, its output and the MLP
    gated: bool = True  # the MLP multiplies two projections
    rms_norm: bool = True  # norms are RMSNorms, which store their input as fp32
    activation_values: int = 1  # that the activation function stores per value of its input
    learned_positions: bool = False  # positions have embeddings
    one_position: bool = True  # the last layer can be computed at one (components/models/last_layer.py)
    fused: bool = True  # projections are torch's linear layers (components/models/fused_lora.py)
    score_copies: int = 0  # attention scores of all heads that its own attention holds at once


LLAMA = Family(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
# GPT-2's own GELU is a chain of operations that store the input, half of it, tanh, and 1 + tanh.
GPT2 = Family(("c_attn", "c_proj", "c_fc", "c_proj"), False, False, 4, True, False, False)
FAMILIES = {  # by the `model_type` of their configuration
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "gemma": LLAMA,
    "gpt2": GPT2,
}
CLASSIFIERS = {  # families that no language model is of
    # Scores by content, two by relative position, their sum and its softmax. Its linear layers have other
    # names, and together the values of GPT-2's.
    "deberta-v2": replace(GPT2, activation_values=1, learned_positions=False, score_copies=5),
}
NO_LORA = LoraConfig(target_modules=["none"])
SIZES = {  # values of ModelShape, by their names in the config.json of Llama and of GPT-2
    "hidden": ("hidden_size", "n_embd"),
    "intermediate": ("intermediate_size", ""),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size", "vocab_size"),
    "positions": ("", "n_positions"),
}
# Modules that read the same tensor, by a label of it.
SHARED_INPUTS = dict.fromkeys(["q_proj", "k_proj", "v_proj"], "attention")
SHARED_INPUTS |= dict.fromkeys(["gate_proj", "up_proj"], "mlp")


@dataclass(frozen=True)
class ModelShape:
    """Shape of a causal language model, and how a recipe loads it on a type of device."""

    family: Family
    hidden: int  # width H of the hidden states
    intermediate: int  # width I of the MLP
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    tied: bool  # the head is the embedding
    value_bytes: int  # of a frozen weight, and of a value that a layer computes
    is_8bit: bool  # the linear layers are quantized
    checkpointing: bool  # in training, layers store their inputs alone
    on_cuda: bool  # where a value of a dropout mask has a byte; on the CPU it is as large as the value
    positions: int = 0  # learned ones

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], backbone: BackboneConfig, on_cuda: bool = True
    ) -> ModelShape:
        """The shape from the content of a config.json, and the settings of a recipe's backbone.

        Raises:
            ShapeError: the family is not known, or a value is missing.
        """
        kind = config.get("model_type")
        families = FAMILIES | CLASSIFIERS
        if kind not in families:
            raise ShapeError(
                f"'{backbone.name}' has model_type '{kind}', and the estimate knows {', '.join(families)}"
            )
        column = 1 if families[kind].learned_positions else 0
        names = {field: pair[column] for field, pair in SIZES.items() if pair[column]}
        missing = [name for name in names.values() if name not in config]
        if missing:
            raise ShapeError(f"the config.json of '{backbone.name}' has no {missing[0]}")
        values = {field: int(config[name]) for field, name in names.items()}
        hidden, heads, layers = values["hidden"], values["heads"], values["layers"]
        # Defaults of transformers for values that a configuration may leave out.
        values |= {
            "intermediate": values.get("intermediate") or int(config.get("n_inner") or 4 * hidden),
            "layers": min(backbone.layers or layers, layers),
            "key_value_heads": int(config.get("num_key_value_heads") or heads),
            "head_dim": int(config.get("head_dim") or hidden // heads),
        }
        is_half = backbone.dtype == "bfloat16" or (backbone.dtype == "auto" and on_cuda)  # see choose_dtype
        return cls(
            family=families[kind],
            tied=bool(config.get("tie_word_embeddings", kind in ("gpt2", "gemma", "deberta-v2"))),
            value_bytes=2 if is_half else FP32,
            is_8bit=backbone.quantization == "8bit",
            checkpointing=backbone.gradient_checkpointing,
            on_cuda=on_cuda,
            **values,
        )

    @property
    def linears(self) -> list[tuple[str, int, int]]:
        """Name, inputs and outputs of each linear module of a layer."""
        hidden, inner = self.hidden, self.intermediate
        queries, keys = self.heads * self.head_dim, self.key_value_heads * self.head_dim
        attention = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
        mlp = [(hidden, inner), (hidden, inner), (inner, hidden)]
        if not self.family.gated:
            attention, mlp = [(hidden, queries + 2 * keys), (queries, hidden)], mlp[1:]
        return [(name, *size) for name, size in zip(self.family.linears, attention + mlp, strict=True)]

    @property
    def linear_values(self) -> int:
        """Values of the linear modules of all layers."""
        return self.layers * sum(inputs * outputs for _, inputs, outputs in self.linears)

    def targets(self, lora: LoraConfig) -> list[tuple[str, int, int]]:
        """Those of `linears` that get an adapter."""
        if isinstance(lora.target_modules, str):
            return self.linears
        names = {target.rpartition(".")[2] for target in lora.target_modules}
        return [linear for linear in self.linears if linear[0] in names]

    def lora_values(self, lora: LoraConfig) -> int:
        return self.layers * sum(lora.r * (inputs + outputs) for _, inputs, outputs in self.targets(lora))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the frozen weights; biases and norms are left out."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2) + self.positions * self.hidden
        linear_bytes = 1 if self.is_8bit else self.value_bytes
        return embeddings * self.value_bytes + self.linear_values * linear_bytes

    @property
    def norm_bytes(self) -> int:
        """Bytes per token of the input of a norm."""
        return self.hidden * (FP32 if self.family.rms_norm else self.value_bytes)

    @property
    def factor_bytes(self) -> int:
        """Bytes of a value that the factors A and B read: fp32, or as of the layer where they are fused."""
        return self.value_bytes if self.family.fused and not self.is_8bit else FP32


@dataclass(frozen=True)
class StepShape:
    """What goes through a trained model at once."""

    rows: int  # sequences of a micro-batch
    tokens: int  # of the longest sequence
    logit_positions: int = 0  # positions whose logits are computed for the whole vocabulary
    entropies: bool = False  # are computed beside log-probabilities
    shared_prompts: bool = False  # sequences hold several completions, which needs a mask
    one_position: bool = False  # one position per sequence is read, as of selectors


def layer_bytes(shape: ModelShape, lora: LoraConfig, masked: bool) -> int:
    """Bytes that autograd stores per token in a whole layer.

    With a mask, attention repeats keys and values for all heads.
    """
    kept, family = shape.value_bytes, shape.family
    queries = shape.heads * shape.head_dim
    keys = (shape.heads if masked else shape.key_value_heads) * shape.head_dim
    attention = (queries + 2 * keys) * kept + FP32 * shape.heads
    inner = shape.intermediate * kept * (family.activation_values + (2 if family.gated else 0))
    targets = shape.targets(lora)
    adapted = any(name in ("o_proj", "c_proj") for name, _, _ in targets)
    shares_output = adapted and kept == shape.factor_bytes and not lora.dropout
    output = 0 if shares_output else queries * kept
    return 2 * shape.norm_bytes + attention + output + inner + _adapter_bytes(shape, targets, lora)


def _adapter_bytes(shape: ModelShape, targets: list[tuple[str, int, int]], lora: LoraConfig) -> int:
    """Inputs of the factors A and B of modules per token.

    Each module has a copy of another type, or without the dropped values. Otherwise modules with the same
    input share it.
    """
    kept = shape.factor_bytes
    factors = kept * lora.r * len(targets)
    if shape.value_bytes == kept and not lora.dropout:
        inputs_by_label = {SHARED_INPUTS.get(name, f"{name} {inputs}"): inputs for name, inputs, _ in targets}
        return factors + kept * sum(inputs_by_label.values())
    mask = (1 if shape.on_cuda else kept) if lora.dropout else 0
    return factors + (kept + mask) * sum(inputs for _, inputs, _ in targets)


def activation_bytes(shape: ModelShape, lora: LoraConfig, step: StepShape) -> int:
    """Bytes that autograd stores in the layers for the backward pass of a micro-batch."""
    if shape.checkpointing:
        whole = shape.hidden * shape.value_bytes
    else:
        whole = layer_bytes(shape, lora, step.shared_prompts)
    last = whole + shape.norm_bytes  # the norm is that after the layers
    if step.one_position and shape.family.one_position:  # a norm, keys and values of all positions
        keys = 2 * shape.key_value_heads * shape.head_dim * shape.value_bytes
        targets = [target for target in shape.targets(lora) if target[0] in ("k_proj", "v_proj")]
        last = shape.norm_bytes + keys + _adapter_bytes(shape, targets, lora)
    masks = step.rows * step.tokens**2 * (1 + shape.value_bytes) if step.shared_prompts else 0
    return step.rows * step.tokens * ((shape.layers - 1) * whole + last) + masks


def training_bytes(
    shape: ModelShape, lora: LoraConfig, step: StepShape, optimizer: str, personal: int = 0
) -> int:
    """Bytes of a training step beside the weights; personal: values of a client's own modules.

    They are those of the trained values (themselves in fp32, their gradients, the optimizer's state), the
    activations, the gradients of what a layer stores (with checkpointing also what it stores, which is
    computed again), and the logits of a chunk.
    """
    # A micro-batch's gradients exist beside the sum of those before it.
    value = FP32 + 2 * FP32 + OPTIMIZER_BYTES[optimizer]
    trained = value * (shape.lora_values(lora) + personal)
    layer = step.rows * step.tokens * layer_bytes(shape, lora, step.shared_prompts)
    backward = layer * (2 if shape.checkpointing else 1)
    copies = ENTROPY_COPIES if step.entropies else LOGIT_COPIES
    logits = FP32 * copies * min(step.logit_positions, LOGIT_POSITIONS) * shape.vocabulary
    return trained + activation_bytes(shape, lora, step) + backward + logits


def inference_bytes(shape: ModelShape, model: FrozenModel) -> int:
    """Bytes beside the weights of a frozen model that scores or generates, with an adapter or without.

    They are those of the adapter, a layer's forward pass, the logits of a position, and the cache.
    """
    rows, tokens, new, lora = model.rows, model.tokens, model.new_tokens, model.lora
    adapter = 0 if lora is None else FP32 * shape.lora_values(lora)
    if lora is not None and new and shape.value_bytes == FP32 and not shape.is_8bit:
        merged = sum(inputs * outputs for _, inputs, outputs in shape.targets(lora))
        adapter += FP32 * shape.layers * merged  # beside the weights, see components/models/merging.py
    layer = rows * tokens * layer_bytes(shape, NO_LORA, masked=True)
    scores = shape.family.score_copies * rows * shape.heads * tokens**2 * shape.value_bytes
    logits = FP32 * LOGIT_COPIES * rows * shape.vocabulary
    columns = tokens + new + min(new, SPARE_COLUMNS) + tokens if new else 0
    keys = 2 * shape.layers * shape.key_value_heads * shape.head_dim * shape.value_bytes
    return adapter + layer + scores + logits + rows * columns * keys
