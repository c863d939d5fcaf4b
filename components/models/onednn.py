"""The linear layers of a model that only answers, computed by oneDNN.

torch computes fp32 products by MKL, which uses AVX2 on AMD processors, even on those with AVX-512.
oneDNN uses AVX-512 on both; see docs/results/performance.md for the rates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


@contextmanager
def onednn_products(model: torch.nn.Module) -> Iterator[bool]:
    """Let the linear layers of a model use oneDNN, and restore them afterwards.

    It has no gradients, so they may only be called in inference mode. It is used on CPUs with AVX-512,
    by plain layers in fp32, and not by layers whose forward pass has been replaced, such as offloaded
    ones. Results equal those of the layers up to rounding. Yields whether a layer uses it.
    """
    layers: list[Any] = [module for module in model.modules() if _is_faster(module)]
    for layer in layers:
        layer.forward = partial(_forward, layer)
    try:
        yield bool(layers)
    finally:
        for layer in layers:
            del layer.forward


def _is_faster(module: torch.nn.Module) -> bool:
    onednn: Any = torch.backends.mkldnn
    return (
        type(module) is torch.nn.Linear
        and "forward" not in vars(module)
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and bool(onednn.is_available())
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


def _forward(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    # The operation that torch's compiler calls for a linear layer; it reads the weight in place.
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")
    return result
