"""LoRA on a linear layer as one function, y = W x + b + s B A x.

PEFT computes the same as separate operations, whose sums and products with s pass over tensors of
the layer's whole output or input. Here these passes are a part of the matrix products, forward and
backward. Values and gradients are PEFT's up to rounding. With a bf16 layer all products are in bf16, of
copies of the fp32 factors, as autocast computes them; PEFT's own would be in fp32 there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import Linear

from components.models.offload import loaded
from components.models.onednn import frozen_linear, multiply


class LoraLinear(torch.autograd.Function):
    """The function and its derivatives of any order, of frozen W and b.

    A and B are of the type of W or fp32. `dropped` is what the factors read; None stands for x itself.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        x, dropped, weight, bias, a, b, scale = inputs
        rows = x.reshape(-1, x.shape[-1])
        read = rows if dropped is None else dropped.reshape(rows.shape)
        hidden = read @ a.to(weight.dtype).T  # [T, r]
        result = multiply(rows, weight, bias).addmm_(hidden, b.to(weight.dtype).T, alpha=scale)
        ctx.save_for_backward(x if dropped is None else dropped, hidden, weight, a, b)
        ctx.scale = scale
        return result.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        source, hidden, weight, a, b = ctx.saved_tensors
        read = source.reshape(-1, source.shape[-1])
        product = multiply
        if torch.is_grad_enabled():  # the gradients are differentiated again
            hidden, product = read @ a.to(weight.dtype).T, frozen_linear
        gradient = gradients[0].reshape(-1, weight.shape[0])
        grad_hidden = (gradient @ b.to(weight.dtype)).mul_(ctx.scale)  # [T, r]
        grad_x = grad_dropped = grad_a = grad_b = None
        shape = source.shape
        if ctx.needs_input_grad[0]:
            grad_x = product(gradient, weight.t())
            if not ctx.needs_input_grad[1]:
                grad_x.addmm_(grad_hidden, a.to(weight.dtype))
            grad_x = grad_x.reshape(shape)
        if ctx.needs_input_grad[1]:
            grad_dropped = (grad_hidden @ a.to(weight.dtype)).reshape(shape)
        if ctx.needs_input_grad[4]:
            grad_a = (grad_hidden.T @ read).to(a.dtype)
        if ctx.needs_input_grad[5]:
            grad_b = (gradient.T @ hidden).mul_(ctx.scale).to(b.dtype)
        return grad_x, grad_dropped, None, None, grad_a, grad_b, None


def fuse_lora(model: PeftModel) -> None:
    """Let the plain LoRA layers of a model use the fused function where it computes the same.

    A layer keeps PEFT's own computation while its adapter is disabled, merged or one of several, under
    autocast, where its input is not of the type of its weight, and while dropout is active in fp32.
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
    dropout = layer.lora_dropout[name]
    with loaded(base):
        untyped: Any = LoraLinear
        dropped = dropout(x) if _drops(dropout) else None
        fused: torch.Tensor = untyped.apply(x, dropped, base.weight, base.bias, a, b, layer.scaling[name])
    return fused


def _can_fuse(layer: Any, name: str, x: torch.Tensor) -> bool:
    base = layer.get_base_layer()
    types = (base.weight.dtype, layer.lora_A[name].weight.dtype)
    is_mixed = types == (torch.bfloat16, torch.float32)
    return (
        not layer.disable_adapters
        and not layer.merged
        and name not in layer.lora_variant
        and layer.lora_B[name].bias is None
        and (is_mixed or not _drops(layer.lora_dropout[name]))
        and not base.weight.requires_grad
        and (base.bias is None or not base.bias.requires_grad)
        and (is_mixed or len(set(types)) == 1)
        and x.dtype == base.weight.dtype
        and not torch.is_autocast_enabled(x.device.type)
    )


def _drops(dropout: torch.nn.Module) -> bool:
    """Whether a layer of PEFT's for dropout is active; without dropout it is the identity."""
    return dropout.training and not isinstance(dropout, torch.nn.Identity)
