"""Gradient checkpointing (Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost).

The forward pass of a layer stores its input alone, and the backward pass computes the layer again.
Values and gradients are the same. Only passes that gradients follow are checkpointed, in evaluation
mode too; generation and scoring are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from components.models.backbone import BackboneError

if TYPE_CHECKING:
    import torch
    from peft import PeftModel


def enable_checkpointing(model: PeftModel, name: str, whole_last_layer: bool = True) -> None:
    """Let the layers of a model be checkpointed.

    Transformers, and PEFT if LoRA is attached later, let the outputs of the embeddings require
    gradients, which the reentrant implementation needs. Here no gradient passes through layers
    before the first trained parameter. A last layer that is not computed at all positions stores little
    and is not checkpointed, see components/models/last_layer.py.
    """
    base: Any = model.get_base_model()
    layers = []
    if base.supports_gradient_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.disable_input_require_grads()
        layers = _checkpointed_layers(base)
    if not layers:
        raise BackboneError(
            f"the layers of backbone '{name}' ({base.config.model_type}) cannot be checkpointed in"
            " transformers: set gradient_checkpointing to false, and a smaller micro_batch_size."
        )
    if not whole_last_layer:
        layers[-1].gradient_checkpointing = False


@contextmanager
def checkpointed(model: torch.nn.Module) -> Iterator[None]:
    """Checkpoint the layers in evaluation mode too, if checkpointing is enabled.

    Transformers does it in training mode only. The mode of the layers' own parts, such as dropout,
    does not change.
    """
    layers = [layer for layer in _checkpointed_layers(model) if not layer.training]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def _checkpointed_layers(model: torch.nn.Module) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [
        module
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    ]
