"""Last hidden states at one position per row, for which most of the last layer is not computed.

A causal language model that is read at one position needs the keys and values of all positions in
its last layer, but the query, the output projection, the MLP and the norms of that position alone.
The layer's own forward pass is called with the one position, and finds the keys and values of all
positions where it would find those of a cache. `supports_one_position` compares the result with the
whole model's when the model is loaded; other families compute the whole layer.
"""

from __future__ import annotations

import inspect
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_PARTS = ("k_proj", "v_proj", "head_dim")  # from which keys and values are computed
LAYER_PARAMETERS = ("attention_mask", "position_embeddings", "past_key_values")  # of a decoder layer
ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")  # those that take a mask which is added to the scores
CHECKED_TOKENS = 16  # of a row that is compared
TOLERANCE = 1e-4  # greatest relative difference of two fp32 states that count as equal
_HOOKING = threading.Lock()


def states_at(model: PreTrainedModel, input_ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Last hidden states [N, H] at one position per row, `last` [N], from the whole last layer.

    The rows [N, L] are padded on the right. A causal model never attends to what follows a token, so no mask
    is needed.
    """
    hidden: torch.Tensor = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    return hidden[torch.arange(len(last), device=hidden.device), last]


def states_at_one_position(
    model: PreTrainedModel, input_ids: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    """`states_at` with the last layer at the one position; the model must support it.

    States and gradients differ from those of `states_at` by rounding. Dropout in the last layer
    draws other numbers.
    """
    layer = _last_layer(model)
    if layer.training and getattr(layer, "gradient_checkpointing", False):
        return states_at(model, input_ids, last)  # a checkpointed layer takes no keys from outside
    with _HOOKING:  # the first thread registers the hook
        if _select_positions not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_select_positions, with_kwargs=True)
    _SELECTED.layer, _SELECTED.last = layer, last
    try:
        hidden: torch.Tensor = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    finally:
        _SELECTED.layer = _SELECTED.last = None
    return hidden[:, 0]


def supports_one_position(model: PreTrainedModel) -> bool:
    """Whether a model's last layer can be computed at one position.

    It compares `states_at_one_position` with `states_at` on two rows of tokens from the whole
    vocabulary, which takes two forward passes in evaluation mode. Neither the model nor the state of
    a random generator changes.
    """
    if not _has_known_structure(model):
        return False
    embeddings: Any = model.get_input_embeddings()
    vocabulary = embeddings.weight.shape[0]
    tokens = torch.linspace(0, vocabulary - 1, 2 * CHECKED_TOKENS, dtype=torch.float32, device=model.device)
    input_ids = tokens.long().reshape(2, CHECKED_TOKENS)
    last = torch.tensor([CHECKED_TOKENS - 1, CHECKED_TOKENS // 2], device=model.device)
    with torch.no_grad():
        expected = states_at(model, input_ids, last).float()
        try:
            states = states_at_one_position(model, input_ids, last).float()
        except (RuntimeError, TypeError, LookupError, AttributeError, ValueError):  # parts of other shapes
            return False
    tolerance = max(TOLERANCE, 4 * torch.finfo(model.dtype).eps) * expected.abs().amax(dim=1, keepdim=True)
    return bool(((states - expected).abs() <= tolerance).all())


def _last_layer(model: PreTrainedModel) -> Any:
    base: Any = model.base_model
    return base.layers[-1]


def _has_known_structure(model: PreTrainedModel) -> bool:
    """Whether the last layer has the parts that are used here, as those of the Llama family have."""
    if not hasattr(model.base_model, "layers"):
        return False
    layer = _last_layer(model)
    attention = getattr(layer, "self_attn", None)
    if not all(hasattr(attention, name) for name in ATTENTION_PARTS) or not hasattr(layer, "input_layernorm"):
        return False
    parameters = inspect.signature(layer.forward).parameters
    return (
        all(name in parameters for name in LAYER_PARAMETERS)
        and hasattr(_modeling_module(attention), "apply_rotary_pos_emb")
        and model.config._attn_implementation in ATTENTION_IMPLEMENTATIONS
        and getattr(model.config, "clip_qkv", None) is None
    )


def _modeling_module(attention: object) -> Any:
    """The module of transformers that defines a model family."""
    return sys.modules[type(attention).__module__]


class _FixedKeysAndValues:
    """Stands in for a cache: the keys and values of all positions, [N, heads, L, head_dim] each."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._states = keys, values

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *layer: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._states  # they contain those of the arguments


class _Selected(threading.local):
    """The positions that the present thread computes in a layer; other threads may compute others."""

    layer: Any = None
    last: Any = None


_SELECTED = _Selected()


def _select_positions(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """A hook before the forward pass of a layer, which selects the positions of the present thread."""
    if _SELECTED.layer is not module:
        return None
    states, *others = args
    last = _SELECTED.last
    embeddings = kwargs["position_embeddings"]
    keys, values = _keys_and_values(module.self_attn, module.input_layernorm(states), embeddings)
    replaced = {
        "attention_mask": _select_mask(kwargs["attention_mask"], states, last),
        "position_embeddings": tuple(_select(part, last) for part in embeddings),
        "position_ids": last[:, None],
        "past_key_values": _FixedKeysAndValues(keys, values),
    }
    return (_select(states, last), *others), kwargs | replaced


def _select(tensor: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """One position of each row, [N, 1, D] of a tensor [N, L, D] or [1, L, D]."""
    return tensor.expand(len(last), -1, -1)[torch.arange(len(last), device=tensor.device), last][:, None]


def _select_mask(whole: torch.Tensor | None, states: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The rows [N, 1, 1, L] of a mask [N or 1, 1, L, L], or of the causal mask that None stands for."""
    if whole is not None:
        rows = torch.arange(len(last), device=whole.device)
        return whole.expand(len(last), -1, -1, -1)[rows, :, last][:, :, None]
    hidden = torch.arange(states.shape[1], device=states.device) > last[:, None]
    values = torch.zeros(hidden.shape, device=hidden.device, dtype=states.dtype)
    return values.masked_fill(hidden, torch.finfo(values.dtype).min)[:, None, None]


def _keys_and_values(
    attention: Any, states: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all positions as the attention module computes them, [N, heads, L, head_dim]."""
    shape = (*states.shape[:-1], -1, attention.head_dim)
    keys = attention.k_proj(states).view(shape)
    if hasattr(attention, "k_norm"):
        keys = attention.k_norm(keys)
    keys = keys.transpose(1, 2)
    # The function rotates queries too: here those of no head.
    _, keys = _modeling_module(attention).apply_rotary_pos_emb(keys[:, :0], keys, *embeddings)
    return keys, attention.v_proj(states).view(shape).transpose(1, 2)
