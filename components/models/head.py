"""The language-model head, for code that applies it to selected positions or tokens.

The configuration of a model family that transforms the head's output has a key for it: Gemma 2 and
its successors cap the output (`final_logit_softcapping`), Cohere multiplies it (`logit_scale`),
Granite and MiniCPM 3 divide it (`logits_scaling`), HyperCLOVA X multiplies it under the same name,
and Falcon-H1 multiplies it (`lm_head_multiplier`). TRL's fused head supports the same families.
`check_lm_head` detects any other transformation; code that applies a model's head calls it when it
loads the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from components.models.backbone import BackboneError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Rows of a head of half precision that are multiplied at once; on the CPU they are copied to fp32.
WEIGHT_ROWS = 32_768
STATE_SCALE = 256.0  # of hidden states in `check_lm_head`, large enough for a cap of logits to take effect


def require_finite(scores: np.ndarray, model: str) -> np.ndarray:
    """The scores of a model (by its name in a sentence), which are refused if one is NaN or infinite."""
    wrong = int((~np.isfinite(scores)).sum())
    if wrong:
        raise BackboneError(
            f"{model} gives scores of which {wrong} of {scores.size} are NaN or infinite: its weights or its"
            " adapter are damaged, or training has diverged (lower the learning rate)."
        )
    return scores


def apply_lm_head(
    model: PreTrainedModel, states: torch.Tensor, token_ids: Sequence[int] | None = None
) -> torch.Tensor:
    """Compute the logits of hidden states as the model's own forward pass does, in fp32.

    The logits of a backbone in bf16 or fp16 are not rounded to its dtype: their products are summed
    and returned in fp32, for the log-probabilities of every method. The last hidden states [..., H] give
    logits [..., V], or those of the token ids alone.
    """
    head = output_embeddings(model)
    config = model.config.get_text_config(decoder=True)
    logits: torch.Tensor
    if token_ids is not None:
        rows = list(token_ids)
        bias = None if getattr(head, "bias", None) is None else head.bias[rows].float()
        logits = torch.nn.functional.linear(states.float(), head.weight[rows].float(), bias)
    elif type(head) is torch.nn.Linear and head.weight.dtype != torch.float32:
        logits = cast(Any, _Fp32Product).apply(states.reshape(-1, states.shape[-1]), head.weight)
        logits = logits.reshape(*states.shape[:-1], -1)
        logits = logits if head.bias is None else logits + head.bias.float()
    else:
        logits = head(states).float()
    # The scale is read from the model: MPT's configuration has a logit_scale that the model
    # ignores.
    for factor in (getattr(model, "logit_scale", None), getattr(config, "lm_head_multiplier", None)):
        if factor is not None:
            logits = logits * factor
    scaling = getattr(config, "logits_scaling", None)
    if scaling is not None:
        logits = logits * scaling if config.model_type == "hyperclovax" else logits / scaling
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


class _Fp32Product(torch.autograd.Function):
    """The product of states [N, H] and a frozen weight [V, H] of half precision; [N, V] fp32."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.dtype = states.dtype
        return torch.cat([_multiply(states, rows.t()) for rows in torch.split(weight, WEIGHT_ROWS)], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        total = torch.zeros(len(gradient), weight.shape[1], dtype=torch.float32, device=gradient.device)
        parts = torch.split(gradient, WEIGHT_ROWS, 1)
        for part, rows in zip(parts, torch.split(weight, WEIGHT_ROWS), strict=True):
            total += _multiply(part, rows)
        return total.to(ctx.dtype), None


def _multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right in fp32, where `right` has half precision."""
    if right.is_cuda:  # tensor cores multiply halves and sum in fp32
        return torch.mm(left.to(right.dtype), right, out_dtype=torch.float32)
    return left.float() @ right.float()


def output_embeddings(model: PreTrainedModel) -> torch.nn.Linear:
    """The language-model head of a model."""
    untyped: Any = model
    return cast(torch.nn.Linear, untyped.get_output_embeddings())


def check_lm_head(model: PreTrainedModel, name: str) -> None:
    """Compare `apply_lm_head` with the model's own logits of four tokens.

    The comparison uses the hidden states as they are, and scaled by STATE_SCALE. It takes one
    forward pass in evaluation mode, and changes neither the model nor the state of a random generator.
    Logits may differ by the rounding of the model's dtype.
    """
    states: list[torch.Tensor] = []

    def scale_second_row(module: torch.nn.Module, args: Any, output: Any) -> Any:
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is not None:
            scale = torch.tensor([1.0, STATE_SCALE], device=hidden.device, dtype=hidden.dtype)
            output.last_hidden_state = hidden * scale[:, None, None]
            states.append(output.last_hidden_state)
        return output

    hook = model.base_model.register_forward_hook(scale_second_row)
    try:
        with torch.no_grad():
            input_ids = torch.arange(4, device=model.device).repeat(2, 1)
            expected = model(input_ids=input_ids, use_cache=False).logits
            logits = apply_lm_head(model, states[-1]) if states else None
    finally:
        hook.remove()
    is_close = False
    if logits is not None and logits.shape == expected.shape:
        largest = expected.float().abs().amax(dim=(1, 2), keepdim=True)
        tolerance = max(1e-4, 4 * torch.finfo(expected.dtype).eps) * largest
        is_close = bool(((logits - expected.float()).abs() <= tolerance).all())
    if not is_close:
        raise BackboneError(
            f"backbone '{name}' ({model.config.model_type}) computes its logits from the last hidden states "
            "in a way that components/models/head.py does not support, so log-probabilities and the "
            "choices of selectors would be wrong: use a backbone of another family."
        )
