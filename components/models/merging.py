"""LoRA adapters merged into the backbone's weights while a policy only answers.

A decoding step is a product of a matrix and a few rows, beside which the two small products of each
LoRA layer take a noticeable share of the time. Merged, the layer is one product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import Linear, LoraLayer

from components.models.offload import is_offloaded


@contextmanager
def merged_adapter(model: torch.nn.Module) -> Iterator[bool]:
    """Merge the active adapters of a PEFT model, and restore the very same weights afterwards.

    The model stays as it is where merging would change more than the last bits, or is not possible:
    with weights in another type than fp32, quantized or offloaded ones, weights that two layers share, active
    dropout, or layers other than PEFT's plain LoRA on a linear layer. Yields whether they are merged.
    """
    modules: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
    layers = [
        layer
        for layer in modules
        if not layer.disable_adapters and not layer.merged and set(layer.active_adapters) & set(layer.lora_A)
    ]
    if not layers or not _can_merge(model, layers):
        yield False
        return
    original = [layer.get_base_layer().weight.data for layer in layers]
    try:
        for layer, weight in zip(layers, original, strict=True):
            layer.get_base_layer().weight.data = weight.clone()
            with torch.no_grad():
                layer.merge()
        yield True
    finally:
        for layer, weight in zip(layers, original, strict=True):
            layer.get_base_layer().weight.data = weight
            layer.merged_adapters = []


def _can_merge(model: torch.nn.Module, layers: list[Any]) -> bool:
    owners: dict[int, int] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and not hasattr(module, "lora_A"):
            owners[id(weight)] = owners.get(id(weight), 0) + 1
    return all(
        type(layer) is Linear
        and type(layer.get_base_layer()) is torch.nn.Linear
        and not layer.training
        and not layer.lora_variant
        and not any(layer.lora_bias.values())
        and layer.get_base_layer().weight.dtype == torch.float32
        and not is_offloaded(layer.get_base_layer())
        and owners[id(layer.get_base_layer().weight)] == 1
        for layer in layers
    )
