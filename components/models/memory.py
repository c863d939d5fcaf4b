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
from dataclasses import astuple, dataclass
from typing import Any

from components.config import BackboneConfig, LoraConfig, UserError

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
FAMILIES = {  # by the `model_type` of their configuration
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "gemma": LLAMA,
    # GPT-2's own GELU is a chain of operations that store the input, half of it, tanh, and 1 + tanh.
    "gpt2": Family(("c_attn", "c_proj", "c_fc"), False, False, 4, True, False, False),
}
CLASSIFIERS = {  # families that no language model is of
    # Scores by content, two by relative position, their sum and its softmax.
    "deberta-v2": Family(("dense",), False, False, one_position=False, fused=False, score_copies=5),
}


@dataclass(frozen=True)
class ModelShape:
    """Shape of a causal language model."""

    family: Family
    hidden: int  # width H of the hidden states
    intermediate: int  # width I of the MLP
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    tied: bool  # the head is the embedding
    positions: int = 0  # learned ones

    @classmethod
    def from_config(cls, config: Mapping[str, Any], backbone: BackboneConfig) -> ModelShape:
        """The shape from the content of a config.json, with the number of layers that a recipe uses.

        Raises:
            ShapeError: the family is not known, or a value is missing.
        """
        kind = config.get("model_type")
        families = FAMILIES | CLASSIFIERS
        if kind not in families:
            raise ShapeError(
                f"'{backbone.name}' has model_type '{kind}', and the estimate knows {', '.join(families)}"
            )
        family = families[kind]
        names = GPT2_NAMES if family.learned_positions else LLAMA_NAMES
        missing = [name for name in names.values() if name not in config]
        if missing:
            raise ShapeError(f"the config.json of '{backbone.name}' has no {missing[0]}")
        values = {field: int(config[name]) for field, name in names.items()}
        hidden, heads, layers = values["hidden"], values["heads"], values["layers"]
        # Defaults of transformers for values that a configuration may leave out.
        optional = {
            "intermediate": values.get("intermediate") or int(config.get("n_inner") or 4 * hidden),
            "layers": min(backbone.layers or layers, layers),
            "key_value_heads": int(config.get("num_key_value_heads") or heads),
            "head_dim": int(config.get("head_dim") or hidden // heads),
        }
        tied = bool(config.get("tie_word_embeddings", kind in ("gpt2", "gemma", "deberta-v2")))
        return cls(family=family, tied=tied, **values | optional)

    @property
    def linears(self) -> list[tuple[str, int, int]]:
        """Name, inputs and outputs of each linear module of a layer."""
        hidden, inner = self.hidden, self.intermediate
        queries, keys = self.heads * self.head_dim, self.key_value_heads * self.head_dim
        if not self.family.gated:
            return [
                ("c_attn", hidden, queries + 2 * keys),
                ("c_proj", queries, hidden),
                ("c_fc", hidden, inner),
                ("c_proj", inner, hidden),
            ]
        return [
            ("q_proj", hidden, queries),
            ("k_proj", hidden, keys),
            ("v_proj", hidden, keys),
            ("o_proj", queries, hidden),
            ("gate_proj", hidden, inner),
            ("up_proj", hidden, inner),
            ("down_proj", inner, hidden),
        ]

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

    def weight_bytes(self, precision: Precision) -> int:
        """Bytes of the frozen weights; biases and norms are left out."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2) + self.positions * self.hidden
        linear_bytes = 1 if precision.is_8bit else precision.bytes
        return embeddings * precision.bytes + self.linear_values * linear_bytes


LLAMA_NAMES = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
}
GPT2_NAMES = {
    "hidden": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "vocabulary": "vocab_size",
    "positions": "n_positions",
}


@dataclass(frozen=True)
class Precision:
    """Precision of the frozen backbone on a type of device."""

    bytes: int  # of a value
    is_8bit: bool = False  # the linear layers are quantized
    on_cuda: bool = True  # where a value of a dropout mask has a byte; on the CPU it is as large as the value

    @classmethod
    def of(cls, backbone: BackboneConfig, on_cuda: bool) -> Precision:
        """That of a recipe's backbone; see `choose_dtype` in components/models/backbone.py."""
        is_half = backbone.dtype == "bfloat16" or (backbone.dtype == "auto" and on_cuda)
        return cls(2 if is_half else FP32, backbone.quantization == "8bit", on_cuda)


@dataclass(frozen=True)
class StepShape:
    """What goes through the model at once."""

    rows: int  # sequences of a micro-batch
    tokens: int  # of the longest sequence
    logit_positions: int = 0  # positions whose logits are computed for the whole vocabulary
    entropies: bool = False  # are computed beside log-probabilities
    shared_prompts: bool = False  # sequences hold several completions, which needs a mask
    one_position: bool = False  # one position per sequence is read, as of selectors
    checkpointing: bool = False  # layers store their inputs alone


def step_flops(shape: ModelShape, lora: LoraConfig, step: StepShape) -> int:
    """Floating-point operations of a forward and backward pass of sequences that are all of full length.

    A multiplication with frozen weights counts once forward and once backward, since they get no gradient;
    one with LoRA's weights counts once more. Causal attention reads half of the positions.
    """
    tokens = step.rows * step.tokens
    frozen = 2 * tokens * shape.linear_values
    attention = 2 * tokens * step.tokens * shape.layers * shape.heads * shape.head_dim
    logits = 2 * (step.logit_positions or step.rows) * shape.vocabulary * shape.hidden
    layers = frozen * (3 if step.checkpointing else 2) + attention * (4 if step.checkpointing else 3)
    return layers + 2 * logits + 6 * tokens * shape.lora_values(lora)


def layer_bytes(shape: ModelShape, lora: LoraConfig, precision: Precision, masked: bool) -> int:
    """Bytes that autograd stores per token in a whole layer.

    With a mask, attention repeats keys and values for all heads.
    """
    kept = precision.bytes
    queries = shape.heads * shape.head_dim
    keys = (shape.heads if masked else shape.key_value_heads) * shape.head_dim
    norms = 2 * shape.hidden * (FP32 if shape.family.rms_norm else kept)
    attention = (queries + 2 * keys) * kept + FP32 * shape.heads
    inner = shape.intermediate * kept * shape.family.activation_values
    if shape.family.gated:
        inner += 2 * shape.intermediate * kept
    names = {name for name, _, _ in shape.targets(lora)}
    factor = _factor_bytes(shape, precision)
    shares_output = kept == factor and not lora.dropout and names & {"o_proj", "c_proj"}
    output = 0 if shares_output else queries * kept
    return norms + attention + output + inner + _adapter_bytes(shape, shape.targets(lora), lora, precision)


def _factor_bytes(shape: ModelShape, precision: Precision) -> int:
    """Bytes of a value that the factors A and B read: fp32, or as of the layer where they are fused."""
    return precision.bytes if shape.family.fused and not precision.is_8bit else FP32


def _adapter_bytes(
    shape: ModelShape, targets: list[tuple[str, int, int]], lora: LoraConfig, precision: Precision
) -> int:
    """Inputs of the factors A and B of modules per token.

    Each module has a copy of another type, or without the dropped values. Otherwise modules with the same
    input share it.
    """
    kept = _factor_bytes(shape, precision)
    factors = kept * lora.r * len(targets)
    if precision.bytes == kept and not lora.dropout:
        inputs_by_label = {SHARED_INPUTS.get(name, f"{name} {inputs}"): inputs for name, inputs, _ in targets}
        return factors + kept * sum(inputs_by_label.values())
    mask = (1 if precision.on_cuda else kept) if lora.dropout else 0
    return factors + (kept + mask) * sum(inputs for _, inputs, _ in targets)


SHARED_INPUTS = {  # modules that read the same tensor
    "q_proj": "attention",
    "k_proj": "attention",
    "v_proj": "attention",
    "gate_proj": "mlp",
    "up_proj": "mlp",
}


def last_layer_bytes(shape: ModelShape, lora: LoraConfig, precision: Precision) -> int:
    """Bytes per token of a last layer that is computed at one position: its norm, keys and values."""
    keys = 2 * shape.key_value_heads * shape.head_dim * precision.bytes
    targets = [target for target in shape.targets(lora) if target[0] in ("k_proj", "v_proj")]
    return FP32 * shape.hidden + keys + _adapter_bytes(shape, targets, lora, precision)


def activation_bytes(shape: ModelShape, lora: LoraConfig, precision: Precision, step: StepShape) -> int:
    """Bytes that autograd stores in the layers for the backward pass of a micro-batch."""
    whole = layer_bytes(shape, lora, precision, step.shared_prompts)
    if step.checkpointing:
        whole = shape.hidden * precision.bytes
    if step.one_position and shape.family.one_position:
        per_token = (shape.layers - 1) * whole + last_layer_bytes(shape, lora, precision)
    else:
        final_norm = shape.hidden * (FP32 if shape.family.rms_norm else precision.bytes)
        per_token = shape.layers * whole + final_norm
    masks = step.rows * step.tokens**2 * (1 + precision.bytes) if step.shared_prompts else 0
    return step.rows * step.tokens * per_token + masks


def backward_bytes(shape: ModelShape, lora: LoraConfig, precision: Precision, step: StepShape) -> int:
    """Bytes in the backward pass of one layer: gradients of what it stores.

    With checkpointing also what it stores, which is computed again.
    """
    whole = layer_bytes(shape, lora, precision, step.shared_prompts)
    return step.rows * step.tokens * whole * (2 if step.checkpointing else 1)


def logit_bytes(shape: ModelShape, step: StepShape) -> int:
    """Bytes of fp32 logits, in chunks of at most LOGIT_POSITIONS positions."""
    copies = ENTROPY_COPIES if step.entropies else LOGIT_COPIES
    return FP32 * copies * min(step.logit_positions, LOGIT_POSITIONS) * shape.vocabulary


@dataclass(frozen=True)
class MemoryEstimate:
    """Terms of the peak memory of a training step, in bytes."""

    weights: int  # frozen weights, of all models that are resident
    adapter: int  # trained values: LoRA and a client's own modules
    gradients: int  # of the trained values
    optimizer: int  # state of the optimizer
    activations: int  # what autograd stores in the layers
    backward: int  # working memory of the backward pass of a layer
    logits: int  # logits and their gradient
    cache: int = 0  # keys and values of what is generated

    @property
    def total(self) -> int:
        return sum(astuple(self))


@dataclass(frozen=True)
class ForwardShape:
    """What goes through a model at once, without gradients."""

    rows: int
    tokens: int  # of the longest input
    new_tokens: int = 0  # generated after it


def estimate_forward(
    shape: ModelShape, precision: Precision, forward: ForwardShape, lora: LoraConfig | None = None
) -> MemoryEstimate:
    """Terms of the peak memory of a frozen model that scores or generates, with an adapter or without."""
    rows, tokens, new = forward.rows, forward.tokens, forward.new_tokens
    columns = tokens + new + min(new, SPARE_COLUMNS) + tokens if new else 0
    plain = LoraConfig(target_modules=["none"])
    adapter = 0 if lora is None else FP32 * shape.lora_values(lora)
    if lora is not None and new and precision.bytes == FP32 and not precision.is_8bit:
        merged = sum(inputs * outputs for _, inputs, outputs in shape.targets(lora))
        adapter += FP32 * shape.layers * merged  # beside the weights, see components/models/merging.py
    scores = shape.family.score_copies * rows * shape.heads * tokens**2 * precision.bytes
    return MemoryEstimate(
        weights=shape.weight_bytes(precision),
        adapter=adapter,
        gradients=0,
        optimizer=0,
        activations=rows * tokens * layer_bytes(shape, plain, precision, masked=True) + scores,
        backward=0,
        logits=FP32 * LOGIT_COPIES * rows * shape.vocabulary,
        cache=rows * columns * 2 * shape.layers * shape.key_value_heads * shape.head_dim * precision.bytes,
    )


@dataclass(frozen=True)
class TrainedValues:
    """What is trained, and how."""

    optimizer: str  # a key of OPTIMIZER_BYTES
    personal: int = 0  # values of a client's own modules beside LoRA
    resident_bytes: int = 0  # weights of other models in memory, e.g. of rewards


def estimate_step(
    shape: ModelShape, lora: LoraConfig, precision: Precision, step: StepShape, trained: TrainedValues
) -> MemoryEstimate:
    """Terms of the peak memory of a training step."""
    values = shape.lora_values(lora) + trained.personal
    # A micro-batch's gradients exist beside the sum of those before it.
    return MemoryEstimate(
        weights=shape.weight_bytes(precision) + trained.resident_bytes,
        adapter=FP32 * values,
        gradients=2 * FP32 * values,
        optimizer=OPTIMIZER_BYTES[trained.optimizer] * values,
        activations=activation_bytes(shape, lora, precision, step),
        backward=backward_bytes(shape, lora, precision, step),
        logits=logit_bytes(shape, step),
    )
