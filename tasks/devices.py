"""The device pool of a worker process, and the models that stay resident in it.

Prefect's concurrency limits count tasks but give none of them a device, so this does: a task borrows a device for as
long as it runs. A learner (frozen backbone and adapter slot) is built once per device and stays there until another
kind is asked for; adapters are swapped into it in place. The pool is the one object of the project that lives as
long as its process, because the memory of a device does too. It also keeps what the reference says of pairs, which the arms of a
benchmark would otherwise each compute again.
"""

from __future__ import annotations

import gc
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from components.config import Recipe, RecipeError
from components.environment import give_back_memory
from components.federation.clients import LEARNERS
from components.federation.learners import Learner, PolicyLearner
from components.learning.references import References
from components.models.backbone import active_dropout, choose_device

Slot = tuple[str, int]
"""A device, and which of the models on it: the CPU may have several, a GPU has one."""


class DevicePool:
    """Slots on devices, each lent to one task at a time, with the learner that is resident in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._free: queue.PriorityQueue[Slot] | None = None
        self._residents: dict[Slot, tuple[str, Learner]] = {}
        self._references: tuple[str, References] = ("", References())

    @contextmanager
    def borrow(self, recipe: Recipe) -> Iterator[str]:
        """Wait for a free device and hold it."""
        with self._borrow_slot(recipe) as (device, _):
            yield device

    @contextmanager
    def borrow_learner(self, recipe: Recipe, objective: str, mapped: bool = False) -> Iterator[Learner]:
        """Hold a device and the learner on it, built at the first time.

        Args:
            mapped: whether other tasks run at the same time, with which the threads of the CPU are shared.

        Raises:
            RecipeError: clients are to train side by side on the CPU, and the model has dropout.
        """
        key = f"{objective}/{recipe.fingerprint('selector', 'policy', 'federation', 'rewards', 'runtime')}"
        with self._borrow_slot(recipe, mapped) as slot:
            resident = self._residents.get(slot)
            if resident is None or resident[0] != key:
                self._residents.pop(slot, None)  # its memory, before another model is loaded
                with self._building:  # transformers sets defaults of the whole process while it loads
                    learner = LEARNERS[objective](recipe, slot[0])
                if isinstance(learner, PolicyLearner):
                    learner.references = self._known(f"{slot[0].partition(':')[0]}/{recipe.policy.backbone.model_dump_json()}")
                if recipe.runtime.cpu_workers > 1 and slot[0] == "cpu" and (names := active_dropout(learner.model)):
                    raise RecipeError(
                        f"runtime.cpu_workers is {recipe.runtime.cpu_workers}, but the model has dropout ({names[0]}), and clients that share the CPU's one generator "
                        "would not draw the same numbers again: set lora.dropout to 0 (and take a backbone without its own), or cpu_workers to 1.")
                resident = self._residents[slot] = (key, learner)
            yield resident[1]

    @contextmanager
    def _borrow_slot(self, recipe: Recipe, mapped: bool = False) -> Iterator[Slot]:
        with self._lock:
            if self._free is None:
                self._free = queue.PriorityQueue()  # the first one that is free: tasks that run alone have the same one each time, with its learner and what that remembers
                for slot in device_slots(recipe):
                    self._free.put(slot)
            free = self._free
        slot = free.get()
        try:
            set_threads(recipe, mapped)
            yield slot
        finally:
            free.put(slot)

    def _known(self, backbone: str) -> References:
        """What is known of a backbone's references, by all slots, phases and runs of this process; of one backbone at a time."""
        with self._lock:
            if self._references[0] != backbone:
                self._references = (backbone, References())
            return self._references[1]

    def release(self) -> None:
        """Forget the resident learners and the devices, so that the next phase has their memory."""
        with self._lock:
            self._residents.clear()
            self._free = None
        gc.collect()
        give_back_memory()


POOL = DevicePool()


def device_slots(recipe: Recipe) -> list[Slot]:
    """Where tasks of a recipe may run at the same time: once on each GPU, runtime.cpu_workers times on the CPU."""
    return [(device, n) for device in choose_device(recipe.runtime.devices) for n in range(recipe.runtime.cpu_workers if device == "cpu" else 1)]


def set_threads(recipe: Recipe, mapped: bool = False) -> None:
    """Set the threads of a CPU operation, which a result depends on in its last bits; mapped tasks have an even share."""
    import torch

    threads = recipe.runtime.torch_threads or available_cores()
    torch.set_num_threads(max(1, threads // recipe.runtime.cpu_workers) if mapped else threads)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
