"""TF32 in the products of frozen fp32 models on CUDA, which round their factors to 10 bits of mantissa."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_users = 0  # threads that are inside
_before = "none"  # precision before the first of them


@contextmanager
def tf32_products() -> Iterator[None]:
    """Let fp32 products of matrices use TF32 on CUDA until the last of the threads inside has left.

    torch has one setting for the process, so no other thread may compute what must not use TF32. It is
    set by allow_tf32, which sets torch's earlier and present setting alike: after fp32_precision alone, a
    library that reads the earlier one gets an error.
    """
    import torch

    global _users, _before
    matmul = torch.backends.cuda.matmul
    with _lock:
        if _users == 0:
            _before = matmul.fp32_precision
            matmul.allow_tf32 = True
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _before != "tf32":
                matmul.allow_tf32 = False
                matmul.fp32_precision = _before
