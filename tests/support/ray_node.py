"""A node of Ray on this machine, for tests of clusters."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from infra.servers import free_port

HIDE = 'mount -t tmpfs none "$0" && exec "$@"'
CORES = 2
"""That tasks may have."""


class Node:
    """A node of a Ray on this machine, which is ended by its process id.

    Args:
        options: of `ray start`.
        cores: that tasks may have.
        head: the node whose cluster it joins; None for one that makes a cluster.
        hidden: a folder that its processes see empty, as on a machine without this file system.
    """

    def __init__(
        self, *options: str, cores: int = CORES, head: Node | None = None, hidden: Path | None = None
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-node-"))  # short: it has sockets in it
        command = [] if hidden is None else ["unshare", "--mount", "sh", "-c", HIDE, str(hidden)]
        command += [str(Path(sys.executable).parent / "ray"), "start", "--block", f"--num-cpus={cores}"]
        command += [f"--temp-dir={self.folder}", *options]
        if head is None:
            self.address = f"127.0.0.1:{free_port()}"
            command += ["--head", "--include-dashboard=false", "--node-ip-address=127.0.0.1"]
            command += [f"--port={self.address.rpartition(':')[2]}"]
        else:
            self.address = head.address
            command += [f"--address={head.address}", "--node-ip-address=127.0.0.2"]
        log = self.folder.with_suffix(".log")
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in log.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Ray did not start: {log.read_text()}")
            time.sleep(0.2)

    def workers(self) -> list[psutil.Process]:
        """Its processes that run a task of a shard now."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in children if one.is_running() and "run_shard" in " ".join(one.cmdline())]

    def kill(self) -> None:
        """Kill all its processes, as if its machine was lost."""
        for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
            process.kill()

    def end(self) -> None:
        """End it, and remove its files."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.with_suffix(".log").unlink()
