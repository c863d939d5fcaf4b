"""PyTorch's counter of floating-point operations for the project's models."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode


def flop_counter() -> FlopCounterMode:
    """PyTorch's counter of floating-point operations, which does not know `addmm_` and oneDNN's products."""

    def count(result: Sequence[int], a: Sequence[int], b: Sequence[int], **_: object) -> int:
        return 2 * a[0] * a[1] * b[1]

    def count_onednn(x: Sequence[int], weight: Sequence[int], *_: object, **__: object) -> int:
        return 2 * math.prod(x) * weight[0]

    formulas = {torch.ops.aten.addmm_: count, torch.ops.mkldnn._linear_pointwise: count_onednn}
    return FlopCounterMode(display=False, custom_mapping=formulas)
