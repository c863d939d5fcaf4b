"""Servers of this project on loopback: a Prefect API for the length of one run, and `make up` / `make down`.

A process that is started here is remembered by its id and ended by it; nothing else is ever ended.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.config import Explained

PROJECT = Path(__file__).resolve().parent.parent
STATE = PROJECT / ".state"
HOST = "127.0.0.1"
PREFECT_PORT, MLFLOW_PORT = 4200, 5000
PRIVATE = "FED_RLHF_PRIVATE_PREFECT"
"""Set in the environment while the Prefect API is one for the length of this run."""
GUARD = 'import subprocess, sys, signal\nchild = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)\nsys.stdin.buffer.read()\nchild.send_signal(signal.SIGINT)\ntry:\n    child.wait(10)\nexcept subprocess.TimeoutExpired:\n    child.kill()\n'
"""Runs a command until its own standard input ends, which it does when the process that holds the other end dies, however it dies."""


class ServerError(Explained, RuntimeError):
    """A server that cannot be reached or started. The message is meant for the person who needs it."""


def environment() -> dict[str, str]:
    """The environment of the project's Prefect: its own home, so that its database lies with the project."""
    return {"PREFECT_HOME": os.environ.get("PREFECT_HOME", str(PROJECT / ".prefect")), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}


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
    Call it before Prefect is imported, because Prefect reads its settings then.

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
    if is_up(f"{shared}/health"):
        os.environ["PREFECT_API_URL"] = shared
        yield
        return
    port = free_port()
    url = f"http://{HOST}:{port}/api"
    STATE.mkdir(exist_ok=True)
    log = STATE / f"prefect-{port}.log"
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port), "--no-ui"]
    with log.open("wb") as output:
        guard = subprocess.Popen(
            [sys.executable, "-c", GUARD, *command], stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=PROJECT,
            env=os.environ | environment() | {"PREFECT_UI_ENABLED": "false"})
    try:
        wait_until(lambda: is_up(f"{url}/health"), guard, 120, f"the Prefect server of this run; see {log}")
        os.environ |= {"PREFECT_API_URL": url, PRIVATE: "1"}
        yield
    finally:
        for name in ("PREFECT_API_URL", PRIVATE):
            os.environ.pop(name, None)
        guard.stdin.close()
        guard.wait(20)
        log.unlink(missing_ok=True)


def wait_until(ready, process: subprocess.Popen | None, seconds: float, what: str) -> None:
    """Wait for a server.

    Raises:
        ServerError: its process ended, or the time was up.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if ready():
            return
        if process is not None and process.poll() is not None:
            raise ServerError(f"could not start {what} (exit status {process.returncode})")
        time.sleep(0.25)
    raise ServerError(f"waited {seconds:.0f} s in vain for {what}")


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def up() -> None:
    """Start a Prefect server, an MLflow server and a process worker; register the deployments; say where each is.

    What is already up by an earlier call is left as it is.

    Raises:
        ServerError: a port is taken by something else, or a server does not come up.
    """
    STATE.mkdir(exist_ok=True)
    prefect, mlflow = f"http://{HOST}:{PREFECT_PORT}", f"http://{HOST}:{MLFLOW_PORT}"
    settings = os.environ | environment() | {
        "PREFECT_API_URL": f"{prefect}/api", "MLFLOW_TRACKING_URI": mlflow, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    python = sys.executable
    _start("prefect-server", [python, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(PREFECT_PORT)], settings, PREFECT_PORT, f"{prefect}/api/health")
    _start("mlflow-server", mlflow_command(), settings, MLFLOW_PORT, f"{mlflow}/health")
    run = {"cwd": PROJECT, "env": settings, "capture_output": True, "text": True}
    for command in (["work-pool", "create", "fed-rlhf", "--type", "process", "--overwrite"], ["--no-prompt", "deploy", "--all"]):
        done = subprocess.run([python, "-m", "prefect", *command], **run)
        if done.returncode:
            raise ServerError(f"prefect {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    _start("prefect-worker", [python, "-m", "prefect", "worker", "start", "--pool", "fed-rlhf", "--type", "process", "--name", "local"], settings, None, None)
    print(f"Prefect   {prefect}      deployments: {prefect}/deployments\nMLflow    {mlflow}\nworker    pool fed-rlhf, log {STATE / 'prefect-worker.log'}\n")
    print("Run       .venv/bin/prefect deployment run 'fed-rlhf/summarization' --watch\nStop      make down")


def down() -> None:
    """Stop what `up` started, and nothing else: a process is ended only if it is still the one that was started."""
    for name in ("prefect-worker", "mlflow-server", "prefect-server"):
        record = STATE / f"{name}.json"
        if not record.is_file():
            continue
        started = json.loads(record.read_text(encoding="utf-8"))
        if _is_alive(started):
            os.killpg(started["pid"], signal.SIGINT if name != "mlflow-server" else signal.SIGTERM)
            deadline = time.monotonic() + 20
            while _is_alive(started) and time.monotonic() < deadline:
                time.sleep(0.2)
            if _is_alive(started):
                os.killpg(started["pid"], signal.SIGKILL)
            print(f"stopped {name} (process {started['pid']})")
        record.unlink()


def mlflow_command() -> list[str]:
    """The tracking server of the project, as configured in mlflow/server.env."""
    return [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(MLFLOW_PORT), "--workers", "1", "--backend-store-uri",
            f"sqlite:///{PROJECT / 'mlflow.db'}", "--default-artifact-root", (PROJECT / "mlartifacts").as_uri(), "--no-serve-artifacts"]


def _start(name: str, command: list[str], settings: dict[str, str], port: int | None, health: str | None) -> None:
    record, log = STATE / f"{name}.json", STATE / f"{name}.log"
    if record.is_file() and _is_alive(json.loads(record.read_text(encoding="utf-8"))):
        print(f"{name} is up already")
        return
    if port is not None and _listens(port):
        raise ServerError(f"port {port}, which {name} needs, is taken by another program: stop that one, or use it by its own address.")
    with log.open("ab") as output:
        process = subprocess.Popen(command, cwd=PROJECT, env=settings, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    record.write_text(json.dumps({"pid": process.pid, "started": _start_time(process.pid)}), encoding="utf-8")
    if health is not None:
        wait_until(lambda: is_up(health), process, 120, f"{name}; see {log}")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def _is_alive(started: dict) -> bool:
    """Whether the process is still there and is the same one: process ids are given again, start times are not."""
    now = _start_time(started["pid"])
    return now is not None and now == started["started"]


def _start_time(pid: int) -> str | None:
    done = subprocess.run(["ps", "-o", "lstart=,stat=", "-p", str(pid)], capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    words = done.stdout.split()
    return " ".join(words[:-1]) if words and not words[-1].startswith("Z") else None


if __name__ == "__main__":
    try:
        {"up": up, "down": down}[sys.argv[1]]()
    except ServerError as error:
        sys.exit(f"error: {error}")
