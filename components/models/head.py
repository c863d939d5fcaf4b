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

from components.models.backbone import BackboneError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

STATE_SCALE = 256.0
"""Factor of hidden states in `check_lm_head`, large enough for a cap of logits to take effect."""


def apply_lm_head(
    model: PreTrainedModel, states: torch.Tensor, token_ids: Sequence[int] | None = None
) -> torch.Tensor:
    """Compute the logits of hidden states as the model's own forward pass does.

    Args:
        model: a causal language model of transformers.
        states: [..., H], last hidden states of its base model.
        token_ids: compute the logits of these tokens only; None computes all V.

    Returns:
        [..., V] or [..., len(token_ids)], fp32.
    """
    import torch

    head = output_embeddings(model)
    config = model.config.get_text_config(decoder=True)
    logits: torch.Tensor
    if token_ids is None:
        logits = head(states).float()
    else:
        bias = None if getattr(head, "bias", None) is None else head.bias[list(token_ids)]
        logits = torch.nn.functional.linear(states, head.weight[list(token_ids)], bias).float()
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


def output_embeddings(model: PreTrainedModel) -> torch.nn.Linear:
    """The language-model head of a model."""
    untyped: Any = model
    return cast("torch.nn.Linear", untyped.get_output_embeddings())


def check_lm_head(model: PreTrainedModel, name: str) -> None:
    """Compare `apply_lm_head` with the model's own logits of four tokens.

    The comparison uses the hidden states as they are, and scaled by STATE_SCALE. It takes one
    forward pass and changes neither the model nor the state of a random generator.

    Args:
        model: a causal language model in evaluation mode.
        name: name of the backbone, for the error message.

    Raises:
        BackboneError: the logits differ by more than the rounding of the model's dtype.
    """
    import torch

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
    if logits is None or not _is_close(logits, expected):
        raise BackboneError(
            f"backbone '{name}' ({model.config.model_type}) computes its logits from the last hidden states "
            "in a way that components/models/head.py does not support, so log-probabilities and the "
            "choices of selectors would be wrong: use a backbone of another family."
        )


def _is_close(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors of logits are equal up to the rounding of the second one's dtype."""
    import torch

    if logits.shape != expected.shape:
        return False
    largest = expected.float().abs().amax(dim=(1, 2), keepdim=True)
    tolerance = max(1e-4, 4 * torch.finfo(expected.dtype).eps) * largest
    return bool(((logits - expected.float()).abs() <= tolerance).all())
