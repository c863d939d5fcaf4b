"""Servers of the project on loopback: a private Prefect API for one run, and those of `fed-rlhf up`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from components.environment import PRIVATE_PREFECT, malloc_variables
from components.paths import PACKAGE, home, in_checkout
from infra import processes
from infra.processes import ServerError

HOST = "127.0.0.1"
PREFECT_PORT = 4200
PREFECT_SERVER = "prefect-server"
MLFLOW_SERVER = "mlflow-server"
WORKER = "prefect-worker"
STOP_SIGNALS = {
    WORKER: signal.SIGINT,
    MLFLOW_SERVER: signal.SIGTERM,
    PREFECT_SERVER: signal.SIGINT,
}
"""The signal that ends each process, in the order in which they are ended."""
WORK_POOL = "fed-rlhf"
ZOMBIES = "Crash flow runs without a heartbeat"
ZOMBIE_SECONDS = 90
GUARD = """
import signal, subprocess, sys
# In the background of a shell SIGINT is ignored, and the child would inherit that.
signal.signal(signal.SIGINT, signal.SIG_DFL)
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
sys.stdin.buffer.read()
child.send_signal(signal.SIGINT)
try:
    child.wait(10)
except subprocess.TimeoutExpired:
    child.kill()
"""
"""Runs a command until its standard input ends, as it does when the process that holds it ends."""


def prefect_environment() -> dict[str, str]:
    """The environment of Prefect: its database is in the project's home, and loopback needs no proxy."""
    no_proxy = os.environ.get("NO_PROXY", os.environ.get("no_proxy", ""))
    hosts = [name for name in no_proxy.split(",") if name]
    bypass = ",".join(dict.fromkeys([*hosts, HOST, "localhost"]))
    return {
        "PREFECT_HOME": os.environ.get("PREFECT_HOME", str(home() / ".prefect")),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "NO_PROXY": bypass,
        "no_proxy": bypass,
    }


def is_up(url: str, timeout: float = 2.0) -> bool:
    """Whether a GET of a URL succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            return 200 <= int(response.status) < 300
    except (urllib.error.URLError, OSError, ValueError):
        return False


@contextmanager
def prefect_api() -> Iterator[None]:
    """Give this process a Prefect API.

    In this order: the API in PREFECT_API_URL, the one of `fed-rlhf up`, a private one. The variable that
    is set here takes precedence over prefect.toml, by which the user's own `prefect` commands use the server
    of `fed-rlhf up`.

    Raises:
        ServerError: the API in PREFECT_API_URL does not answer, or none could be started.
    """
    os.environ.update(prefect_environment())
    configured = os.environ.get("PREFECT_API_URL")
    if configured:
        if not os.environ.get("PREFECT_API_KEY") and not is_up(f"{configured}/health"):
            raise ServerError(
                f"PREFECT_API_URL is {configured}, but no Prefect API answers there: start it, or unset the"
                " variable so that the run starts its own."
            )
        yield
        return
    shared = f"http://{HOST}:{PREFECT_PORT}/api"
    if processes.is_started(PREFECT_SERVER) and is_up(f"{shared}/health"):
        with _variables({"PREFECT_API_URL": shared}):
            yield
        return
    with _private_server() as url, _variables({"PREFECT_API_URL": url, PRIVATE_PREFECT: "1"}):
        yield


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables, and unset them afterwards; Prefect reads them again if it is imported."""
    os.environ.update(values)
    _refresh_prefect()
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        _refresh_prefect()


def _refresh_prefect() -> None:
    if "prefect" in sys.modules:
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()


@contextmanager
def _private_server() -> Iterator[str]:
    """URL of the API of a Prefect server that ends with this block, and with this process if it is killed."""
    port = free_port()
    url = f"http://{HOST}:{port}/api"
    log = processes.log_path(f"prefect-{port}")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        guard = subprocess.Popen(
            [sys.executable, "-c", GUARD, *prefect_command(port, "--no-ui")],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=home(),
            env=os.environ | prefect_environment() | {"PREFECT_API_URL": url},
        )
    try:
        processes.wait_until(lambda: is_up(f"{url}/health"), guard, "the Prefect server of this run", log)
        log.unlink()  # the server still writes to it, but the run has a log of its own
        yield url
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        try:
            guard.wait(20)
        except subprocess.TimeoutExpired:
            guard.kill()


