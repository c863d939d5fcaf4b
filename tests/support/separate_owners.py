"""Owners that have started their own processes, and the server's side of rounds with them.

    python -m tests.support.separate_owners RUN FOLDER SOCKETS KEY=VALUE...

runs the rounds of the debug recipe in FOLDER, whose prepared folder has no row.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from components.federation.transport import Transport
from components.owners.home import OwnerConfig, create_home, find_owner
from components.owners.requests import Requests, rows_of
from components.recipes import load_recipe
from components.recipes.inputs import store_inputs
from tasks.owner_processes import ask_owner
from tests.support.bare_loop import run_bare_loop

ROOT = Path(__file__).resolve().parent.parent.parent
NOBODY = 65534
"""User of the homes, where tests run as root."""
DROP_CAPABILITY = 24  # PR_CAPBSET_DROP of prctl(2)
READING_ALL = (1, 2)  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH of capabilities(7)


@dataclass(frozen=True)
class SeparateOwners:
    """Owners, each with a home and a process.

    Attributes:
        homes: folder of the homes, by the names of owners.
        sockets: by which a server reaches them.
        apart: whether the homes belong to another user than the server, which only root can arrange.
    """

    homes: Path
    sockets: Path
    apart: bool
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def add(self, name: str, data: Path) -> Path:
        """Make the home of an owner."""
        home = self.homes / name
        create_home(home, OwnerConfig(name=name, data=str(data), sockets=str(self.sockets)))
        if self.apart:
            os.chown(home, NOBODY, NOBODY)
        return home

    def start(self, *names: str) -> None:
        """Start owners' processes, and wait until they answer."""
        for name in names:
            command = [sys.executable, "-m", "flows.cli", "owner", "start", str(self.homes / name)]
            log = (self.homes / f"{name}.log").open("a")
            self.processes[name] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, text=True)
        deadline = time.monotonic() + 120
        for name in names:
            while find_owner(self.sockets, name).state != "connected":
                assert self.processes[name].poll() is None, (self.homes / f"{name}.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def stop(self, *names: str) -> None:
        """End owners' processes as Ctrl-C does."""
        for name in names:
            self.processes[name].terminate()
        for name in names:
            assert self.processes.pop(name).wait(60) == 0

    def give_rows(self, run: str, prepared: Path, names: Sequence[str]) -> None:
        """Let owners have their rows of a prepared folder for a run."""
        for name in names:
            folder = self.homes / name / "runs" / run / "prepared"
            folder.mkdir(parents=True)
            (folder / "pairs.parquet").write_bytes(rows_of(prepared / "pairs.parquet", [name]))

    def serve(self, *command: str, cwd: Path = ROOT, **environment: str) -> subprocess.Popen[str]:
        """Start a command that has no permission to read a folder of another user, also as root."""
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=os.environ | environment,
            preexec_fn=drop_reading_all if self.apart else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def drop_reading_all() -> None:
    """Let what this process executes read no folder of another user, also as root."""
    prctl = ctypes.CDLL(None).prctl
    for capability in READING_ALL:
        if prctl(DROP_CAPABILITY, capability, 0, 0, 0):
            os._exit(1)


@contextmanager
def separate_owners(homes: Path) -> Iterator[SeparateOwners]:
    """Owners with homes in a folder."""
    with tempfile.TemporaryDirectory(prefix="fed-rlhf-", dir="/tmp") as sockets:  # a socket's path is short
        owners = SeparateOwners(homes, Path(sockets), apart=os.geteuid() == 0)
        try:
            yield owners
        finally:
            for process in owners.processes.values():
                process.kill()
                process.wait()


class SocketTransport(Transport):
    """Asks owners by their sockets, one after the other."""

    run_name = ""
    sockets = Path()

    def __init__(self, recipe, contexts, trainers=None):
        self.recipe, self.contexts = recipe, contexts
        self.requests = Requests(recipe, contexts, self.run_name)

    @classmethod
    def open(cls, recipe, contexts):
        return cls(recipe, contexts)

    def run(self, jobs):
        return [ask_owner(job, self.requests, self.contexts, self.sockets) for job in jobs]


def without_rows(prepared: Path, folder: Path) -> None:
    """Copy a prepared folder without the clients' pairs."""
    shutil.copytree(prepared, folder, ignore=shutil.ignore_patterns("pairs.parquet"))


def main(run: str, folder: str, sockets: str, *overrides: str) -> None:
    """Run the rounds of the debug recipe."""
    SocketTransport.run_name, SocketTransport.sockets = run, Path(sockets)
    with mock.patch("components.federation.rounds.InProcessTransport", SocketTransport):
        recipe = store_inputs(load_recipe("debug", overrides), Path(folder) / "inputs")
        run_bare_loop(recipe, Path(folder) / "prepared", Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
