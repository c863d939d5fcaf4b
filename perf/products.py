"""Matrix products of a pass through a model with LoRA, and the time that a GPU would take for them.

The time of products of one kind is the larger of their operations by the GPU's rate and of the
bytes of their operands and results by its memory bandwidth (the roofline model, Williams et al.
2009). The host starts each product in turn; a pass takes no less time than that. Elementwise
operations, attention's scores and the optimizer's step are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from components.config import LoraConfig
from components.models.memory import SHARED_INPUTS, ModelShape, StepShape

HALF = 2  # bytes of a value in bf16
SINGLE = 4

Precision = Literal["bf16", "tf32", "fp32"]
"""Of products; also the name of their rate in Gpu."""


@dataclass(frozen=True)
class Gpu:
    """A GPU: rates of its data sheet, and the shares of them that are assumed to be reached."""

    bf16: float = 989e12  # operations per second of dense products
    tf32: float = 494.7e12  # of fp32 values that are rounded for the product
    fp32: float = 67e12
    bandwidth: float = 3.35e12  # bytes per second
    product_share: float = 0.4  # of the rates
    bandwidth_share: float = 0.6
    launch: float = 30e-6  # seconds of the host per product, with the operations between products


@dataclass(frozen=True)
class Products:
    """Products of one kind in a pass, all together."""

    number: float
    flops: float
    bytes: float  # of operands and results
    precision: Precision = "bf16"

    def times(self, passes: float) -> Products:
        return Products(self.number * passes, self.flops * passes, self.bytes * passes, self.precision)

    def seconds(self, gpu: Gpu) -> dict[str, float]:
        """The time by what bounds it."""
        rate: float = getattr(gpu, self.precision)
        compute = self.flops / (gpu.product_share * rate)
        memory = self.bytes / (gpu.bandwidth_share * gpu.bandwidth)
        return {f"{self.precision} products": compute} if compute >= memory else {"bandwidth": memory}


def time_of(products: Iterable[Products], gpu: Gpu) -> dict[str, float]:
    """Seconds of the products of passes of one kind, by what bounds them.

    They are the device's, or the host's if that takes longer.
    """
    own = list(products)
    seconds = add_up(each.seconds(gpu) for each in own)
    host = gpu.launch * sum(each.number for each in own)
    return {"launches": host} if host > sum(seconds.values()) else seconds


def add_up(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums of seconds by what bounds them."""
    total: dict[str, float] = {}
    for part in parts:
        for bound, seconds in part.items():
            total[bound] = total.get(bound, 0.0) + seconds
    return total


@dataclass(frozen=True)
class Model:
    """A model on the GPU."""

    shape: ModelShape
    lora: LoraConfig | None = None  # None without an adapter
    fused: bool = True  # bf16 layers with LoRA are fused; before, their factors were multiplied in fp32
    precision: Precision = "bf16"  # of the products with the backbone's weights; tf32 has fp32 weights
    eight_bit: bool = False  # the linear layers are; their products count as bf16 ones
    own_head: bool = False  # a client's own head, which is in fp32 and trained

    @property
    def value_bytes(self) -> int:
        return HALF if self.precision == "bf16" else SINGLE

    @property
    def factor_precision(self) -> Precision:
        """That of products with LoRA's factors: without the fused function, they all are in fp32."""
        fused = self.fused and self.shape.family.fused and not self.eight_bit
        return "bf16" if fused and self.precision == "bf16" else "fp32"

    @property
    def factor_bytes(self) -> int:
        return HALF if self.factor_precision == "bf16" else SINGLE

    def head_bytes(self, positions: float, vocabulary: int) -> float:
        """Bytes of the operands and results of a product with so many rows of the head."""
        size = SINGLE if self.own_head else self.value_bytes
        hidden = self.shape.hidden
        return positions * (vocabulary * SINGLE + hidden * size) + vocabulary * hidden * size

    def weights(self) -> float:
        """Bytes of the layers' weights."""
        linear = self.shape.layers * sum(inputs * outputs for _, inputs, outputs in self.shape.linears)
        return linear * (1 if self.eight_bit else self.value_bytes)

    def adapter_values(self) -> int:
        return 0 if self.lora is None else self.shape.lora_values(self.lora)


