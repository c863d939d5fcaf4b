"""Where tasks run on Ray: in a process for each GPU, or in as many as there are cores for.

A process keeps its trainer for the tasks after it. Ray by itself chooses the process and the GPU of a task
independently, so that a process would find its model on another GPU. Here both are fixed: GPUs are reserved
by a placement group, each bundle of which is one GPU, and Ray keeps a process for each environment of tasks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, TypeVar, cast

from components.config import RecipeError
from components.config.runtime import RuntimeConfig
from components.models.backbone import first_line
from components.paths import home
from tasks.ray_cluster import living_nodes, sees

if TYPE_CHECKING:
    from prefect import Task
    from prefect.futures import PrefectFuture
    from ray import ObjectRef
    from ray.util.placement_group import PlacementGroup

R = TypeVar("R")
LOOK_SECONDS = 5.0
"""How often it is looked whether nodes are lost."""
RESERVE_SECONDS = 60.0
FREE_SECONDS = 10.0
"""How long GPUs that are in use are waited for."""
STAYS: dict[str, Any] = {"max_calls": 0}
"""The option by which a process with a GPU does not end after a task; each task would load the model."""
RESERVED: list[ReservedGpus] = []
"""The GPUs of this process, if it has reserved any."""
GPU_VARIABLE = "FED_RLHF_GPU"
"""Names the GPU of a process that has one."""
WITH_GPUS: set[tuple[str, str]] = set()
"""The connections of this process that have had GPUs: no task of them goes on without one."""


class ReservedGpus:
    """GPUs of the cluster that are reserved for this process.

    Raises:
        RecipeError: no GPU is free.
    """

    def __init__(self) -> None:
        from ray.util.placement_group import placement_group

        self.session = _session()
        self.count = _free_gpus()
        self._used: set[int] = set()
        if self.count:
            self._group: PlacementGroup = placement_group([{"GPU": 1}] * self.count)
            if not self._group.wait(RESERVE_SECONDS):
                self._remove_group()
                self.count = 0
        if not self.count:
            raise RecipeError(
                "no GPU of the Ray cluster is free: wait for the end of what uses them, or start nodes that"
                " have more."
            )
        WITH_GPUS.add(self.session)
        shared = {name: value for name, value in os.environ.items() if name.startswith("FED_RLHF_")}
        self._variables = shared | {"FED_RLHF_HOME": str(home())} if sees(home()) else {}

    def options(self, number: int) -> dict[str, Any]:
        """The options of a task that has a GPU by its number, modulo the count."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = number % self.count
        place = f"{self._group.id.hex()}/{bundle}"
        self._used.add(bundle)
        return {
            "num_gpus": 1,
            "num_cpus": 0,
            "runtime_env": {"env_vars": self._variables | {GPU_VARIABLE: place}},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
        }

    def lost(self) -> set[int]:
        """The numbers of the GPUs whose node is lost."""
        from ray.util.placement_group import placement_group_table

        nodes = living_nodes()
        table = placement_group_table(self._group)["bundles_to_node_id"]
        return {number for number in range(self.count) if table.get(number) not in nodes}

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the processes that have run tasks, and wait for a minute at most."""
        import ray

        remote: Any = ray.remote(**STAYS, max_retries=0)(function)
        called = sorted(self._used - self.lost())
        calls: list[ObjectRef[None]] = [remote.options(**self.options(n)).remote() for n in called]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=60)

    def remove(self) -> None:
        """End the processes, which would keep their models, and give the GPUs back."""
        self.call(_end_process)
        self._remove_group()

    def _remove_group(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)


def _end_process() -> None:
    os._exit(0)


def end_if_gpu_is_lost() -> None:
    """After an error, end a process of Ray with a GPU if its CUDA context is broken, as by an illegal access.

    Every later operation of the process on the GPU would fail. Ray repeats the task in a new process.
    """
    import torch
    from prefect import get_run_logger
    from prefect.logging.handlers import APILogWorker

    cuda: Any = torch.cuda
    if GPU_VARIABLE not in os.environ or not cuda.is_initialized():
        return
    try:
        cuda.synchronize()
    except RuntimeError as lost:
        try:
            get_run_logger().error(
                "this process ends, since it cannot use its GPU any more: %s", first_line(lost)
            )
            APILogWorker.drain_all(timeout=10)
        finally:
            os._exit(1)


def _free_gpus() -> int:
    """GPUs that nothing uses; those that a run has just given back become free within seconds."""
    import ray

    deadline = time.monotonic() + FREE_SECONDS
    while True:
        free = int(ray.available_resources().get("GPU", 0))
        if free == _gpus() or time.monotonic() > deadline:
            return free
        time.sleep(0.2)


def reserve_gpus() -> ReservedGpus:
    """The GPUs of this process, which it has until it disconnects or a node of them is lost."""
    if RESERVED and RESERVED[0].session != _session():
        RESERVED.clear()
    if RESERVED and RESERVED[0].lost():
        RESERVED.pop().remove()
    if not RESERVED:
        RESERVED.append(ReservedGpus())
    return RESERVED[0]


def _session() -> tuple[str, str]:
    """The connection of this process to a cluster."""
    import ray

    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def call_in_processes(function: Callable[[], None]) -> None:
    """Call a function in the processes of GPUs, if this process has any."""
    for reserved in RESERVED:
        import ray

        if ray.is_initialized() and reserved.session == _session():
            reserved.call(function)


def has_gpus() -> bool:
    """Whether the cluster has GPUs, or had some of this process: tasks have one each then."""
    return _session() in WITH_GPUS or _gpus() > 0


def _gpus() -> int:
    """The GPUs of the cluster."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def map_task(
    task: Task[Any, R], calls: Sequence[Mapping[str, Any]], runtime: RuntimeConfig
) -> list[PrefectFuture[R]]:
    """Run a task of the present flow with the arguments of each call, and wait until all have ended.

    The call of number n has the GPU of number n, modulo their count, and a tag that says so. Calls on a node
    that is lost are repeated on the others.
    """
    from prefect import tags
    from prefect_ray.context import remote_options

    futures: dict[int, PrefectFuture[R]] = {}
    left: Sequence[int] = range(len(calls))
    while left:
        gpus = reserve_gpus() if has_gpus() else None
        for number in left:
            options = {"num_cpus": _cores(runtime)} if gpus is None else gpus.options(number)
            place = [] if gpus is None else [f"GPU {number % gpus.count}"]
            with remote_options(**STAYS | options), tags(*place):
                futures[number] = task.submit(**calls[number])
        left = _wait({number: futures[number] for number in left}, gpus)
    return [futures[number] for number in range(len(calls))]


