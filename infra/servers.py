"""Servers of the project on loopback: a private Prefect API for one run, and those of `fed-rlhf up`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

import psutil
import yaml

from components.environment import PRIVATE_PREFECT, malloc_variables
from components.io import write_atomically
from components.paths import (
    PACKAGE,
    home,
    in_checkout,
    prefect_address,
    tracking_uri,
    without_credentials,
)
from infra import processes
from infra.processes import DATABASES, ServerError
from infra.stores import check_writable, prepare_prefect_database, prepare_tracking_store

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.orchestration import SyncPrefectClient

HOST = "127.0.0.1"
PREFECT_PORT = urlsplit(prefect_address()).port or 80
PREFECT_SERVER = "prefect-server"
MLFLOW_SERVER = "mlflow-server"
WORKER = "prefect-worker"
PORTS = {PREFECT_SERVER: "api.url in prefect.toml", MLFLOW_SERVER: "the variable MLFLOW_PORT"}
"""Where the port of each server is chosen."""
STOP_SIGNALS = {
    WORKER: signal.SIGINT,
    MLFLOW_SERVER: signal.SIGTERM,
    PREFECT_SERVER: signal.SIGINT,
}
"""The signal that ends each process, in the order in which they are ended."""
SCHEDULE_SLUG = "fed-rlhf"
"""By which the schedules of prefect.yaml, one of a deployment, are known from those that users make."""
WORK_POOL = "fed-rlhf"
QUEUES = ("default", "nightly")
"""Of the work pool, each for one flow at a time, so that no run waits for a nightly one."""
ZOMBIES = "Crash flow runs without a heartbeat"
ZOMBIE_SECONDS = 90
KEEP_ALIVE_SECONDS = 60
"""Seconds for which Prefect's server keeps an idle connection.

Prefect's client uses one again for 25 seconds. By default the server closes it after 5, and a client whose
request was on its way waits for two seconds, and repeats it."""
WATCH = """
import sys, time
from pathlib import Path
import psutil
owner = psutil.Process(int(sys.argv[1]))
while owner.is_running() and owner.status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.5)
Path(sys.argv[2]).unlink(missing_ok=True)
"""
"""Runs until another process ends, and removes a file then."""
GUARD = """
import select, signal, subprocess, sys
# In the background of a shell SIGINT is ignored, and the child would inherit that.
signal.signal(signal.SIGINT, signal.SIG_DFL)
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
while not select.select([sys.stdin], [], [], 0.5)[0]:
    if child.poll() is not None:
        sys.exit(child.returncode or 1)
child.send_signal(signal.SIGINT)
try:
    child.wait(10)
except subprocess.TimeoutExpired:
    child.kill()
"""
"""Runs a command until it or its standard input ends, which the process that holds it does when it ends."""


class Server(NamedTuple):
    """A server of the project."""

    name: str  # of its process
    host: str
    port: int
    health: str  # path under its address that answers when it is up
    command: list[str]

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.host}:{self.port}"

    def require_free_port(self) -> None:
        """Refuse a port that another program listens on.

        Raises:
            ServerError: naming the port.
        """
        if processes.is_started(self.name):
            return
        with socket.socket() as probe:
            taken = probe.connect_ex((self.host, self.port)) == 0
        if taken:
            raise ServerError(
                f"port {self.port}, which {self.name} needs, is taken by another program: stop that program"
                f" first, or choose another port ({PORTS[self.name]})."
            )


def prefect_environment() -> dict[str, str]:
    """The environment of Prefect: its database is in the project's home, and loopback needs no proxy."""
    no_proxy = os.environ.get("NO_PROXY", os.environ.get("no_proxy", ""))
    bypass = ",".join(dict.fromkeys([*filter(None, no_proxy.split(",")), HOST, "localhost"]))
    return {
        "PREFECT_HOME": str(
            Path(os.environ.get("PREFECT_HOME") or home() / ".prefect").expanduser().absolute()
        ),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "NO_PROXY": bypass,
        "no_proxy": bypass,
    }


