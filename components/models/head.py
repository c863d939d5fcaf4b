"""From hidden states to logits, for whoever applies the language-model head by itself: to some positions, or for some tokens alone.

What the families do to the head's output is what their configurations say: Gemma 2 and its successors cap it
(`final_logit_softcapping`), Cohere multiplies it (`logit_scale`), Granite and MiniCPM 3 divide it (`logits_scaling`), HyperCLOVA X
multiplies it by the same name, Falcon-H1 multiplies it (`lm_head_multiplier`). These are those that TRL's fused head knows, too.
Any other model is told by `check_head`, which those call that load one and apply its head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from components.models.backbone import BackboneError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

LOUD = 256.0
"""By how much hidden states are multiplied in check_head, so that a cap is met whatever the size of the logits."""


def head_logits(model: PreTrainedModel, states: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
    """Logits of hidden states, as the model's own forward pass makes them.

    Args:
        model: a causal language model of transformers.
        states: [..., H], last hidden states of its base model.
        rows: vocabulary ids; None for all.

    Returns:
        [..., V], or [..., len(rows)], fp32.
    """
    import torch

    head, config = model.get_output_embeddings(), model.config.get_text_config(decoder=True)
    if rows is None:
        logits = head(states).float()
    else:
        bias = None if getattr(head, "bias", None) is None else head.bias[list(rows)]
        logits = torch.nn.functional.linear(states, head.weight[list(rows)], bias).float()
    for factor in (getattr(model, "logit_scale", None), getattr(config, "lm_head_multiplier", None)):  # the model's: MPT's configuration has one that it does not use
        logits = logits if factor is None else logits * factor
    if (factor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits * factor if config.model_type == "hyperclovax" else logits / factor
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def check_head(model: PreTrainedModel, name: str) -> None:
    """Compare head_logits with the model's own logits of four tokens, as they are and with hidden states LOUD times as large.

    Takes one forward pass; changes neither the model nor a random generator's state.

    Args:
        model: a causal language model in evaluation mode.
        name: of the backbone, for the error.

    Raises:
        BackboneError: they differ by more than the rounding of the model's dtype.
    """
    import torch

    seen = []

    def louder(module: torch.nn.Module, args: Any, output: Any) -> Any:
        states = getattr(output, "last_hidden_state", None)
        if states is not None:
            output.last_hidden_state = states * torch.tensor([1.0, LOUD], device=states.device, dtype=states.dtype)[:, None, None]
            seen.append(output.last_hidden_state)
        return output

    hook = model.base_model.register_forward_hook(louder)
    try:
        with torch.no_grad():
            own = model(input_ids=torch.arange(4, device=model.device).repeat(2, 1), use_cache=False).logits
            found = head_logits(model, seen[-1]) if seen else None
    finally:
        hook.remove()
    tolerance = max(1e-4, 4 * torch.finfo(own.dtype).eps) * own.float().abs().amax(dim=(1, 2), keepdim=True)
    if found is None or found.shape != own.shape or not ((found - own.float()).abs() <= tolerance).all():
        raise BackboneError(
            f"backbone '{name}' ({model.config.model_type}) makes its logits from the last hidden states in a way that components/models/head.py does not know, so that log-probabilities and "
            "selectors' choices would be wrong: use a backbone of another family.")
