"""Where tasks run: the device pool of a worker process, its resident models, and Prefect's task runner.

Prefect's concurrency limits count tasks but assign no device, so the pool does: a task borrows a
device while it runs. A model, such as a trainer (frozen backbone and adapter slot), is built once per device
and stays there until another one is needed; adapters are swapped into it. The pool is the only
object of the project that lives as long as its process, because the memory of a device does. It
also keeps the reference's log-probabilities of pairs, which the arms of a benchmark share.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from components.config import BackboneConfig, Recipe, RecipeError
from components.config.runtime import RuntimeConfig
from components.environment import (
    available_cores,
    release_memory,
    set_torch_threads,
    use_deterministic_kernels,
)
from components.federation.clients.trainer import Trainer
from components.federation.clients.worker import build_trainer, trainer_key
from components.learning.reference_cache import ReferenceCache
from components.models.backbone import BackboneError, choose_devices, find_active_dropout
from tasks import ray_cluster, ray_tasks

if TYPE_CHECKING:
    from prefect import Task
    from prefect.futures import PrefectFuture
    from prefect.task_runners import TaskRunner

R = TypeVar("R")

Arguments = Mapping[str, Any]
"""Those of one call of a task, by their names."""
Place = tuple[str, int]
"""A device, and the index of a model on it: a CPU may have several, a GPU has one."""


class DevicePool:
    """Slots on devices, each lent to one task at a time, with a resident model."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._free: queue.PriorityQueue[Place] | None = None
        self._residents: dict[Place, tuple[str, Any]] = {}
        self._cached_references: tuple[str, ReferenceCache] = ("", ReferenceCache())

    def __reduce__(self) -> str:
        """Pickle the pool by its name, so that a task in another process uses that process's pool."""
        return "POOL"

    @contextmanager
    def borrow(self, runtime: RuntimeConfig) -> Iterator[str]:
        """Wait for a free device and hold it."""
        with self._borrow_place(runtime) as (device, _):
            yield device

    @contextmanager
    def borrow_trainer(self, recipe: Recipe, mapped: bool = False, name: str = "") -> Iterator[Trainer]:
        """Hold a device and a trainer on it; without a name that of the recipe's method.

        Args:
            recipe: the recipe.
            mapped: whether other tasks run concurrently, with which the threads of the CPU are
                shared.
            name: of the trainer, see `Job.trainer`.

        Raises:
            RecipeError: the model has dropout, and clients are to train concurrently on the CPU.
        """
        with self._borrow_place(recipe.runtime, mapped) as place:
            yield self._resident(place, trainer_key(recipe, name), partial(self._build, recipe, place, name))

    @contextmanager
    def borrow_model(self, runtime: RuntimeConfig, key: str, build: Callable[[str], R]) -> Iterator[R]:
        """Hold a device and a model on it, which is built for the device unless it is there by this key."""
        with self._borrow_place(runtime) as place:
            yield self._resident(place, key, partial(build, place[0]))

    def _resident(self, place: Place, key: str, build: Callable[[], R]) -> R:
        """The model of a key at a place; another one's memory is free before a new one is built."""
        known = self._residents.get(place)
        if known is not None and known[0] == key:
            model: R = known[1]
            return model
        if known is not None:
            del known, self._residents[place]
            release_memory()
        model = build()
        self._residents[place] = (key, model)
        return model

    def _build(self, recipe: Recipe, place: Place, name: str) -> Trainer:
        device = place[0]
        with self._building:  # transformers sets defaults of the whole process while it loads
            trainer = build_trainer(recipe, device, name)
        trainer.reference_cache = self._reference_cache(recipe.policy.backbone, device)
        runtime = recipe.runtime
        workers = runtime.workers
        if (
            workers > 1
            and runtime.shares_process
            and device == "cpu"
            and (names := find_active_dropout(trainer.model))
        ):
            raise RecipeError(
                f"runtime.cpu_workers is {workers}, but the model has dropout ({names[0]}), and clients that"
                " share the CPU's one generator would not draw the same numbers again: set lora.dropout to 0"
                " (and use a backbone without dropout), or cpu_workers to 1."
            )
        return trainer

    @contextmanager
    def _borrow_place(self, runtime: RuntimeConfig, mapped: bool = False) -> Iterator[Place]:
        with self._lock:
            if self._free is None:
                # The lowest free place is lent first, so that tasks that run alone find the same
                # resident trainer.
                self._free = queue.PriorityQueue()
                for place in device_places(runtime):
                    self._free.put(place)
            free = self._free
        place = free.get()
        try:
            set_threads(runtime, mapped)
            use_deterministic_kernels(place[0])
            yield place
        except Exception:
            ray_tasks.end_if_gpu_is_lost()
            raise
        finally:
            free.put(place)

    def _reference_cache(self, backbone: BackboneConfig, device: str) -> ReferenceCache:
        """The cache of one backbone on one type of device, for all places, phases and runs.

        It is replaced when another backbone is used.
        """
        key = f"{device.partition(':')[0]}/{backbone.model_dump_json()}"
        with self._lock:
            if self._cached_references[0] != key:
                self._cached_references = (key, ReferenceCache())
            return self._cached_references[1]

    def release(self) -> None:
        """Drop the resident trainers and the devices, so that the next phase has their memory.

        It holds for the processes of Ray that have a GPU too.
        """
        ray_tasks.call_in_processes(release_pool)
        with self._lock:
            self._residents.clear()
            self._free = None
        release_memory()


