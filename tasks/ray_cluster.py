"""The connection to a Ray cluster, and what its nodes see."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.error import HTTPError
from urllib.request import urlopen

from components.config import RecipeError
from components.config.runtime import RuntimeConfig
from components.environment import available_cores, cublas_variables, malloc_variables
from components.models.backbone import choose_devices
from components.models.rewards.function import ALLOW_CODE
from components.paths import home, without_credentials

if TYPE_CHECKING:
    from prefect.task_runners import TaskRunner

CONNECTED: list[str] = []
"""The address that this process is connected to, and the GPUs of a Ray that it has started."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
SEEN: dict[tuple[str, Path], bool] = {}
"""Whether a node has a file or folder."""
T = TypeVar("T")
R = TypeVar("R")
TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def is_installed() -> bool:
    """Whether the extra is installed."""
    return find_spec("ray") is not None and find_spec("prefect_ray") is not None


def task_runner(runtime: RuntimeConfig) -> TaskRunner[Any]:
    """The task runner of a cluster.

    Raises:
        RecipeError: see connect and require_prefect_api.
    """
    connect(runtime)
    if runtime.ray_address is not None:
        require_prefect_api(runtime.ray_address)
    from prefect_ray import RayTaskRunner

    runner: TaskRunner[Any] = RayTaskRunner(address=runtime.ray_address)
    return runner


def connect(runtime: RuntimeConfig) -> None:
    """Connect this process to a cluster until it ends.

    Without an address a Ray of this process is started, which ends with it.

    Raises:
        RecipeError: Ray is not installed, or there is none at the address that takes this process.
    """
    if runtime.ray_address is None:
        _use_own_token()
    try:
        import prefect_ray  # noqa: F401
        import ray  # reads the variables
    except ImportError:
        raise RecipeError(
            "runtime.task_runner is 'ray', but prefect-ray is not installed: install the extra ray, in a"
            " checkout by make install, with a wheel by pip install 'fed_rlhf-VERSION-py3-none-any.whl[ray]'."
        ) from None
    address = runtime.ray_address or "local"
    gpus = [] if runtime.ray_address else [one for one in choose_devices(runtime.devices) if one != "cpu"]
    if ray.is_initialized() and [address, *gpus] != CONNECTED:
        ray.shutdown()
    if ray.is_initialized():
        return
    allowed = {ALLOW_CODE: os.environ[ALLOW_CODE]} if ALLOW_CODE in os.environ else {}
    variables = malloc_variables() | cublas_variables() | allowed
    options: dict[str, Any] = {"runtime_env": {"env_vars": variables}, "namespace": "prefect"}
    options |= {"log_to_driver": False, "logging_level": "warning"}
    if runtime.ray_address is None:
        options |= {"include_dashboard": False, "num_gpus": len(gpus)}
        if gpus:  # Ray ends idle processes, with their models, where there are more than cores
            options["_system_config"] = {"num_workers_soft_limit": available_cores() + 2 * len(gpus)}
    host, _, port = (runtime.ray_address or "").rpartition(":")
    try:
        if host and "/" not in host:  # or Ray would wait for minutes where no program listens
            socket.create_connection((host, int(port)), timeout=10).close()
        with _signal_handlers(), _visible(gpus):
            ray.init(address, **options)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        if runtime.ray_address is None:
            raise RecipeError(
                f"runtime.task_runner is 'ray', as it is by default with several GPUs, but no Ray starts here"
                f" ({reason}): set runtime.task_runner=threads to do without."
            ) from None
        raise RecipeError(
            f"runtime.ray_address is {runtime.ray_address}, but no Ray that takes this process answers there"
            f" ({reason}): see that it runs, that it has the same versions of Ray and Python, and that"
            " RAY_AUTH_MODE is token and RAY_AUTH_TOKEN_PATH names its token."
        ) from None
    CONNECTED[:] = [address, *gpus]
    SEEN.clear()


@contextmanager
def _visible(gpus: Sequence[str]) -> Iterator[None]:
    """Let a Ray that starts here have these GPUs of this process alone."""
    before = os.environ.get(VISIBLE)
    numbers = [int(device.partition(":")[2]) for device in gpus]
    names = before.split(",") if before else [str(n) for n in range(max(numbers, default=-1) + 1)]
    if numbers:
        os.environ[VISIBLE] = ",".join(names[n] for n in numbers)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VISIBLE, None)
        else:
            os.environ[VISIBLE] = before


@contextmanager
def _signal_handlers() -> Iterator[None]:
    """Keep the handler of SIGTERM, which Ray replaces by one that ends the process without a word."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def require_prefect_api(address: str) -> None:
    """Require that the nodes of a cluster reach the Prefect server, if one is known, to which tasks report.

    Raises:
        RecipeError: naming the nodes that do not, and the server.
    """
    from prefect.settings import PREFECT_API_URL

    if (url := PREFECT_API_URL.value()) is None:
        return
    nodes = living_nodes()
    answers = call_on_nodes(nodes, _answers, f"{url}/health")
    if lost := [nodes[node] for node, answer in answers.items() if not answer]:
        raise RecipeError(
            f"runtime.ray_address is {address}, but its nodes {', '.join(lost)} do not have this project, or"
            f" do not reach the Prefect server of this run ({without_credentials(url)}): set PREFECT_API_URL"
            " to a server at an address that all nodes reach."
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
    """Whether every node of the cluster has a file or folder at the path that it has on this machine.

    A node is asked once.
    """
    nodes = living_nodes()
    unknown = [node for node in nodes if (node, path) not in SEEN]
    for node, answer in call_on_nodes(unknown, Path.exists, path).items():
        SEEN[node, path] = answer is True
    return all(SEEN.get((node, path), True) for node in nodes)  # a node without an answer is lost


def call_on_nodes(nodes: Iterable[str], function: Callable[[T], R], argument: T) -> dict[str, R | None]:
    """What a function returns on nodes of the cluster, in a process that Ray starts there.

    It is None where the call failed, or took more than a minute. Nodes that are lost meanwhile are left out;
    Ray learns after seconds that a machine is gone.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    calls = {
        node: remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            argument
        )
        for node in nodes
    }
    answers: dict[str, R | None] = {}
    for node, call in calls.items():
        try:
            answers[node] = ray.get(call, timeout=60)
        except ray.exceptions.RayError:
            answers[node] = None
    living = living_nodes()
    return {node: answer for node, answer in answers.items() if node in living}


def living_nodes() -> dict[str, str]:
    """The addresses of the cluster's nodes, by the ids of the nodes."""
    import ray

    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
