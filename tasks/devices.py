"""The device pool of a worker process, and the models that stay resident in it.

Prefect's concurrency limits count tasks but give none of them a device, so this does: a task borrows a device for as
long as it runs. A learner (frozen backbone and adapter slot) is built once per device and stays there until another
kind is asked for; adapters are swapped into it in place. The pool is the one object of the project that lives as
long as its process, because the memory of a device does too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from components.config import Recipe
from components.federation.clients import LEARNERS, Learner
from components.models.backbone import choose_device


class DevicePool:
    """Devices, each lent to one task at a time, with the learner that is resident on it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: queue.Queue[str] | None = None
        self._residents: dict[str, tuple[str, Learner]] = {}

    @contextmanager
    def borrow(self, recipe: Recipe) -> Iterator[str]:
        """Wait for a free device and hold it."""
        with self._lock:
            if self._free is None:
                self._free = queue.Queue()
                for device in choose_device(recipe.runtime.devices):
                    self._free.put(device)
            free = self._free
        device = free.get()
        try:
            set_threads(recipe)
            yield device
        finally:
            free.put(device)

    @contextmanager
    def borrow_learner(self, recipe: Recipe, objective: str) -> Iterator[Learner]:
        """Hold a device and the learner on it, built at the first time."""
        key = f"{objective}/{recipe.fingerprint('selector', 'policy', 'federation', 'runtime')}"
        with self.borrow(recipe) as device:
            resident = self._residents.get(device)
            if resident is None or resident[0] != key:
                self._residents.pop(device, None)  # its memory, before another model is loaded
                resident = self._residents[device] = (key, LEARNERS[objective](recipe, device))
            yield resident[1]

    def release(self) -> None:
        """Forget the resident learners and the devices, so that the next phase has their memory."""
        with self._lock:
            self._residents.clear()
            self._free = None
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # glibc keeps what was freed until it is asked for it
            ctypes.CDLL("libc.so.6").malloc_trim(0)


POOL = DevicePool()


def set_threads(recipe: Recipe) -> None:
    """Set the threads of a CPU operation, which a result depends on in its last bits."""
    import torch

    torch.set_num_threads(recipe.runtime.torch_threads or available_cores())


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
