"""Where client tasks run on Ray: the connection to a cluster, and what a task requests of it.

A task runs in a process of the cluster, which keeps its trainer for the tasks after it.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.error import HTTPError
from urllib.request import urlopen

from prefect.settings import PREFECT_API_URL

from components.config import RecipeError
from components.config.runtime import RuntimeConfig
from components.environment import malloc_variables
from components.models.rewards.function import ALLOW_CODE
from components.paths import home, without_credentials

if TYPE_CHECKING:
    from prefect.task_runners import TaskRunner

T = TypeVar("T")
R = TypeVar("R")
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
        if runtime.ray_address is not None:
            require_prefect_api(runtime.ray_address)
    runner: TaskRunner[Any] = RayTaskRunner(address=runtime.ray_address)
    return runner


def require_prefect_api(address: str) -> None:
    """Require that the nodes of a cluster reach the Prefect server, if one is known, to which tasks report.

    Raises:
        RecipeError: naming the nodes that do not, and the server.
    """
    if (url := PREFECT_API_URL.value()) is None:
        return
    answers = call_on_each_node(_answers, f"{url}/health")
    if lost := [node for node, answer in answers.items() if answer is False]:
        raise RecipeError(
            f"runtime.ray_address is {address}, but its nodes {', '.join(lost)} do not reach the Prefect"
            f" server of this run ({without_credentials(url)}): set PREFECT_API_URL to a server at an address"
            " that all nodes reach."
        )


def _answers(url: str) -> bool:
    """Whether a server answers, also with an error."""
    try:
        urlopen(url, timeout=10).close()
    except HTTPError:
        return True
    except OSError:
        return False
    return True


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


def sees(path: Path) -> bool:
    """Whether every node of the cluster has a file at the path that it has on this machine."""
    return all(call_on_each_node(Path.is_file, path).values())


def call_on_each_node(function: Callable[[T], R], argument: T) -> dict[str, R | None]:
    """What a function returns on each node of the cluster, by address, in a process that Ray starts there.

    It is None for a node that has just left.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    calls = {}
    for node in living_nodes():
        place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        calls[node["NodeManagerAddress"]] = remote.options(scheduling_strategy=place).remote(argument)
    answers: dict[str, R | None] = {}
    for address, call in calls.items():
        try:
            answers[address] = ray.get(call)
        except ray.exceptions.RayError:
            answers[address] = None
    return answers


def living_nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster, as Ray describes them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


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


def describe(runtime: RuntimeConfig) -> str:
    """The cluster, and what a task requests of it."""
    import ray

    resources = ray.cluster_resources()
    sizes = {"node": len(living_nodes()), "core": resources.get("CPU", 0), "GPU": resources.get("GPU", 0)}
    cluster = ", ".join(f"{size:g} {name}{'s' * (size != 1)}" for name, size in sizes.items() if size)
    ((name, share),) = requested(runtime).items()
    place = runtime.ray_address or "on this machine"
    thing = "GPU" if name == "num_gpus" else f"core{'s' * (share != 1)}"
    return f"Ray {place} ({cluster}), with {share:g} {thing} each"
