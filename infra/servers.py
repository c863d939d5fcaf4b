"""Servers of this project on loopback: a Prefect API for the length of one run, and `make up` / `make down`.

A process that is started here is remembered by its id and its start time, and what it starts itself by a mark in the
environment; only such processes are ever ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from components.config import Explained
from components.environment import malloc_variables

PROJECT = Path(__file__).resolve().parent.parent
STATE = PROJECT / ".state"
HOST = "127.0.0.1"
PREFECT_PORT = 4200
PRIVATE = "FED_RLHF_PRIVATE_PREFECT"
"""Set in the environment while the Prefect API is one for the length of this run."""
MARK = "FED_RLHF_STARTED_BY_UP"
"""Set in the environment of each process that `up` starts, and so of everything that it starts itself, to a word of its own."""
NAMES = ("prefect-server", "mlflow-server", "prefect-worker")
GUARD = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # of a run in the background of a shell it is ignored, and the child would inherit that
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
sys.stdin.buffer.read()
child.send_signal(signal.SIGINT)
try:
    child.wait(10)
except subprocess.TimeoutExpired:
    child.kill()
"""
"""Runs a command until its own standard input ends, which it does when the process that holds the other end dies, however it dies."""


class ServerError(Explained, RuntimeError):
    """A server that cannot be reached or started. The message is meant for the person who needs it."""


