"""Random choices as functions of (seed, round, client, purpose), never of a global generator.

A run that is resumed, spread over more workers, or run by another task runner draws the same
numbers, because each draw is named by what it is for and not by when it happens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, e.g. ``derive(seed, "sample", round)``.

    The parts are joined with their types, so that ("1",) and (1,), or ("a", "b") and ("ab",),
    differ.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """A NumPy generator for one purpose."""
    import numpy as np

    return np.random.default_rng(derive(seed, *purpose))


@contextmanager
def seeded(device: str, seed: int) -> Iterator[None]:
    """Seed the one generator that dropout on a device draws from, and restore it afterwards.

    torch.manual_seed would seed all devices of the process, on which other threads train other
    clients.
    """
    with restored(device):
        _device_generator(device).manual_seed(seed)
        yield


@contextmanager
def restored(device: str) -> Iterator[None]:
    """Restore the generator that dropout on a device draws from, so that its numbers are drawn again."""
    numbers = _device_generator(device)
    state = numbers.get_state()
    try:
        yield
    finally:
        numbers.set_state(state)


def _device_generator(device: str) -> torch.Generator:
    import torch

    if torch.device(device).type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.device(device).index or 0]
