"""LoRA on a linear layer as one function, y = W x + b + s B A x.

PEFT computes the same as separate operations, whose sums and products with s pass over tensors of
the layer's whole output or input. Here these passes are a part of the matrix products, forward and
backward. Values and gradients are PEFT's up to rounding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import Linear
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from components.models.offload import loaded


class LoraLinear(torch.autograd.Function):
    """The function and its gradients, of frozen W and b."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        x, weight, bias, a, b, scale = inputs
        rows = x.reshape(-1, x.shape[-1])
        hidden = rows @ a.T  # [T, r]
        result = linear(rows, weight, bias).addmm_(hidden, b.T, alpha=scale)
        ctx.save_for_backward(rows, hidden, weight, a, b)
        ctx.scale = scale
        return result.reshape(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows, hidden, weight, a, b = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, weight.shape[0])
        grad_hidden = (gradient @ b).mul_(ctx.scale)  # [T, r]
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = (gradient @ weight).addmm_(grad_hidden, a).reshape(*gradients[0].shape[:-1], -1)
        if ctx.needs_input_grad[3]:
            grad_a = grad_hidden.T @ rows
        if ctx.needs_input_grad[4]:
            grad_b = (gradient.T @ hidden).mul_(ctx.scale)
        return grad_x, None, None, grad_a, grad_b, None


def fuse_lora(model: PeftModel) -> None:
    """Let the plain LoRA layers of a model use the fused function where it computes the same.

    A layer keeps PEFT's own computation while its adapter is disabled, merged or one of several,
    while dropout is active, under autocast, and where its weights are not all of one type.
    """
    for module in model.modules():
        if type(module) is Linear and type(module.get_base_layer()) is torch.nn.Linear:
            layer: Any = module
            layer.forward = partial(_forward, layer, layer.forward)


def _forward(layer: Any, separate: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The forward pass of a layer; `separate` is PEFT's own."""
    name = layer.active_adapters[0] if len(layer.active_adapters) == 1 else None
    if args or kwargs or name is None or name not in layer.lora_A or not _can_fuse(layer, name, x):
        result: torch.Tensor = separate(x, *args, **kwargs)
        return result
    base = layer.get_base_layer()
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    with loaded(base):
        untyped: Any = LoraLinear
        fused: torch.Tensor = untyped.apply(x, base.weight, base.bias, a, b, layer.scaling[name])
    return fused


def _can_fuse(layer: Any, name: str, x: torch.Tensor) -> bool:
    base = layer.get_base_layer()
    dropout = layer.lora_dropout[name]
    return (
        not layer.disable_adapters
        and not layer.merged
        and name not in layer.lora_variant
        and layer.lora_B[name].bias is None
        and (isinstance(dropout, torch.nn.Identity) or not dropout.training)
        and not base.weight.requires_grad
        and (base.bias is None or not base.bias.requires_grad)
        and x.dtype == base.weight.dtype == layer.lora_A[name].weight.dtype
        and not torch.is_autocast_enabled(x.device.type)
    )
