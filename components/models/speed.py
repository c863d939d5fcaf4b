"""The speed of a device, for estimates of time."""

from __future__ import annotations

import time

MEASURED = 0.3  # seconds that are measured


def flops_per_second(device: str) -> float:
    """Floating-point operations per second of products of matrices, in the precision that models train in."""
    import torch

    from components.models.onednn import multiply

    cuda = device.startswith("cuda")
    width = 4096 if cuda else 1024
    matrix = torch.ones(width, width, dtype=torch.bfloat16 if cuda else torch.float32, device=device)
    multiply(matrix, matrix)
    products, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < MEASURED:
        multiply(matrix, matrix)
        if cuda:
            torch.cuda.synchronize(device)
        products += 1
    return 2 * width**3 * products / elapsed
