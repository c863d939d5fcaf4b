"""Cache of the log-probabilities of pairs under the reference, the frozen backbone.

Pairs are computed in batches that follow from their content alone: neighbors in the order of their
lengths, or single pairs where less than half of such a batch is needed. A value therefore does not
depend on what was computed before, and a resumed run computes the same bytes. The last bits depend
on the number of threads of an operation, so this number is part of the key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch

from components.models.logprobs import TokenRow
from components.models.resident import ResidentPolicy

Value = TypeVar("Value")


class ReferenceCache:
    """Log-probabilities under one backbone on one type of device; threads may share it."""

    def __init__(self) -> None:
        self._completions: dict[bytes, np.ndarray] = {}
        self._tokens: dict[bytes, list[list[torch.Tensor]]] = {}

    def completion_logprobs(
        self,
        resident: ResidentPolicy,
        rows: Sequence[TokenRow],
        batch_size: int,
        used: Collection[int] | None = None,
    ) -> np.ndarray:
        """Summed log-probabilities of the completions of N rows of C completions each, [N, C] float64.

        Those of rows that are not used are NaN; None uses all.
        """

        def compute(batch: Sequence[TokenRow]) -> np.ndarray:
            return resident.score(batch, len(batch), reference=True)

        completions = len(rows[0]) - 1 if rows else 2
        logprobs = np.full((len(rows), completions), np.nan)
        for batch in reference_batches(rows, batch_size, used):
            logprobs[batch] = _get_or_compute(self._completions, resident, [rows[n] for n in batch], compute)
        if used is not None:
            logprobs[sorted(set(range(len(rows))) - set(used))] = np.nan
        return logprobs

    def token_logprobs(
        self, resident: ResidentPolicy, rows: Sequence[TokenRow], batch_size: int, used: Collection[int]
    ) -> list[list[torch.Tensor]]:
        """Log-probabilities of each token of the C completions of rows, fp32 on the CPU.

        They are C tensors for each row that is used, and an empty list for the others.
        """

        def compute(batch: Sequence[TokenRow]) -> list[list[torch.Tensor]]:
            resident.model.eval()
            with torch.no_grad():
                tokens = resident.tokens(batch, reference=True)
            values = [row[mask].cpu() for row, mask in zip(tokens.logprobs, tokens.mask, strict=True)]
            completions = len(batch[0]) - 1
            return [values[n : n + completions] for n in range(0, len(values), completions)]

        logprobs: list[list[torch.Tensor]] = [[] for _ in rows]
        for batch in reference_batches(rows, batch_size, used):
            values = _get_or_compute(self._tokens, resident, [rows[n] for n in batch], compute)
            for n, row_values in zip(batch, values, strict=True):
                if n in used:
                    logprobs[n] = row_values
        return logprobs


def reference_batches(
    rows: Sequence[TokenRow], batch_size: int, used: Collection[int] | None
) -> Iterator[list[int]]:
    """Indices of the rows of each batch that is computed.

    The rows are cut into batches in the order of their lengths. A batch of which at least half is
    needed is computed as a whole; of another one, the needed rows are computed one by one.
    """
    order = sorted(range(len(rows)), key=lambda n: (sum(map(len, rows[n])), rows[n]))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        needed = [n for n in batch if used is None or n in used]
        if 2 * len(needed) >= len(batch):
            yield batch
        else:
            yield from ([n] for n in needed)


def _get_or_compute(
    cache: dict[bytes, Value],
    resident: ResidentPolicy,
    rows: Sequence[TokenRow],
    compute: Callable[[Sequence[TokenRow]], Value],
) -> Value:
    # Private modules compute the last norm and the head of a bf16 backbone in fp32.
    settings = (torch.get_num_threads(), resident.personal is not None)
    key = hashlib.blake2b(repr((*settings, rows)).encode(), digest_size=16).digest()
    if key not in cache:
        cache[key] = compute(rows)
    return cache[key]