def training_products(model: Model, step: StepShape, backwards: int = 1) -> list[Products]:
    """Products of a forward pass of a micro-batch with so many backward passes.

    With one backward pass and a frozen head their operations are those of step_flops in
    components/models/memory.py, of a selector but for the two logits that it reads. The gradient of a
    client's own head counts in every pass; the shared stage leaves it out.
    """
    shape, lora = model.shape, model.lora
    if lora is None:
        raise ValueError("a model without an adapter is not trained")
    forwards = 2 if step.checkpointing else 1
    tokens = step.rows * step.tokens
    linear = 2 * tokens * shape.layers * sum(inputs * outputs for _, inputs, outputs in shape.linears)
    widths = tokens * shape.layers * sum(inputs + outputs for _, inputs, outputs in shape.linears)
    attention = 2 * tokens * step.tokens * shape.layers * shape.heads * shape.head_dim
    positions = step.logit_positions or step.rows
    vocabulary = 2 if step.one_position else shape.vocabulary  # a selector reads two logits
    logits = 2 * positions * vocabulary * shape.hidden
    frozen, factors = count_layer_products(shape, lora, step, backwards)
    passes = forwards + backwards
    targets = shape.targets(lora)
    factor_values = shape.layers * tokens * sum(i + o + 2 * lora.r for _, i, o in targets)
    factor_flops = 2 * tokens * shape.lora_values(lora)
    head_passes = 1 + backwards * (2 if model.own_head else 1)
    return [
        Products(
            number=frozen,
            flops=linear * passes + attention * (forwards + 2 * backwards),
            bytes=(widths * model.value_bytes + model.weights()) * passes,
            precision=model.precision,
        ),
        Products(
            number=factors,
            flops=factor_flops * (1 + 2 * backwards),
            bytes=factor_values * model.factor_bytes * (1 + 2 * backwards),
            precision=model.factor_precision,
        ),
        Products(
            number=head_passes,
            flops=logits * head_passes,
            bytes=model.head_bytes(positions, vocabulary) * head_passes,
            precision="fp32" if model.own_head or step.one_position else model.precision,
        ),
    ]


def count_layer_products(
    shape: ModelShape, lora: LoraConfig, step: StepShape, backwards: int = 1
) -> tuple[int, int]:
    """Numbers of products with frozen weights, and with the factors of LoRA, in the layers of a step.

    A module with LoRA has three products forward; backward one with the frozen weight, and two with
    each factor. Inputs of the first layer get no gradient unless it is checkpointed. Where the last layer is
    computed at one position, keys and values are computed twice, once of all positions.
    """
    frozen_modules = shape.layers * len(shape.linears)
    adapted = shape.layers * len(shape.targets(lora))
    forwards = 2 if step.checkpointing else 1
    frozen = (forwards + backwards) * frozen_modules
    factors = (2 * forwards + 4 * backwards) * adapted
    if not step.checkpointing:
        first = [
            name for name, _, _ in shape.linears if SHARED_INPUTS.get(name, name) in ("attention", "c_attn")
        ]
        frozen -= backwards * len(first)
        factors -= backwards * len([name for name, _, _ in shape.targets(lora) if name in first])
    if step.one_position and shape.family.one_position:
        again = [name for name, _, _ in shape.linears if name in ("k_proj", "v_proj")]
        frozen += len(again)
        factors += 2 * len([name for name, _, _ in shape.targets(lora) if name in again])
    return frozen, factors


def forward_products(
    model: Model, rows: float, tokens: float, context: float, positions: float, cached: bool = False
) -> list[Products]:
    """Products of a forward pass without gradients.

    Args:
        rows: sequences.
        tokens: of each sequence that are computed.
        context: positions that a token attends to, on average.
        positions: at which logits are computed, of all rows together.
        cached: keys and values of the context are read from a cache. Attention with a mask copies
            those of a model with grouped queries for all heads.
    """
    shape = model.shape
    computed = rows * tokens
    linear = 2 * computed * shape.layers * sum(inputs * outputs for _, inputs, outputs in shape.linears)
    attention = 4 * computed * context * shape.layers * shape.heads * shape.head_dim
    widths = computed * shape.layers * sum(inputs + outputs for _, inputs, outputs in shape.linears)
    cache = rows * context * cache_bytes(model) * cache_passes(shape) if cached else 0
    products = [
        Products(
            number=shape.layers * len(shape.linears),
            flops=linear + attention,
            bytes=model.weights() + widths * model.value_bytes + cache,
            precision=model.precision,
        ),
        Products(
            number=1,
            flops=2 * positions * shape.vocabulary * shape.hidden,
            bytes=model.head_bytes(positions, shape.vocabulary),
            precision="fp32" if model.own_head else model.precision,
        ),
    ]
    if model.lora is not None:
        targets = shape.targets(model.lora)
        values = shape.layers * computed * sum(i + o + 2 * model.lora.r for _, i, o in targets)
        products.append(
            Products(
                number=2 * shape.layers * len(targets),
                flops=2 * computed * model.adapter_values(),
                bytes=values * model.factor_bytes + model.adapter_values() * SINGLE,
                precision=model.factor_precision,
            )
        )
    return products


def cache_bytes(model: Model) -> int:
    """Bytes of the keys and values of a token."""
    shape = model.shape
    return 2 * shape.layers * shape.key_value_heads * shape.head_dim * model.value_bytes


def cache_passes(shape: ModelShape) -> float:
    """Passes over the cache in a decoding step: it is read, or read, copied for all heads, and read."""
    groups = shape.heads // shape.key_value_heads
    return 1 if groups == 1 else 1 + 2 * groups