POOL = DevicePool()


def release_pool() -> None:
    """Drop the resident models of this process."""
    POOL.release()


def device_places(runtime: RuntimeConfig) -> list[Place]:
    """Where tasks of this process may run concurrently: once on each GPU, cpu_workers times on the CPU.

    A process of Ray sees the GPU alone that Ray has given to it.
    """
    is_given = runtime.task_runner == "ray" and runtime.devices != ["cpu"]
    places: list[Place] = []
    for device in choose_devices(None if is_given else runtime.devices):
        places += [(device, n) for n in range(runtime.workers if device == "cpu" else 1)]
    return places


def max_tasks(runtime: RuntimeConfig) -> int:
    """Tasks that can run at once."""
    if runtime.task_runner == "ray":
        return ray_tasks.max_tasks(runtime)
    return len(device_places(runtime))


def describe_places(recipe: Recipe) -> tuple[int | None, str]:
    """How many clients of a recipe work at a time, if it starts here, and where.

    Without the devices that the recipe names here, None and the reason.

    Raises:
        RecipeError: see ray_cluster.connect and ray_cluster.max_tasks.
    """
    try:
        recipe = choose_workers(recipe)
        runtime, federation = recipe.runtime, recipe.federation
        if runtime.task_runner == "ray":
            ray_cluster.connect(runtime)
            places, where = ray_tasks.count_places(runtime), ray_tasks.describe(runtime)
        else:
            devices, places = choose_devices(runtime.devices), max_tasks(runtime)
            threads = runtime.threads_of_client or 1
            on_cpu = f"the CPU, with {threads} thread{'s' * (threads != 1)} each"
            apart = not runtime.shares_process
            each = "a process of the client's owner" if apart else "a thread of this process"
            where = on_cpu if devices == ["cpu"] else f"{', '.join(devices)}, in {each} each"
            if len(devices) > 1 and not apart and not ray_cluster.is_installed():
                where += " (with the extra ray, in a process each, which is faster)"
    except BackboneError as error:
        return None, str(error)
    tasks = math.ceil(federation.clients_per_round / federation.clients_per_task)
    return min(tasks, places), where


