"""Matrix products of a pass through a model with LoRA, and the time that a GPU would take for them.

The time of products of one kind is the larger of their operations by the GPU's rate and of the
bytes of their operands and results by its memory bandwidth (the roofline model, Williams et al.
2009). The host starts each product in turn; a pass takes no less time than that. Elementwise
operations, attention's scores and the optimizer's step are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from components.config import LoraConfig
from components.models.memory import SHARED_INPUTS, ModelShape, StepShape

BACKBONES = Path(__file__).with_name("paper_backbones.yaml")
HALF = 2  # bytes of a value in bf16
SINGLE = 4

Precision = Literal["bf16", "tf32", "fp32"]
"""Of products; also the name of their rate in Gpu."""


def read_configs() -> dict[str, dict[str, Any]]:
    """The published config.json of models, by their names on the hub."""
    configs: dict[str, dict[str, Any]] = yaml.safe_load(BACKBONES.read_text(encoding="utf-8"))
    return configs


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
    """Products of one kind, all together."""

    number: float
    flops: float
    bytes: float  # of operands and results
    precision: Precision = "bf16"

    def times(self, passes: float) -> Products:
        return replace(
            self, number=self.number * passes, flops=self.flops * passes, bytes=self.bytes * passes
        )

    def seconds(self, gpu: Gpu) -> dict[str, float]:
        """The time by what bounds it."""
        rate: float = getattr(gpu, self.precision)
        compute = self.flops / (gpu.product_share * rate)
        memory = self.bytes / (gpu.bandwidth_share * gpu.bandwidth)
        return {f"{self.precision} products": compute} if compute >= memory else {"bandwidth": memory}


@dataclass(frozen=True)
class Passes:
    """Passes of one kind through a model."""

    products: Sequence[Products]
    decoding_bytes: float = 0.0  # weights, keys and values that decoding reads

    @property
    def flops(self) -> float:
        return sum(each.flops for each in self.products)

    def times(self, passes: float) -> Passes:
        return Passes([each.times(passes) for each in self.products], self.decoding_bytes * passes)

    def seconds(self, gpu: Gpu) -> dict[str, float]:
        """Seconds by what bounds them: the device's, or the host's if that takes longer."""
        seconds = add_up(each.seconds(gpu) for each in self.products)
        host = gpu.launch * sum(each.number for each in self.products)
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
    precision: Precision = "bf16"  # of the products with the backbone's weights; tf32 has fp32 weights
    eight_bit: bool = False  # the linear layers are; their products count as bf16 ones
    own_head: bool = False  # a client's own head, which is in fp32 and trained

    @property
    def value_bytes(self) -> int:
        return HALF if self.precision == "bf16" else SINGLE

    @property
    def weight_bytes(self) -> float:
        """Bytes of the layers' weights."""
        return self.shape.linear_values * (1 if self.eight_bit else self.value_bytes)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of a token."""
        return 2 * self.shape.layers * self.shape.key_value_heads * self.shape.head_dim * self.value_bytes

    @property
    def cache_passes(self) -> float:
        """Passes over the cache in a decoding step: it is read, or read, copied for all heads, and read."""
        groups = self.shape.heads // self.shape.key_value_heads
        return 1 if groups == 1 else 1 + 2 * groups

    @property
    def factor_precision(self) -> Precision:
        """That of products with LoRA's factors, which are in fp32 where the fused function is not used."""
        fused = self.shape.family.fused and not self.eight_bit
        return "bf16" if fused and self.precision == "bf16" else "fp32"

    def layer_products(self, tokens: float, context: float, cache: float = 0.0) -> Products:
        """Products with the layers' frozen weights, and those of attention, of a forward pass.

        Args:
            tokens: that are computed, of all sequences.
            context: positions that a token attends to, on average.
            cache: bytes of keys and values that are read.
        """
        shape = self.shape
        linear = 2 * tokens * shape.linear_values
        attention = 4 * tokens * context * shape.layers * shape.heads * shape.head_dim
        widths = tokens * shape.layers * sum(inputs + outputs for _, inputs, outputs in shape.linears)
        return Products(
            number=shape.layers * len(shape.linears),
            flops=linear + attention,
            bytes=self.weight_bytes + widths * self.value_bytes + cache,
            precision=self.precision,
        )

    def factor_products(self, lora: LoraConfig, tokens: float) -> Products:
        """Products with the factors of LoRA in a forward pass, without reading the factors."""
        targets = self.shape.targets(lora)
        values = self.shape.layers * tokens * sum(i + o + 2 * lora.r for _, i, o in targets)
        return Products(
            number=2 * self.shape.layers * len(targets),
            flops=2 * tokens * self.shape.lora_values(lora),
            bytes=values * (HALF if self.factor_precision == "bf16" else SINGLE),
            precision=self.factor_precision,
        )

    def head_product(self, positions: float, two_rows: bool = False) -> Products:
        """The product with the head at some positions, or with the two rows of a selector's answers."""
        hidden, vocabulary = self.shape.hidden, 2 if two_rows else self.shape.vocabulary
        size = SINGLE if self.own_head else self.value_bytes
        return Products(
            number=1,
            flops=2 * positions * vocabulary * hidden,
            bytes=positions * (vocabulary * SINGLE + hidden * size) + vocabulary * hidden * size,
            precision="fp32" if self.own_head or two_rows else self.precision,
        )


