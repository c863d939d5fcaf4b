"""One Prefect server for a whole test session.

The first test that needs the server starts it. All xdist workers, the flows that run inside them
and the processes that tests start use the same one. It ends with the last worker that uses it.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.paths import PACKAGE
from infra.processes import ServerError, wait_until
from infra.servers import free_port, is_up, prefect_command, prefect_environment
from infra.stores import prepare_prefect_database

GUARD = """
import fcntl, signal, subprocess, sys, time

users, command = open(sys.argv[1]), sys.argv[2:]
server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
while True:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
    except BlockingIOError:
        if server.poll() is not None:
            sys.exit(1)
        time.sleep(0.2)
server.send_signal(signal.SIGINT)
try:
    server.wait(20)
except subprocess.TimeoutExpired:
    server.kill()
"""
"""Starts a command, and ends it by its own id once nobody holds the shared lock on a file any more.
The system releases the lock of a process that ends, however it ends.
"""


@contextmanager
def shared_server(folder: Path) -> Iterator[str]:
    """URL of the API of a folder's server, which is started if it is not running."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        users, url = join_server(folder) or start_server(folder, attempts=3)
    try:
        yield url
    finally:
        os.close(users)


def join_server(folder: Path) -> tuple[int, str] | None:
    """Descriptor of the locked file of users, and the URL, of a server that is running."""
    record = folder / "server.json"
    if not record.is_file():
        return None
    server = json.loads(record.read_text())
    users = os.open(server["users"], os.O_RDONLY)
    try:
        fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if is_up(f"{server['url']}/health", timeout=30):
            return users, server["url"]
    except BlockingIOError:  # the last user has left, and the server is about to end
        pass
    os.close(users)
    return None


def start_server(folder: Path, attempts: int) -> tuple[int, str]:
    """Start a server; the same pair as join_server gives.

    Args:
        attempts: another program may take the port first, which would fail all tests of this process.
    """
    path = folder / f"users-{uuid.uuid4().hex}"
    path.touch()
    users = os.open(path, os.O_RDONLY)
    fcntl.flock(users, fcntl.LOCK_SH)
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    log = folder / "server.log"
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    home = {"PREFECT_HOME": str(folder / "home"), "PREFECT_API_URL": url}
    prepare_prefect_database(folder / "home")
    with log.open("wb") as output:
        guard = subprocess.Popen(
            [sys.executable, "-c", GUARD, str(path), *prefect_command(port, "--no-ui", "--no-services")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=PACKAGE,
            env=inherited | prefect_environment() | home,
        )
    try:
        wait_until(lambda: is_up(f"{url}/health"), guard, "the Prefect server of the tests", log)
    except ServerError:
        os.close(users)
        if attempts == 1 or guard.poll() is None:
            raise
        return start_server(folder, attempts - 1)
    (folder / "server.json").write_text(json.dumps({"url": url, "users": str(path), "guard": guard.pid}))
    return users, url


@contextmanager
def prefect_settings(url: str) -> Iterator[None]:
    """Let all threads of this process use the API at a URL, and send it all events in the end."""
    from prefect.context import _temporary_global_settings_context, get_settings_context
    from prefect.events.worker import EventsWorker
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        PREFECT_LOGGING_TO_API_ENABLED,
        temporary_settings,
    )

    updates = {
        PREFECT_API_URL: url,
        PREFECT_LOGGING_TO_API_ENABLED: False,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
    }
    with temporary_settings(updates=updates), _temporary_global_settings_context(get_settings_context()):
        yield
        EventsWorker.drain_all(timeout=10)
