"""Background processes of the project. Only processes that were started here are ended.

A process is recorded by its id and its start time. Its children are identified by a mark in their
environment.
"""

from __future__ import annotations

import fcntl
import json
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from components.config import UserError
from components.paths import PACKAGE, home, without_credentials

MARK = "FED_RLHF_STARTED_BY_UP"
"""Environment variable of each started process, inherited by its own children; its value is unique."""
SERVERS = "lock"
"""Lock under which servers are started and stopped."""
DATABASES = "databases.lock"
"""Lock under which databases are made and migrated."""
START_TIMEOUT = 180.0
"""Seconds within which a server must answer."""
LOG_EXCERPT = 300
"""Characters of a log's line that an error quotes."""
ERRORS = (
    re.compile(r"^[\w.]*(Error|Exception)\b.*: "),
    re.compile(r"\b(error|denied|refused)\b", re.IGNORECASE),
)
"""Lines of a log that name an error: those of a stack trace, then others."""


class ServerError(UserError, RuntimeError):
    """A server that cannot be reached or started."""


@dataclass(frozen=True)
class ProcessRecord:
    """A started process."""

    pid: int
    started: float  # seconds since the epoch
    mark: str  # value of MARK in its environment

    def find(self) -> psutil.Process | None:
        """The process, if it runs and has the recorded start time, since process ids are reused."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.started) < 1 and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


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
    return record is not None and record.find() is not None


@contextmanager
def exclusive(name: str = SERVERS) -> Iterator[None]:
    """Hold a lock, SERVERS or DATABASES, which one process at a time has."""
    state_folder().mkdir(parents=True, exist_ok=True)
    with (state_folder() / name).open("w") as lock:
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
    record = ProcessRecord(process.pid, psutil.Process(process.pid).create_time(), mark)
    record_path(name).write_text(json.dumps(asdict(record)), encoding="utf-8")
    return process


@contextmanager
def inheriting_interrupts() -> Iterator[None]:
    """Let processes that are started here react to SIGINT.

    A shell starts the background jobs of a script with SIGINT ignored, which their own children
    inherit.
    """
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if is_ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if is_ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def stop(name: str, first_signal: signal.Signals = signal.SIGINT) -> bool:
    """End a process that was started here, and its children.

    Returns:
        whether it was alive.
    """
    record = read_record(name)
    if record is None:
        return False
    process = record.find()
    if process is not None:
        end_processes([process], first_signal, 15)
    marked = [
        one
        for one in psutil.process_iter(["environ"])  # None where the environment may not be read
        if (one.info["environ"] or {}).get(MARK) == record.mark and one.status() != psutil.STATUS_ZOMBIE
    ]
    end_processes(marked, signal.SIGTERM, 5)
    record_path(name).unlink()
    if process is not None:
        print(f"stopped {name} (process {record.pid})")
    return process is not None


def end_processes(processes: Sequence[psutil.Process], first_signal: signal.Signals, seconds: float) -> None:
    """Send a signal to processes, and end those that have not ended after some seconds."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(first_signal)
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], name: str, log: Path) -> None:
    """Wait until a server answers.

    Raises:
        ServerError: its process ended, or it did not answer within START_TIMEOUT; quotes a line of
            its log.
    """
    deadline = time.monotonic() + START_TIMEOUT
    reason = f"it did not answer within {START_TIMEOUT:.0f} s"
    while time.monotonic() < deadline:
        if ready():
            return
        if process.poll() is not None:
            reason = f"its process ended with status {process.returncode}"
            break
        time.sleep(0.25)
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
    raise ServerError(f"could not start {name}: {reason}{_cause(lines)}; see {log}.")


def _cause(lines: Sequence[str]) -> str:
    """The last line of a log that names an error, else its last line, in brackets; empty without lines."""
    written = [line.strip() for line in reversed(lines) if line.strip()]
    named = [line for pattern in ERRORS for line in written if pattern.search(line)]
    return f" ({without_credentials((named or written)[0])[:LOG_EXCERPT]})" if written else ""