def is_up(url: str, timeout: float = 2.0) -> bool:
    """Whether a GET of a URL succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=timeout):
            return True
    except (OSError, ValueError):
        return False


@contextmanager
def prefect_api(meanwhile: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Give this process a Prefect API.

    In this order: the API in PREFECT_API_URL, the one of `fed-rlhf up`, a private one, which the stages of a
    DVC command share. The variable that is set here takes precedence over prefect.toml, by which the user's
    own `prefect` commands use the server of `fed-rlhf up`.

    Args:
        meanwhile: called while a private one starts.

    Raises:
        ServerError: the API in PREFECT_API_URL does not answer, or none could be started.
    """
    os.environ.update(prefect_environment())
    check_writable(Path(os.environ["PREFECT_HOME"]))
    prepare_tracking_store(tracking_uri())
    configured = _api_url(os.environ.get("PREFECT_API_URL", ""))
    shared = f"http://{HOST}:{PREFECT_PORT}/api"
    if configured:
        if not os.environ.get("PREFECT_API_KEY") and not is_up(f"{configured}/health"):
            raise ServerError(
                f"PREFECT_API_URL is {without_credentials(configured)}, but no Prefect API answers there:"
                " start it, or unset the variable so that the run starts its own."
            )
        with _variables({"PREFECT_API_URL": configured}):
            yield
    elif processes.is_started(PREFECT_SERVER) and is_up(f"{shared}/health"):
        with _variables({"PREFECT_API_URL": shared}):
            yield
    else:
        shared_by = _dvc_process()
        server = _private_server(meanwhile) if shared_by is None else nullcontext(_stages_server(shared_by))
        with server as url, _variables({"PREFECT_API_URL": url, PRIVATE_PREFECT: "1"}):
            yield


def _api_url(configured: str) -> str:
    """The address of an API as Prefect needs it: without a slash at its end, and with its path /api."""
    url = configured.rstrip("/")
    if url and not is_up(f"{url}/health") and is_up(f"{url}/api/health"):
        return f"{url}/api"
    return url


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables, and restore them afterwards; Prefect reads them again if it is imported."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    _refresh_prefect()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _refresh_prefect()


def _refresh_prefect() -> None:
    if "prefect" in sys.modules:
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()


@contextmanager
def _private_server(meanwhile: Callable[[], object]) -> Iterator[str]:
    """URL of the API of a Prefect server that ends with this block, and with this process if it is killed."""
    guard, url = _start_guarded(subprocess.PIPE, meanwhile)
    try:
        yield url
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        try:
            guard.wait(20)
        except subprocess.TimeoutExpired:
            guard.kill()


def _dvc_process() -> psutil.Process | None:
    """The DVC command that runs this process as a stage; DVC sets DVC_STAGE for its stages."""
    if "DVC_STAGE" not in os.environ:
        return None
    with suppress(psutil.Error):  # processes of other users cannot be read
        for process in psutil.Process().parents():
            if "DVC_STAGE" not in process.environ():
                return process
    return None