def _wait(futures: Mapping[int, PrefectFuture[Any]], gpus: ReservedGpus | None) -> list[int]:
    """Wait until tasks have ended; the numbers of those whose GPU is lost.

    Ray's own waiting would lose the exception of a signal's handler.
    """
    pending = {cast(Any, future).wrapped_future.future(): number for number, future in futures.items()}
    while pending:
        for ended in wait(pending, timeout=LOOK_SECONDS).done:
            del pending[ended]
        if gpus is not None and pending and {n % gpus.count for n in pending.values()} <= gpus.lost():
            break
    return list(pending.values())


def _cores(runtime: RuntimeConfig) -> int:
    """The cores of a task without a GPU."""
    return runtime.threads_of_client or 1


def max_tasks(runtime: RuntimeConfig) -> int:
    """Tasks that run at once on the GPUs of this process, or on the cores of the cluster.

    Raises:
        RecipeError: no GPU is free; and see count_places.
    """
    return reserve_gpus().count if has_gpus() else count_places(runtime)


def count_places(runtime: RuntimeConfig) -> int:
    """Tasks that run at once on the whole cluster, if nothing else does.

    Raises:
        RecipeError: no node has the cores of one task.
    """
    import ray

    if (gpus := _gpus()) > 0:
        return gpus
    share = _cores(runtime)
    sizes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    count = int(sum(size // share for size in sizes))
    if not count:
        raise RecipeError(
            f"a client has {share} threads (runtime.torch_threads / runtime.cpu_workers), but the largest"
            f" node of Ray offers {max(sizes, default=0):g} cores: set runtime.torch_threads lower, or start"
            " the nodes with more cores (ray start --num-cpus)."
        )
    return count


def describe(runtime: RuntimeConfig) -> str:
    """The cluster, and what a task requests of it."""
    import ray

    resources = ray.cluster_resources()
    sizes = {"node": len(living_nodes()), "core": resources.get("CPU", 0), "GPU": resources.get("GPU", 0)}
    cluster = ", ".join(f"{size:g} {name}{'s' * (size != 1)}" for name, size in sizes.items() if size)
    cores = _cores(runtime)
    share = "a process per GPU" if has_gpus() else f"{cores} core{'s' * (cores != 1)} each"
    return f"Ray {runtime.ray_address or 'on this machine'} ({cluster}), with {share}"