def environment() -> dict[str, str]:
    """The environment of the project's Prefect: its own home, so that its database lies with the project; no proxy on loopback."""
    bypass = [name for name in os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")).split(",") if name]
    bypass = ",".join(dict.fromkeys([*bypass, HOST, "localhost"]))
    return {"PREFECT_HOME": os.environ.get("PREFECT_HOME", str(PROJECT / ".prefect")), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1",
            "NO_PROXY": bypass, "no_proxy": bypass}


def is_up(url: str, timeout: float = 2.0) -> bool:
    """Whether a GET of a URL is answered with success."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return 200 <= answer.status < 300
    except (urllib.error.URLError, OSError, ValueError):
        return False


@contextmanager
def prefect_api() -> Iterator[None]:
    """Make sure that this process has a Prefect API.

    In this order: the one that PREFECT_API_URL names, the one that `make up` started, one for the length of this run.
    Call it before Prefect is imported, because Prefect reads its settings then. (prefect.toml, which points a person's
    own `prefect` commands to the server of `make up`, yields to the variable that is set here.)

    Raises:
        ServerError: the API that PREFECT_API_URL names does not answer, or none could be started.
    """
    os.environ.update(environment())
    named = os.environ.get("PREFECT_API_URL")
    if named:
        if not os.environ.get("PREFECT_API_KEY") and not is_up(f"{named}/health"):
            raise ServerError(f"PREFECT_API_URL is {named}, but no Prefect API answers there: start it, or unset the variable so that the run starts its own.")
        yield
        return
    shared = f"http://{HOST}:{PREFECT_PORT}/api"
    if _is_started("prefect-server") and is_up(f"{shared}/health"):
        os.environ["PREFECT_API_URL"] = shared
        try:
            yield
        finally:
            os.environ.pop("PREFECT_API_URL", None)
        return
    with _private_server() as url:
        os.environ |= {"PREFECT_API_URL": url, PRIVATE: "1"}
        try:
            yield
        finally:
            for name in ("PREFECT_API_URL", PRIVATE):
                os.environ.pop(name, None)


@contextmanager
def _private_server() -> Iterator[str]:
    """A Prefect server that ends with this block, and with this process even where that is killed; gives its API's URL."""
    port = free_port()
    url = f"http://{HOST}:{port}/api"
    STATE.mkdir(exist_ok=True)
    log = STATE / f"prefect-{port}.log"
    with log.open("wb") as output:
        guard = subprocess.Popen(
            [sys.executable, "-c", GUARD, *prefect_command(port, "--no-ui")], stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, cwd=PROJECT, env=os.environ | environment() | {"PREFECT_API_URL": url})
    try:
        wait_until(lambda: is_up(f"{url}/health"), guard, 120, "the Prefect server of this run", log)
        log.unlink()  # the server goes on writing to it; there is no more to be read in it than in the run's own log
        yield url
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        try:
            guard.wait(20)
        except subprocess.TimeoutExpired:
            guard.kill()


def wait_until(ready: Callable[[], bool], process: subprocess.Popen, seconds: float, what: str, log: Path) -> None:
    """Wait for a server.

    Raises:
        ServerError: its process ended, or the time was up; the last line of its log is quoted.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if ready():
            return
        if process.poll() is not None:
            raise ServerError(f"could not start {what}: its process ended with status {process.returncode}{_last_words(log)}")
        time.sleep(0.25)
    raise ServerError(f"could not start {what}: it did not answer within {seconds:.0f} s{_last_words(log)}")


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def up() -> None:
    """Start a Prefect server, an MLflow server and a process worker; register the deployments; say where each is.

    What is already up by an earlier call is left as it is. If something fails, what this call started is stopped again.

    Raises:
        ServerError: a port is taken by something else, or a server does not come up.
    """
    mlflow = mlflow_settings()
    prefect_url, mlflow_url = f"http://{HOST}:{PREFECT_PORT}", f"http://{mlflow['MLFLOW_HOST']}:{mlflow['MLFLOW_PORT']}"
    settings = os.environ | environment() | mlflow | {
        "PREFECT_API_URL": f"{prefect_url}/api", "MLFLOW_TRACKING_URI": mlflow_url,
        "PYTHONPATH": os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    started: list[str] = []
    with _one_at_a_time():
        for name, host, port in (("prefect-server", HOST, PREFECT_PORT), ("mlflow-server", mlflow["MLFLOW_HOST"], int(mlflow["MLFLOW_PORT"]))):
            if not _is_started(name):
                _refuse_taken_port(name, host, port)
        try:
            servers = [_start("prefect-server", prefect_command(PREFECT_PORT), settings, started), _start("mlflow-server", mlflow_command(), settings, started)]
            for name, health, process in zip(NAMES, (f"{prefect_url}/api/health", f"{mlflow_url}/health"), servers, strict=False):
                if process is not None:
                    wait_until(lambda url=health: is_up(url), process, 180, name, STATE / f"{name}.log")
            for command in (["work-pool", "create", "fed-rlhf", "--type", "process", "--overwrite"], ["--no-prompt", "deploy", "--all"]):
                done = subprocess.run([sys.executable, "-m", "prefect", *command], cwd=PROJECT, env=settings, stdin=subprocess.DEVNULL, capture_output=True, text=True)
                if done.returncode:
                    raise ServerError(f"prefect {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
            _start("prefect-worker", [sys.executable, "-m", "prefect", "worker", "start", "--pool", "fed-rlhf", "--type", "process", "--name", "local"], settings | malloc_variables(), started)
        except BaseException:
            for name in reversed(started):
                _stop(name)
            raise
    print(f"Prefect   {prefect_url}      deployments: {prefect_url}/deployments\nMLflow    {mlflow_url}\nworker    pool fed-rlhf, log {STATE / 'prefect-worker.log'}\n")
    print("Run       .venv/bin/prefect deployment run 'fed-rlhf/summarization' --watch\nStop      make down")


def down() -> None:
    """Stop what `up` started, and nothing else: a process is ended only if it is still the one that was started."""
    with _one_at_a_time():
        stopped = [_stop(name) for name in reversed(NAMES)]
    if not any(stopped):
        print("nothing is up")


def mlflow_ui() -> None:
    """Become the MLflow server of the project, until Ctrl-C."""
    mlflow = mlflow_settings()
    _become("mlflow-server", mlflow["MLFLOW_HOST"], int(mlflow["MLFLOW_PORT"]), mlflow_command(), os.environ | environment() | mlflow)


def prefect_ui() -> None:
    """Become a Prefect server on the project's database, until Ctrl-C."""
    url = f"http://{HOST}:{PREFECT_PORT}/api"
    _become("prefect-server", HOST, PREFECT_PORT, prefect_command(PREFECT_PORT), os.environ | environment() | {"PREFECT_API_URL": url})


def prefect_command(port: int, *options: str) -> list[str]:
    """A Prefect server on loopback."""
    return [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port), *options]


def mlflow_command() -> list[str]:
    """The tracking server of the project; it takes its options from the variables that mlflow_settings gives."""
    return [sys.executable, "-m", "mlflow", "server"]


