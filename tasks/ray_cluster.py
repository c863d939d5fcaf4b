"""Where client tasks run on Ray: the connection to a cluster, and what a task requests of it.

A task runs in a process of the cluster, which keeps its trainer for the tasks after it.
"""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from components.config import RecipeError
from components.config.runtime import RuntimeConfig
from components.environment import malloc_variables
from components.models.rewards.function import ALLOW_CODE
from components.paths import home

if TYPE_CHECKING:
    from prefect.task_runners import TaskRunner

TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def connect(runtime: RuntimeConfig) -> TaskRunner[Any]:
    """The task runner of a cluster, to which this process is connected until it ends.

    Without an address a Ray of this process is started, which ends with it.

    Raises:
        RecipeError: Ray is not installed, or there is none at the address.
    """
    if runtime.ray_address is None:
        _use_own_token()
    try:
        import ray  # reads the variables
        from prefect_ray import RayTaskRunner
    except ImportError:
        raise RecipeError(
            "runtime.task_runner is 'ray', but prefect-ray is not installed: pip install 'fed-rlhf[ray]'."
        ) from None
    if not ray.is_initialized():
        allowed = {ALLOW_CODE: os.environ[ALLOW_CODE]} if ALLOW_CODE in os.environ else {}
        variables = malloc_variables() | allowed
        options: dict[str, Any] = {"runtime_env": {"env_vars": variables}, "namespace": "prefect"}
        options |= {"log_to_driver": False, "logging_level": "warning"}
        if runtime.ray_address is None:
            options["include_dashboard"] = False
        try:
            _require_answer(runtime.ray_address)
            ray.init(runtime.ray_address, **options)
        except (OSError, ValueError, ray.exceptions.RaySystemError) as error:
            if runtime.ray_address is None:
                raise
            reason = str(error).splitlines()[0]
            raise RecipeError(
                f"runtime.ray_address is {runtime.ray_address}, but no Ray that takes this process answers"
                f" there ({reason}): see that it runs, and that RAY_AUTH_TOKEN_PATH names its token."
            ) from None
    runner: TaskRunner[Any] = RayTaskRunner(address=runtime.ray_address)
    return runner


def _require_answer(address: str | None) -> None:
    """Raise an OSError where no program listens at HOST:PORT, for which Ray would wait for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()


def _use_own_token() -> None:
    """Give a Ray of this process a token in the project's home, where the user has configured none.

    Otherwise Ray writes one into the user's home folder, which every later cluster of the user then demands.
    """
    if any(name in os.environ for name in TOKEN_VARIABLES):
        return
    path = home() / ".state" / "ray-token"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


def requested(runtime: RuntimeConfig) -> dict[str, float]:
    """What a task requests of the cluster: a GPU where there are GPUs, else the cores of its threads."""
    import ray

    if ray.cluster_resources().get("GPU", 0) >= 1:
        return {"num_gpus": 1}
    return {"num_cpus": runtime.threads_of_client or 1}


def placement(runtime: RuntimeConfig) -> AbstractContextManager[Any]:
    """The request of mapped tasks.

    Raises:
        RecipeError: runtime.devices is set.
    """
    if runtime.devices:
        raise RecipeError(
            "runtime.devices is for runtime.task_runner 'threads': Ray gives each task a GPU of its own, so"
            " leave it out."
        )
    from prefect_ray.context import remote_options

    # With num_gpus, Ray would end the process after a task, and each task would load the model.
    options: AbstractContextManager[Any] = remote_options(max_calls=0, **requested(runtime))
    return options


def max_tasks(runtime: RuntimeConfig) -> int:
    """Tasks that run at once on the whole cluster, if nothing else does; at least one."""
    import ray

    resources = ray.cluster_resources()
    ((name, share),) = requested(runtime).items()
    return max(1, int(resources.get("GPU" if name == "num_gpus" else "CPU", 0) // share))
