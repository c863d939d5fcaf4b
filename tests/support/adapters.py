"""Adapters with random values, which change the answers of a tiny model."""

import torch

from components.models.adapters import AdapterSlot


def random_tensors(slot: AdapterSlot, seed: int, scale: float) -> dict[str, torch.Tensor]:
    """Normally distributed values for all tensors of a slot, B of a LoRA included."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(parameter.shape, generator=generator)
        for name, parameter in slot.named.items()
    }
