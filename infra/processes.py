"""Background processes of the project. Only processes that were started here are ended.

A process is recorded by its id and its start time. Its children are identified by a mark in their
environment.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from components.config import UserError
from components.paths import PACKAGE, home

MARK = "FED_RLHF_STARTED_BY_UP"
"""Environment variable of each started process, inherited by its own children; its value is unique."""
START_TIMEOUT = 180.0
"""Seconds within which a server must answer."""
LOG_EXCERPT = 300
"""Characters of a log's last line that an error quotes."""


class ServerError(UserError, RuntimeError):
    """A server that cannot be reached or started."""


@dataclass(frozen=True)
class ProcessRecord:
    """A started process.

    Attributes:
        pid: its id.
        started: its start time, see start_time.
        mark: value of MARK in its environment.
    """

    pid: int
    started: str | None
    mark: str

    def is_alive(self) -> bool:
        """Whether the process runs and has the recorded start time, since process ids are reused."""
        now = start_time(self.pid)
        return now is not None and now == self.started


def state_folder() -> Path:
    """Folder of records and logs."""
    return home() / ".state"


def record_path(name: str) -> Path:
    """File of a process's record."""
    return state_folder() / f"{name}.json"


def log_path(name: str) -> Path:
    """File of a process's output."""
    return state_folder() / f"{name}.log"


def read_record(name: str) -> ProcessRecord | None:
    """The record of a process; None if it was not started."""
    path = record_path(name)
    return ProcessRecord(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def is_started(name: str) -> bool:
    """Whether a process was started and is alive."""
    record = read_record(name)
    return record is not None and record.is_alive()


@contextmanager
def exclusive() -> Iterator[None]:
    """Hold the lock under which one process at a time starts or stops others."""
    state_folder().mkdir(parents=True, exist_ok=True)
    with (state_folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def start(name: str, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes] | None:
    """Start a process in the background; None if it is running already."""
    if is_started(name):
        print(f"{name} is running already")
        return None
    stop(name)  # children of an earlier process that died may still run
    print(f"starting {name} ...", flush=True)
    mark = uuid.uuid4().hex
    with log_path(name).open("wb") as output, inheriting_interrupts():
        process = subprocess.Popen(
            command,
            cwd=PACKAGE,  # the deployments' entry points are relative to it
            env=environment | {MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    content = {
        "pid": process.pid,
        "started": start_time(process.pid),
        "mark": mark,
    }
    record_path(name).write_text(json.dumps(content), encoding="utf-8")
    return process


@contextmanager
def inheriting_interrupts() -> Iterator[None]:
    """Let processes that are started here react to SIGINT.

    A shell starts the background jobs of a script with SIGINT ignored, which their own children
    inherit.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def stop(name: str, first_signal: signal.Signals = signal.SIGINT) -> bool:
    """End a process that was started here, and its children.

    Returns:
        whether it was alive.
    """
    record = read_record(name)
    if record is None:
        return False
    alive = record.is_alive()
    if alive:
        send_signal(record.pid, first_signal)
        _wait_for_end(record.is_alive, 15)
        if record.is_alive():
            send_signal(record.pid, signal.SIGKILL)
            _wait_for_end(record.is_alive, 5)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in find_marked(record.mark):
            send_signal(pid, number)
        _wait_for_end(lambda: bool(find_marked(record.mark)), 5)
    record_path(name).unlink()
    if alive:
        print(f"stopped {name} (process {record.pid})")
    return alive


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], name: str, log: Path) -> None:
    """Wait until a server answers.

    Raises:
        ServerError: its process ended, or it did not answer within START_TIMEOUT; quotes the last
            line of its log.
    """
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if ready():
            return
        if process.poll() is not None:
            reason = f"its process ended with status {process.returncode}"
            raise ServerError(f"could not start {name}: {reason}{_log_excerpt(log)}")
        time.sleep(0.25)
    reason = f"it did not answer within {START_TIMEOUT:.0f} s"
    raise ServerError(f"could not start {name}: {reason}{_log_excerpt(log)}")


def _log_excerpt(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f" ({lines[-1][:LOG_EXCERPT]}); see {log}." if lines else f"; see {log}."


def start_time(pid: int) -> str | None:
    """When a process was started; None if it does not exist or is a zombie.

    Clock ticks since boot on Linux, and the date that `ps` gives elsewhere.
    """
    if Path("/proc/self/stat").is_file():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError):
            return None
        state, *fields = stat.rpartition(")")[2].split()
        return None if state in "ZX" else fields[18]
    done = subprocess.run(
        ["ps", "-o", "lstart=,stat=", "-p", str(pid)],
        capture_output=True,
        text=True,
        env=os.environ | {"LC_ALL": "C"},
    )
    words = done.stdout.split()
    return " ".join(words[:-1]) if words and not words[-1].startswith("Z") else None


def find_marked(mark: str) -> list[int]:
    """Ids of the processes whose environment has a mark; empty on systems without /proc."""
    variable = f"{MARK}={mark}".encode()
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if variable in path.read_bytes().split(b"\0") and start_time(int(path.parent.name)):
                pids.append(int(path.parent.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    return pids


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, if it exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait_for_end(is_alive: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while is_alive() and time.monotonic() < deadline:
        time.sleep(0.1)