def free_port() -> int:
    """A port of loopback that no program listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def start_servers() -> int:
    """Start a Prefect server, an MLflow server and a process worker, and register the deployments.

    Servers of an earlier call keep running. If something fails, the servers of this call are stopped.

    Raises:
        ServerError: there is no checkout, a port is taken by another program, or a server does not answer.
    """
    if not in_checkout():
        raise ServerError(
            "`fed-rlhf up` registers the deployments of prefect.yaml, which is only in a checkout of the"
            " project: run it there, or start `prefect server start` and `mlflow server` yourself."
        )
    mlflow = mlflow_settings()
    prefect_url = f"http://{HOST}:{PREFECT_PORT}"
    mlflow_url = f"http://{mlflow['MLFLOW_HOST']}:{mlflow['MLFLOW_PORT']}"
    environment = _deployment_environment(prefect_url, mlflow_url) | mlflow
    started: list[str] = []
    with processes.exclusive():
        _refuse_taken_port(PREFECT_SERVER, HOST, PREFECT_PORT)
        _refuse_taken_port(MLFLOW_SERVER, mlflow["MLFLOW_HOST"], int(mlflow["MLFLOW_PORT"]))
        try:
            _start_and_wait(f"{prefect_url}/api/health", f"{mlflow_url}/health", environment, started)
            register_deployments(environment)
            register_zombie_automation(f"{prefect_url}/api")
            if processes.start(WORKER, worker_command(), environment | malloc_variables()) is not None:
                started.append(WORKER)
        except BaseException:
            for name in reversed(started):
                processes.stop(name, STOP_SIGNALS[name])
            raise
    print(f"Prefect   {prefect_url}      deployments: {prefect_url}/deployments")
    print(f"MLflow    {mlflow_url}")
    print(f"worker    pool {WORK_POOL}, log {processes.log_path(WORKER)}\n")
    print("Run       .venv/bin/prefect deployment run 'fed-rlhf/summarization' --watch")
    print("Stop      make down")
    return 0


def _deployment_environment(prefect_url: str, mlflow_url: str) -> dict[str, str]:
    """The environment of servers, worker and deployments."""
    python_path = [str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
    addresses = {
        "PREFECT_API_URL": f"{prefect_url}/api",
        "MLFLOW_TRACKING_URI": mlflow_url,
        "PYTHONPATH": os.pathsep.join(python_path),
    }
    folders = {
        name: str(Path(value).expanduser().absolute())
        for name, value in os.environ.items()
        if name
        in ("FED_RLHF_HOME", "FED_RLHF_RUNS", "FED_RLHF_JUDGES", "FED_RLHF_TREES", "FED_RLHF_BACKBONES")
    }
    return dict(os.environ) | prefect_environment() | folders | addresses


def _start_and_wait(
    prefect_health: str, mlflow_health: str, environment: dict[str, str], started: list[str]
) -> None:
    """Start both servers, and wait until they answer; the names of those that are started are added."""
    commands = {PREFECT_SERVER: prefect_command(PREFECT_PORT), MLFLOW_SERVER: mlflow_command()}
    health = {PREFECT_SERVER: prefect_health, MLFLOW_SERVER: mlflow_health}
    waiting = {}
    for name, command in commands.items():
        if (process := processes.start(name, command, environment)) is not None:
            started.append(name)
            waiting[name] = process
    for name, process in waiting.items():
        _wait_for_server(name, health[name], process)


def _wait_for_server(name: str, url: str, process: subprocess.Popen[bytes]) -> None:
    processes.wait_until(lambda: is_up(url), process, name, processes.log_path(name))


def register_deployments(environment: dict[str, str]) -> None:
    """Create the work pool, which runs one flow at a time, and register the deployments of prefect.yaml.

    Raises:
        ServerError: Prefect refuses them.
    """
    for command in (
        ["work-pool", "create", WORK_POOL, "--type", "process", "--overwrite"],
        ["work-pool", "set-concurrency-limit", WORK_POOL, "1"],
        ["--no-prompt", "deploy", "--all"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *command],
            cwd=PACKAGE,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ServerError(f"prefect {' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def register_zombie_automation(url: str) -> None:
    """Let the server end flow runs as Crashed whose process has died, as Prefect's guide of zombies does.

    A flow run sends heartbeats (prefect.toml); one that has sent some, and neither ended nor sent another for
    ZOMBIE_SECONDS, is dead.

    Args:
        url: of the Prefect API.
    """
    with _variables({"PREFECT_API_URL": url}):
        from prefect.automations import Automation, EventTrigger, Posture, ResourceSpecification
        from prefect.client.schemas.objects import StateType
        from prefect.events.actions import ChangeFlowRunState

        heartbeat = "prefect.flow-run.heartbeat"
        ends = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
        automation = Automation(
            name=ZOMBIES,
            description="End flow runs as Crashed that send no heartbeat any more.",
            trigger=EventTrigger(
                after={heartbeat},
                expect={heartbeat, *ends},
                match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=timedelta(seconds=ZOMBIE_SECONDS),
            ),
            actions=[ChangeFlowRunState(state=StateType.CRASHED, message="Its process sends no heartbeat.")],
        )
        try:
            existing: Any = Automation.read(name=ZOMBIES)
            automation.id = existing.id
            automation.update()
        except ValueError:  # there is none of this name
            automation.create()


def stop_servers() -> int:
    """Stop the processes of start_servers, and no others."""
    with processes.exclusive():
        stopped = [processes.stop(name, number) for name, number in STOP_SIGNALS.items()]
    if not any(stopped):
        print("nothing is running")
    return 0


def run_mlflow_server() -> NoReturn:
    """Replace this process by the MLflow server of the project, until Ctrl-C."""
    settings = mlflow_settings()
    _replace_process(
        MLFLOW_SERVER,
        (settings["MLFLOW_HOST"], int(settings["MLFLOW_PORT"])),
        mlflow_command(),
        os.environ | prefect_environment() | settings,
    )


def run_prefect_server() -> NoReturn:
    """Replace this process by a Prefect server on the project's database, until Ctrl-C."""
    url = f"http://{HOST}:{PREFECT_PORT}/api"
    _replace_process(
        PREFECT_SERVER,
        (HOST, PREFECT_PORT),
        prefect_command(PREFECT_PORT),
        os.environ | prefect_environment() | {"PREFECT_API_URL": url},
    )