def training_passes(model: Model, step: StepShape, backwards: int = 1) -> Passes:
    """A forward pass of a micro-batch with so many backward passes.

    With one backward pass and a frozen head their operations are those of step_flops in
    components/models/memory.py, of a selector but for the two logits that it reads. The gradient of a
    client's own head counts in every pass; the shared stage leaves it out.
    """
    shape, lora = model.shape, model.lora
    if lora is None:
        raise ValueError("a model without an adapter is not trained")
    tokens = step.rows * step.tokens
    passes = (2 if step.checkpointing else 1) + backwards
    layers = model.layer_products(tokens, step.tokens / 2).times(passes)
    attention = 2 * tokens * step.tokens * shape.layers * shape.heads * shape.head_dim
    frozen, factors = count_layer_products(shape, lora, step, backwards)
    # Attention has two products backward for each one forward.
    layers = replace(layers, number=frozen, flops=layers.flops + attention * backwards)
    head = model.head_product(step.logit_positions or step.rows, step.one_position)
    return Passes(
        [
            layers,
            replace(model.factor_products(lora, tokens).times(1 + 2 * backwards), number=factors),
            head.times(1 + backwards * (2 if model.own_head else 1)),
        ]
    )


def count_layer_products(
    shape: ModelShape, lora: LoraConfig, step: StepShape, backwards: int = 1
) -> tuple[int, int]:
    """Numbers of products with frozen weights, and with the factors of LoRA, in the layers of a step.

    A module with LoRA has three products forward; backward one with the frozen weight, and two with
    each factor. Inputs of the first layer get no gradient unless it is checkpointed. Where the last layer is
    computed at one position, keys and values are computed twice, once of all positions.
    """
    modules = [name for name, _, _ in shape.linears]
    adapted = [name for name, _, _ in shape.targets(lora)]
    forwards = 2 if step.checkpointing else 1
    frozen = (forwards + backwards) * shape.layers * len(modules)
    factors = (2 * forwards + 4 * backwards) * shape.layers * len(adapted)
    if not step.checkpointing:
        first = [name for name in modules if SHARED_INPUTS.get(name, name) in ("attention", "c_attn")]
        frozen -= backwards * len(first)
        factors -= backwards * sum(name in first for name in adapted)
    if step.one_position and shape.family.one_position:
        again = ("k_proj", "v_proj")
        frozen += sum(name in again for name in modules)
        factors += 2 * sum(name in again for name in adapted)
    return frozen, factors


def forward_passes(
    model: Model, rows: float, tokens: float, context: float, positions: float, cached: bool = False
) -> Passes:
    """A forward pass without gradients.

    Args:
        model: what computes it.
        rows: sequences.
        tokens: of each sequence that are computed.
        context: positions that a token attends to, on average.
        positions: at which logits are computed, of all rows together.
        cached: keys and values of the context are read from a cache, as in a decoding step. Attention
            with a mask copies those of a model with grouped queries for all heads.
    """
    cache = rows * context * model.cache_bytes * model.cache_passes if cached else 0.0
    products = [model.layer_products(rows * tokens, context, cache), model.head_product(positions)]
    if model.lora is not None:
        factors = model.factor_products(model.lora, rows * tokens)
        weights = model.shape.lora_values(model.lora) * SINGLE
        products.append(replace(factors, bytes=factors.bytes + weights))
    return Passes(products, model.weight_bytes + cache if cached else 0.0)
