"""Where mapped tasks run: one thread a device of this process, or a Ray cluster."""

from __future__ import annotations

from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from components.config import Recipe, RecipeError
from components.models.backbone import choose_device


def task_runner(recipe: Recipe) -> TaskRunner:
    """The task runner of a recipe.

    Raises:
        RecipeError: Ray is asked for and not installed.
    """
    devices = choose_device(recipe.runtime.devices)
    if recipe.runtime.task_runner == "threads":
        return ThreadPoolTaskRunner(max_workers=len(devices))
    try:
        from prefect_ray import RayTaskRunner
    except ImportError:
        raise RecipeError("runtime.task_runner is 'ray', but prefect-ray is not installed: pip install 'fed-rlhf[ray]'.") from None
    init = {"include_dashboard": False} if recipe.runtime.ray_address is None else {}
    return RayTaskRunner(address=recipe.runtime.ray_address, init_kwargs=init)
