"""Contributions of clients: clipped to a norm, and rounded to a grid, on which sums are exact.

The grid's width is g = C / 2^k, for the smallest k with which rounding d values adds at most 2% of the
bound C to the norm. A contribution is clipped to C - g sqrt(d) / 2 before it is rounded, so that its norm
is at most C afterwards, whatever the client has computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, "torch.Tensor"]

LARGEST_ROUNDING = 0.02
"""Share of the bound that rounding may add to a norm."""


def grid_bits(values: int) -> int:
    """k, the smallest one for which sqrt(d) / 2^(k+1) is at most 0.02, for d values."""
    return max(0, math.ceil(math.log2(math.sqrt(values) / (2 * LARGEST_ROUNDING))))


def grid_width(bound: float, values: int) -> float:
    """g = C / 2^k."""
    return math.ldexp(bound, -grid_bits(values))


def clip_to_grid(movement: Tensors, bound: float) -> dict[str, torch.Tensor]:
    """A contribution in cells of the grid, integers in fp32.

    Values that are not finite become 0. The result times the grid's width has a norm of at most the bound.

    Args:
        movement: d values.
        bound: C.
    """
    import torch

    finite = {
        name: torch.nan_to_num(tensor.double(), nan=0.0, posinf=0.0, neginf=0.0)
        for name, tensor in movement.items()
    }
    values = sum(tensor.numel() for tensor in finite.values())
    largest = max((float(tensor.abs().max()) for tensor in finite.values() if tensor.numel()), default=0.0)
    norm = 0.0
    if largest:  # squares of a scaled tensor do not overflow
        squares = sum(float((tensor / largest).square().sum()) for tensor in finite.values())
        norm = largest * math.sqrt(squares)
    width = grid_width(bound, values)
    allowed = bound - width * math.sqrt(values) / 2
    factor = min(1.0, allowed / norm) if norm else 1.0
    return {name: (tensor * factor / width).round().float() for name, tensor in finite.items()}
