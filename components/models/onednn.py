"""Products with frozen fp32 weights by oneDNN, which uses AVX-512 on AMD processors.

torch computes fp32 products on a CPU by MKL, which uses AVX2 on AMD processors, even on those with AVX-512.
Results equal MKL's up to rounding; docs/results/log/performance.md has the rates.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear


def use_onednn(model: torch.nn.Module) -> None:
    """Let the plain linear layers of a model on a CPU use oneDNN while they are frozen, where it is faster.

    Layers with a forward pass of their own keep it. The hook of an offloaded layer calls `_old_forward`.
    """
    if not _is_amd_with_avx512():
        return
    for module in model.modules():
        name = "_old_forward" if "_old_forward" in vars(module) else "forward"
        if type(module) is not torch.nn.Linear or module.weight.dtype != torch.float32:
            continue
        if name == "_old_forward" or name not in vars(module):
            setattr(module, name, partial(_forward, module))


def uses_onednn(weight: torch.Tensor) -> bool:
    """Whether products with a frozen weight are computed by oneDNN."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and _is_amd_with_avx512()


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b of x [..., N] and W [M, N], without gradients of W and b."""
    if not uses_onednn(weight):
        return linear(x, weight, bias)
    # The operation that torch's compiler calls for a linear layer; it reads the weight in place.
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


class FrozenLinear(torch.autograd.Function):
    """x W^T + b of frozen W and b, with all derivatives by x, also those of torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return multiply(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,) = ctx.saved_tensors
        return frozen_linear(gradients[0], weight.t()), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        (weight,) = ctx.saved_tensors
        return frozen_linear(tangents[0], weight)


def frozen_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """multiply with all derivatives by x."""
    untyped: Any = FrozenLinear
    result: torch.Tensor = untyped.apply(x, weight, bias)
    return result


def _forward(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    weight, bias = layer.weight, layer.bias
    trains = weight.requires_grad or (bias is not None and bias.requires_grad)
    if trains or not uses_onednn(weight) or x.dtype != weight.dtype or torch.is_autocast_enabled("cpu"):
        return linear(x, weight, bias)
    return frozen_linear(x, weight, bias)


@cache
def _is_amd_with_avx512() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    onednn: Any = torch.backends.mkldnn
    return (
        cpuinfo.is_file()
        and "AuthenticAMD" in cpuinfo.read_text(encoding="utf-8")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and bool(onednn.is_available())
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