def _replace_process(
    name: str, address: tuple[str, int], command: Sequence[str], environment: dict[str, str]
) -> NoReturn:
    host, port = address
    url = f"http://{host}:{port}"
    if processes.is_started(name):
        print(f"{name} is running already: {url} (stop it with make down)")
        sys.exit(0)
    _refuse_taken_port(name, host, port)
    print(f"{url}  (Ctrl-C ends it)", flush=True)
    os.chdir(home())
    os.execve(command[0], list(command), environment)


def prefect_command(port: int, *options: str) -> list[str]:
    """A Prefect server on loopback."""
    return [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port), *options]


def mlflow_command() -> list[str]:
    """The project's tracking server, which takes its options from the variables of mlflow_settings."""
    return [sys.executable, "-m", "mlflow", "server"]


def worker_command() -> list[str]:
    """The worker that runs deployments in processes of their own."""
    options = ["--pool", WORK_POOL, "--type", "process", "--name", "local"]
    return [sys.executable, "-m", "prefect", "worker", "start", *options]


def mlflow_settings() -> dict[str, str]:
    """The variables of mlflow/server.env, with absolute paths; those of the environment take precedence.

    Raises:
        ServerError: there is no checkout, or a line of the file is not KEY=VALUE.
    """
    path = PACKAGE / "mlflow" / "server.env"
    if not path.is_file():
        raise ServerError(
            f"{path} is missing: it is only in a checkout of the project; elsewhere start `mlflow server`"
            " yourself."
        )
    settings = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        key, equals, value = line.partition("=")
        if not equals or not re.fullmatch(r"[A-Z_]+", key):
            raise ServerError(f"{path}, line {number}: expected KEY=VALUE, not {line!r}.")
        settings[key] = os.environ.get(key, value)
    store = settings["MLFLOW_BACKEND_STORE_URI"]
    if store.startswith("sqlite:///") and not store.startswith("sqlite:////"):
        settings["MLFLOW_BACKEND_STORE_URI"] = f"sqlite:///{home() / store.removeprefix('sqlite:///')}"
    artifacts = settings["MLFLOW_DEFAULT_ARTIFACT_ROOT"]
    if "://" not in artifacts:
        settings["MLFLOW_DEFAULT_ARTIFACT_ROOT"] = Path(home() / artifacts).as_uri()
    return settings


def _refuse_taken_port(name: str, host: str, port: int) -> None:
    """Refuse a port that another program than the one of this name listens on."""
    if processes.is_started(name):
        return
    with socket.socket() as probe:
        taken = probe.connect_ex((host, port)) == 0
    if taken:
        raise ServerError(
            f"port {port}, which {name} needs, is taken by another program: stop that program first."
        )


COMMANDS = {
    "up": start_servers,
    "down": stop_servers,
    "mlflow-ui": run_mlflow_server,
    "prefect-ui": run_prefect_server,
}

if __name__ == "__main__":
    try:
        COMMANDS[sys.argv[1]]()
    except ServerError as error:
        sys.exit(f"error: {error}")