def mlflow_settings() -> dict[str, str]:
    """mlflow/server.env, with paths made absolute; variables of the same name in the environment win.

    Raises:
        ServerError: a line of the file is no KEY=VALUE.
    """
    path, settings = PROJECT / "mlflow" / "server.env", {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, equals, value = line.partition("=")
        if not equals or not re.fullmatch(r"[A-Z_]+", key):
            raise ServerError(f"{path}, line {number}: expected KEY=VALUE, not {line!r}.")
        settings[key] = os.environ.get(key, value)
    store = settings["MLFLOW_BACKEND_STORE_URI"]
    if store.startswith("sqlite:///") and not store.startswith("sqlite:////"):
        settings["MLFLOW_BACKEND_STORE_URI"] = f"sqlite:///{PROJECT / store.removeprefix('sqlite:///')}"
    if "://" not in settings["MLFLOW_DEFAULT_ARTIFACT_ROOT"]:
        settings["MLFLOW_DEFAULT_ARTIFACT_ROOT"] = (PROJECT / settings["MLFLOW_DEFAULT_ARTIFACT_ROOT"]).as_uri()
    return settings


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Hold the lock that keeps two calls of `up` or `down` apart."""
    STATE.mkdir(exist_ok=True)
    with (STATE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _become(name: str, host: str, port: int, command: Sequence[str], settings: dict[str, str]) -> NoReturn:
    url = f"http://{host}:{port}"
    if _is_started(name):
        print(f"{name} is up already: {url} (stop it with make down)")
        sys.exit(0)
    _refuse_taken_port(name, host, port)
    print(f"{url}  (Ctrl-C ends it)", flush=True)
    os.chdir(PROJECT)
    os.execve(command[0], command, settings)


def _refuse_taken_port(name: str, host: str, port: int) -> None:
    with socket.socket() as probe:
        taken = probe.connect_ex((host, port)) == 0
    if taken:
        raise ServerError(f"port {port}, which {name} needs, is taken by another program: stop that one first.")


def _start(name: str, command: list[str], settings: dict[str, str], started: list[str]) -> subprocess.Popen | None:
    """Start a process unless it is up; notes it in a record, and in `started`."""
    if _is_started(name):
        print(f"{name} is up already")
        return None
    _stop(name)  # what an earlier one, which died, may have left
    print(f"starting {name} ...", flush=True)
    mark = uuid.uuid4().hex
    with (STATE / f"{name}.log").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=PROJECT, env=settings | {MARK: mark}, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    started.append(name)
    record = {"pid": process.pid, "started": start_time(process.pid), "mark": mark}
    (STATE / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")
    return process


def _stop(name: str) -> bool:
    """End a process that `up` started, and what it started itself; says whether there was something to end."""
    path = STATE / f"{name}.json"
    if not path.is_file():
        return False
    record = json.loads(path.read_text(encoding="utf-8"))
    alive = is_alive(record)
    if alive:
        _signal(record["pid"], signal.SIGTERM if name == "mlflow-server" else signal.SIGINT)
        _wait_for_end(lambda: is_alive(record), 15)
        if is_alive(record):
            _signal(record["pid"], signal.SIGKILL)
            _wait_for_end(lambda: is_alive(record), 5)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in marked(record["mark"]):
            _signal(pid, number)
        _wait_for_end(lambda: bool(marked(record["mark"])), 5)
    path.unlink()
    if alive:
        print(f"stopped {name} (process {record['pid']})")
    return alive


def is_alive(record: dict[str, Any]) -> bool:
    """Whether a process is still there and is the same one: process ids are given again, start times are not.

    Args:
        record: its `pid`, and its start time (`started`) as start_time gave it.
    """
    now = start_time(record["pid"])
    return now is not None and now == record["started"]


def start_time(pid: int) -> str | None:
    """When a process was started (clock ticks since boot on Linux, else `ps`'s date); None if there is none or it is a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").is_file():
        try:
            state, *fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (OSError, ValueError):
            return None
        return None if state in "ZX" else fields[18]
    done = subprocess.run(["ps", "-o", "lstart=,stat=", "-p", str(pid)], capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    words = done.stdout.split()
    return " ".join(words[:-1]) if words and not words[-1].startswith("Z") else None


def marked(mark: str) -> list[int]:
    """The processes in whose environment a mark stands (where there is /proc; elsewhere none)."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0") and start_time(int(path.parent.name)):
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or is another person's
            continue
    return found


def _is_started(name: str) -> bool:
    path = STATE / f"{name}.json"
    return path.is_file() and is_alive(json.loads(path.read_text(encoding="utf-8")))


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait_for_end(is_there: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while is_there() and time.monotonic() < deadline:
        time.sleep(0.1)


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()] if log.is_file() else []
    return f" ({lines[-1][:300]}); see {log}." if lines else f"; see {log}."


if __name__ == "__main__":
    try:
        {"up": up, "down": down, "mlflow-ui": mlflow_ui, "prefect-ui": prefect_ui}[sys.argv[1]]()
    except ServerError as error:
        sys.exit(f"error: {error}")
