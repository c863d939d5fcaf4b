"""Where mapped tasks run: one thread a device of this process, or a Ray cluster."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from components.config import Recipe, RecipeError
from components.environment import malloc_variables
from components.models.backbone import choose_device
from tasks.devices import device_slots


def task_runner(recipe: Recipe) -> TaskRunner:
    """The task runner of a recipe.

    Raises:
        RecipeError: Ray is asked for and not installed.
    """
    if recipe.runtime.task_runner == "threads":
        return ThreadPoolTaskRunner(max_workers=len(device_slots(recipe)))
    try:
        from prefect_ray import RayTaskRunner
    except ImportError:
        raise RecipeError("runtime.task_runner is 'ray', but prefect-ray is not installed: pip install 'fed-rlhf[ray]'.") from None
    init: dict[str, Any] = {"runtime_env": {"env_vars": malloc_variables()}} | ({"include_dashboard": False} if recipe.runtime.ray_address is None else {})
    return RayTaskRunner(address=recipe.runtime.ray_address, init_kwargs=init)


def placement(recipe: Recipe) -> AbstractContextManager[None]:
    """What a mapped task asks of a Ray cluster: a GPU of its own where there are GPUs, else a core; nothing for threads.

    Under Ray a task sees its own GPU only, so runtime.devices stays unset there.

    Raises:
        RecipeError: both are set.
    """
    if recipe.runtime.task_runner == "threads":
        return nullcontext()
    if recipe.runtime.devices:
        raise RecipeError("runtime.devices is for runtime.task_runner 'threads': Ray gives each task a GPU of its own, so leave it out.")
    from prefect_ray.context import remote_options

    on_gpu = choose_device()[0].startswith("cuda")
    return remote_options(num_gpus=1) if on_gpu else remote_options(num_cpus=recipe.runtime.torch_threads or 1)