def _stages_server(dvc: psutil.Process) -> str:
    """URL of the API of a Prefect server that the stages of a DVC command share, and that ends with it."""
    record = processes.state_folder() / f"prefect-dvc-{dvc.pid}-{dvc.create_time():.0f}.url"
    if record.is_file():
        url = record.read_text(encoding="utf-8")
        if is_up(f"{url}/health", timeout=30):
            return url
    watch = subprocess.Popen(
        [sys.executable, "-c", WATCH, str(dvc.pid), str(record)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert watch.stdout is not None
    with watch.stdout as ends_with_dvc:
        _, url = _start_guarded(ends_with_dvc)
    write_atomically(record, url.encode())
    return url


def _start_guarded(
    stdin: int | IO[bytes], meanwhile: Callable[[], object] = lambda: None
) -> tuple[subprocess.Popen[bytes], str]:
    """Start a Prefect server that ends with the standard input of its guard, and call `meanwhile` meanwhile.

    Returns:
        the guard, and the URL of the API, which answers.
    """
    port = free_port()
    url = f"http://{HOST}:{port}/api"
    log = processes.log_path(f"prefect-{port}")
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | prefect_environment() | {"PREFECT_API_URL": url}
    prepare_prefect_database(Path(environment["PREFECT_HOME"]))
    # The server migrates Prefect's database.
    with processes.exclusive(DATABASES), log.open("wb") as output:
        guard = subprocess.Popen(
            [sys.executable, "-c", GUARD, *prefect_command(port, "--no-ui")],
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=home(),
            env=environment,
        )
        meanwhile()
        processes.wait_until(lambda: is_up(f"{url}/health"), guard, "the Prefect server of this run", log)
    log.unlink()  # the server still writes to it, but the run has a log of its own
    return guard, url


def free_port() -> int:
    """A port of loopback that no program listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def project_servers() -> tuple[Server, Server, dict[str, str]]:
    """The servers of Prefect and MLflow, and the environment of both, of the worker and of deployments."""
    settings = mlflow_settings()
    prefect = Server(PREFECT_SERVER, HOST, PREFECT_PORT, "/api/health", prefect_command(PREFECT_PORT))
    host, port = settings["MLFLOW_HOST"], int(settings["MLFLOW_PORT"])
    mlflow = Server(MLFLOW_SERVER, host, port, "/health", mlflow_command())
    addresses = {
        "PREFECT_API_URL": f"{prefect.url}/api",
        "MLFLOW_TRACKING_URI": mlflow.url,
        "PYTHONPATH": os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    folders = {
        f"FED_RLHF_{name}": str(Path(os.environ[f"FED_RLHF_{name}"]).expanduser().absolute())
        for name in ("HOME", "RUNS", "JUDGES", "TREES", "BACKBONES")
        if f"FED_RLHF_{name}" in os.environ
    }
    return prefect, mlflow, os.environ | prefect_environment() | folders | addresses | settings


def start_servers(has_schedules: bool = True) -> None:
    """Start a Prefect server, an MLflow server and a process worker, and register the deployments.

    Servers of an earlier call keep running. If something fails, the servers of this call are stopped.

    Args:
        has_schedules: whether the schedules of prefect.yaml are active.

    Raises:
        ServerError: there is no checkout, a port is taken by another program, or a server does not answer.
    """
    if not in_checkout():
        raise ServerError(
            "`fed-rlhf up` registers the deployments of prefect.yaml, which is only in a checkout of the"
            " project: run it there, or start `prefect server start` and `mlflow server` yourself."
        )
    prefect, mlflow, environment = project_servers()
    check_writable(Path(environment["PREFECT_HOME"]))
    prepare_prefect_database(Path(environment["PREFECT_HOME"]))
    prepare_tracking_store(environment["MLFLOW_BACKEND_STORE_URI"])
    with processes.exclusive():
        for server in (prefect, mlflow):
            server.require_free_port()
        running = [name for name in STOP_SIGNALS if processes.is_started(name)]
        try:
            waiting = [
                (server, processes.start(server.name, server.command, environment))
                for server in (prefect, mlflow)
            ]
            for server, process in waiting:
                if process is not None:
                    health = server.url + server.health
                    log = processes.log_path(server.name)
                    processes.wait_until(partial(is_up, health), process, server.name, log)
            print("registering the deployments of prefect.yaml ...", flush=True)
            register_deployments(environment)
            update_schedules(f"{prefect.url}/api", has_schedules)
            register_zombie_automation(f"{prefect.url}/api")
            options = ["--pool", WORK_POOL, "--type", "process", "--name", "local"]
            worker = [sys.executable, "-m", "prefect", "worker", "start", *options]
            processes.start(WORKER, worker, environment | malloc_variables())
        except BaseException:
            _stop(kept=running)
            raise
    print(f"Prefect   {prefect.url}      deployments: {prefect.url}/deployments")
    print(f"MLflow    {mlflow.url}")
    print(f"worker    pool {WORK_POOL}, log {processes.log_path(WORKER)}\n")
    command = Path(sys.executable).with_name("prefect")
    print(f"Run       {command} deployment run 'fed-rlhf/summarization' --watch")
    if has_schedules:
        print(f"Scheduled {', '.join(active_schedules())}; without: fed-rlhf up --no-schedules")
    else:
        print("Scheduled none of prefect.yaml")
    print("Stop      fed-rlhf down")


def active_schedules() -> list[str]:
    """The schedules of prefect.yaml, as text."""
    file = yaml.safe_load((PACKAGE / "prefect.yaml").read_text(encoding="utf-8"))
    return [
        f"{deployment['name']} ({schedule['cron']} {schedule['timezone']})"
        for deployment in file["deployments"]
        for schedule in deployment.get("schedules") or []
        if schedule["active"]
    ]


def stop_servers() -> None:
    """Stop the processes of start_servers, and no others."""
    with processes.exclusive():
        if not any(_stop()):
            print("nothing is running")


def _stop(kept: Collection[str] = ()) -> list[bool]:
    return [processes.stop(name, number) for name, number in STOP_SIGNALS.items() if name not in kept]


def register_deployments(environment: dict[str, str]) -> None:
    """Register the deployments of prefect.yaml in a work pool whose queues run one flow at a time each.

    Raises:
        ServerError: Prefect refuses them.
    """
    for command in (
        ["work-pool", "create", WORK_POOL, "--type", "process", "--overwrite"],
        ["work-pool", "clear-concurrency-limit", WORK_POOL],  # which earlier versions have set
        ["--no-prompt", "deploy", "--all"],
        *(["work-queue", "set-concurrency-limit", name, "1", "--pool", WORK_POOL] for name in QUEUES),
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


def update_schedules(url: str, are_active: bool = True) -> None:
    """Remove, and name, the schedules that prefect.yaml no longer has, which `prefect deploy` leaves.

    They are known by their slug (SCHEDULE_SLUG). Schedules that a user made stay.

    Args:
        url: of the Prefect API.
        are_active: False stops those of prefect.yaml, which `prefect deploy` has made active.
    """
    file = yaml.safe_load((PACKAGE / "prefect.yaml").read_text(encoding="utf-8"))
    scheduled = {entry["name"] for entry in file["deployments"] if entry.get("schedules")}
    with _variables({"PREFECT_API_URL": url}):
        from prefect.client.orchestration import get_client
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
            for deployment in client.read_deployments():
                for schedule in deployment.schedules:
                    if schedule.slug != SCHEDULE_SLUG:
                        continue
                    if deployment.name not in scheduled:
                        client.delete_deployment_schedule(deployment.id, schedule.id)
                        print(
                            f"removed   the schedule of {deployment.name}, which prefect.yaml no longer has"
                        )
                    elif not are_active:
                        client.update_deployment_schedule(deployment.id, schedule.id, active=False)
                        _delete_missed_runs(client, deployment.id)


def _delete_missed_runs(client: SyncPrefectClient, deployment: UUID) -> None:
    """Delete runs that a schedule has created for times that have passed, which would start late."""
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterDeploymentId,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.client.schemas.objects import StateType

    waiting = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[deployment]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
    )
    for run in client.read_flow_runs(flow_run_filter=waiting):
        if run.auto_scheduled:
            client.delete_flow_run(run.id)


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
        except ValueError:  # there is none of this name
            automation.create()
            return
        automation.id = existing.id
        # An update forgets the flow runs whose next heartbeat is awaited.
        if existing.model_dump() != automation.model_dump():
            automation.update()


def serve(name: str) -> NoReturn:
    """Replace this process by one of the servers, until Ctrl-C."""
    prefect, mlflow, environment = project_servers()
    server = prefect if name == PREFECT_SERVER else mlflow
    if processes.is_started(name):
        print(f"{name} is running already: {server.url} (stop it with make down)")
        sys.exit(0)
    server.require_free_port()
    if server is prefect:
        check_writable(Path(environment["PREFECT_HOME"]))
        prepare_prefect_database(Path(environment["PREFECT_HOME"]))
    prepare_tracking_store(environment["MLFLOW_BACKEND_STORE_URI"])
    print(f"{server.url}  (Ctrl-C ends it)", flush=True)
    if server is prefect:  # it prints how to set PREFECT_API_URL, which prefect.toml does for this checkout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    os.chdir(home())
    os.execve(server.command[0], server.command, environment)


def prefect_command(port: int, *options: str) -> list[str]:
    """A Prefect server on loopback."""
    options = ("--host", HOST, "--port", str(port), "--keep-alive-timeout", str(KEEP_ALIVE_SECONDS), *options)
    return [sys.executable, "-m", "prefect", "server", "start", *options]


def mlflow_command() -> list[str]:
    """The project's tracking server, which takes its options from the variables of mlflow_settings."""
    return [sys.executable, "-m", "mlflow", "server"]


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
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if setting := re.fullmatch(r"([A-Z_]+)=(.*)", line):
            settings[setting[1]] = os.environ.get(setting[1], setting[2])
        elif line and not line.startswith("#"):
            raise ServerError(f"{path}, line {number}: expected KEY=VALUE, not {line!r}.")
    store = settings["MLFLOW_BACKEND_STORE_URI"]
    settings["MLFLOW_BACKEND_STORE_URI"] = re.sub("^sqlite:///(?!/)", f"sqlite:///{home()}/", store)
    artifacts = settings["MLFLOW_DEFAULT_ARTIFACT_ROOT"]
    if "://" not in artifacts:
        settings["MLFLOW_DEFAULT_ARTIFACT_ROOT"] = Path(home() / artifacts).as_uri()
    return settings


if __name__ == "__main__":
    try:
        serve(sys.argv[1])
    except ServerError as error:
        sys.exit(f"error: {error}")
