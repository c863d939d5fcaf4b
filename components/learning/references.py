"""Cache of the log-probabilities of pairs under the reference, the frozen backbone.

Each pair is computed separately, so its values do not depend on other pairs, and a resumed run
computes the same bytes. The last bits depend on the number of threads of an operation, so this
number is part of the key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

    from components.models.logprobs import TokenRow
    from components.models.resident import ResidentPolicy

Value = TypeVar("Value")


class ReferenceCache:
    """Log-probabilities under one backbone on one type of device; threads may share it."""

    def __init__(self) -> None:
        self._completions: dict[bytes, np.ndarray] = {}
        self._tokens: dict[bytes, list[torch.Tensor]] = {}

    def completion_logprobs(self, resident: ResidentPolicy, row: TokenRow) -> np.ndarray:
        """Summed log-probability of each of the row's C completions, [C] float64."""
        return _get_or_compute(
            self._completions, row, lambda: resident.score([row], batch_size=1, reference=True)[0]
        )

    def token_logprobs(self, resident: ResidentPolicy, row: TokenRow) -> list[torch.Tensor]:
        """Log-probabilities of the tokens of each of the row's C completions, fp32 on the CPU."""
        import torch

        def compute() -> list[torch.Tensor]:
            resident.model.eval()
            with torch.no_grad():
                tokens = resident.tokens([row], reference=True)
            return [values[mask].cpu() for values, mask in zip(tokens.logprobs, tokens.mask, strict=True)]

        return _get_or_compute(self._tokens, row, compute)


def _get_or_compute(cache: dict[bytes, Value], row: TokenRow, compute: Callable[[], Value]) -> Value:
    import torch

    key = hashlib.blake2b(repr((torch.get_num_threads(), row)).encode(), digest_size=16).digest()
    if key not in cache:
        cache[key] = compute()
    return cache[key]