def set_threads(runtime: RuntimeConfig, mapped: bool = False) -> None:
    """Set the threads of a CPU operation; mapped tasks share them evenly.

    The last bits of a result depend on them.
    """
    threads = runtime.torch_threads or available_cores()
    set_torch_threads(threads // runtime.workers if mapped else threads)


def choose_workers(recipe: Recipe) -> Recipe:
    """The recipe with the task runner, threads and concurrent clients that it leaves to the machine.

    The last bits of a result depend on the latter two. They follow from the recipe, the devices and the
    number of cores, never from a measurement. With Ray a client has as many threads on each machine.

    Raises:
        BackboneError: a configured device does not exist.
    """
    runtime, federation = recipe.runtime, recipe.federation
    threads = runtime.torch_threads or available_cores()
    devices = choose_devices(runtime.devices)
    # Threads of one process share its interpreter, which keeps several GPUs waiting.
    has_gpus = len(devices) > 1 and "cpu" not in devices
    on_ray = runtime.ray_address or (has_gpus and ray_cluster.is_installed() and runtime.shares_process)
    has_tasks = federation.clients_per_round > federation.clients_per_task
    trained = recipe.model_dump(mode="json", include={federation.options.trained_model, "federation"})
    apart = not (runtime.shares_process and _has_dropout(trained))
    concurrent = threads > 1 and devices == ["cpu"] and has_tasks and apart
    chosen = {
        "task_runner": runtime.task_runner or ("ray" if on_ray else "threads"),
        "torch_threads": threads,
        "cpu_workers": runtime.cpu_workers or (2 if concurrent else 1),
    }
    return recipe.model_copy(update={"runtime": runtime.model_copy(update=chosen)})


def _has_dropout(settings: object) -> bool:
    """Whether a tree of settings has a dropout rate above 0."""
    if isinstance(settings, list):
        return any(map(_has_dropout, settings))
    if not isinstance(settings, dict):
        return False
    return bool(settings.get("dropout")) or any(map(_has_dropout, settings.values()))


def task_runner(runtime: RuntimeConfig) -> TaskRunner[Any]:
    """The task runner of a recipe.

    Raises:
        RecipeError: see ray_cluster.task_runner.
    """
    if runtime.task_runner == "ray":
        return ray_cluster.task_runner(runtime)
    from prefect.task_runners import ThreadPoolTaskRunner

    return ThreadPoolTaskRunner(max_workers=max_tasks(runtime))


def map_task(
    task: Task[Any, R], calls: Sequence[Arguments], runtime: RuntimeConfig
) -> list[PrefectFuture[R]]:
    """Run a task of the present flow with the arguments of each call, and wait until all have ended."""
    if runtime.task_runner == "ray":
        return ray_tasks.map_task(task, calls, runtime)
    futures = [task.submit(**call) for call in calls]
    for future in futures:
        future.wait()
    return futures


def server_workers(runtime: RuntimeConfig, folder: Path) -> int:
    """How many tasks of the server's own work run at once: one, or one on each GPU of Ray."""
    return max_tasks(runtime) if _computes_on_gpus(runtime, folder) else 1


def _computes_on_gpus(runtime: RuntimeConfig, folder: Path) -> bool:
    """Whether processes of Ray do the server's work; nodes that do not see the run's folder do not."""
    return runtime.task_runner == "ray" and ray_tasks.has_gpus() and ray_cluster.sees(folder)


def run_on_workers(
    task: Task[Any, R], calls: Sequence[Arguments], runtime: RuntimeConfig, folder: Path
) -> list[R]:
    """The results of a task of the server that uses a device, for the arguments of each call.

    The calls run on the GPUs of Ray, see server_workers, else one after the other in this process.

    Args:
        folder: of the run.
    """
    if _computes_on_gpus(runtime, folder):
        return [future.result() for future in ray_tasks.map_task(task, calls, runtime)]
    return [task(**call) for call in calls]


def run_on_worker(task: Task[Any, R], runtime: RuntimeConfig, folder: Path, /, **arguments: Any) -> R:
    """The result of one call, see run_on_workers."""
    (result,) = run_on_workers(task, [arguments], runtime, folder)
    return result
