"""Where mapped tasks run: one thread per device of this process, or a Ray cluster."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from components.config import RecipeError, RuntimeConfig
from components.environment import malloc_variables
from components.models.backbone import choose_devices
from tasks.devices import device_slots


def task_runner(runtime: RuntimeConfig) -> TaskRunner[Any]:
    """The task runner of a recipe.

    Raises:
        RecipeError: Ray is selected and not installed.
    """
    if runtime.task_runner == "threads":
        return ThreadPoolTaskRunner(max_workers=len(device_slots(runtime)))
    try:
        from prefect_ray import RayTaskRunner
    except ImportError:
        raise RecipeError(
            "runtime.task_runner is 'ray', but prefect-ray is not installed: pip install 'fed-rlhf[ray]'."
        ) from None
    init_kwargs: dict[str, Any] = {"runtime_env": {"env_vars": malloc_variables()}}
    if runtime.ray_address is None:
        init_kwargs["include_dashboard"] = False
    runner: TaskRunner[Any] = RayTaskRunner(address=runtime.ray_address, init_kwargs=init_kwargs)
    return runner


def placement(runtime: RuntimeConfig) -> AbstractContextManager[None]:
    """The request of a mapped task to a Ray cluster: a GPU if there are GPUs, else a core.

    Tasks on threads request nothing.

    A Ray task sees only its own GPU, so runtime.devices stays unset there.

    Raises:
        RecipeError: runtime.devices is set with Ray.
    """
    if runtime.task_runner == "threads":
        return nullcontext()
    if runtime.devices:
        raise RecipeError(
            "runtime.devices is for runtime.task_runner 'threads': Ray gives each task a GPU of its own, so"
            " leave it out."
        )
    from prefect_ray.context import remote_options

    on_gpu = choose_devices()[0].startswith("cuda")
    options: AbstractContextManager[None] = (
        remote_options(num_gpus=1) if on_gpu else remote_options(num_cpus=runtime.torch_threads or 1)
    )
    return options
