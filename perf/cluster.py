"""Seconds per round of clients on threads, on a Ray of one node, and on one of two nodes of this machine.

    python -m perf cluster FOLDER [--recipe debug --recipe summarization/demo] [--rounds 6]

All clients have the same threads, so that all runs have the same bytes, which is checked. A run ends after
its rounds. Starting Ray is not timed; the first round has the start of its processes, which load the model.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from components.paths import PACKAGE, backbone_root
from infra.servers import free_port
from perf.harness import show

HIDE = 'mount -t tmpfs none "$0" && exec "$@"'
CORES = 2
"""Clients at a time, with a core each."""
WAYS = ("threads", "one node", "two nodes", "two nodes that are sent files")


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


def compare_clusters(
    folder: Annotated[Path, typer.Argument(help="Of the runs, which are kept.")],
    recipe: Annotated[list[str] | None, typer.Option(help="By default debug and summarization/demo.")] = None,
    rounds: Annotated[int, typer.Option(min=2)] = 6,
) -> None:
    """Seconds per round of clients on threads, on a Ray of one node, and of two nodes of this machine."""
    import pandas as pd

    with tempfile.NamedTemporaryFile("w") as token:
        token.write(secrets.token_hex(32))
        token.flush()
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token.name}
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        for name in recipe or ("debug", "summarization/demo"):
            rows = []
            results = set()
            for way in WAYS:
                home = folder.resolve() / name.replace("/", "-") / way.replace(" ", "-")
                home.mkdir(parents=True)
                with cluster(way, home) as overrides:
                    run = run_rounds(home, name, rounds, overrides)
                seconds = seconds_of_rounds(run)
                rows.append((way, *seconds[:2], seconds[-1], statistics.median(seconds[1:])))
                results.add((run / "federation" / "result.json").read_bytes())
            columns = ["clients on", "round 1", "round 2", "last round", "median after round 1"]
            show(f"{name}, seconds per round", pd.DataFrame(rows, columns=columns))
            if len(results) > 1:
                raise AssertionError("the results differ")


@contextmanager
def cluster(way: str, home: Path) -> Iterator[list[str]]:
    """The nodes of one way, and the overrides by which a run uses them."""
    if way == "threads":
        yield []
        return
    hidden = home / "runs" if way.endswith("files") else None
    if hidden is not None:
        hidden.mkdir()
    with ExitStack() as nodes:
        count = 1 if way == "one node" else 2
        head = Node(cores=CORES // count, hidden=hidden)
        nodes.callback(head.end)
        for _ in range(count - 1):
            nodes.callback(Node(cores=CORES // count, head=head, hidden=hidden).end)
        yield ["runtime.task_runner=ray", f"runtime.ray_address={head.address}"]


def run_rounds(
    home: Path, recipe: str, rounds: int, overrides: list[str], look: Callable[[], object] = lambda: None
) -> Path:
    """Run the rounds of a recipe in a home of its own, and give the run folder; look is called meanwhile."""
    runtime = [f"runtime.torch_threads={CORES}", f"runtime.cpu_workers={CORES}"]
    settings = [f"federation.rounds={rounds}", "selector.lora.dropout=0", *runtime, *overrides]
    variables = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"} | {
        "FED_RLHF_HOME": str(home),
        "FED_RLHF_RUNS": str(home / "runs"),
        "FED_RLHF_BACKBONES": str(backbone_root()),
        "MLFLOW_TRACKING_URI": f"sqlite:///{home / 'mlflow.db'}",
        "PREFECT_HOME": str(home / ".prefect"),
    }
    with (home / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "run", recipe, *settings],
            cwd=PACKAGE,
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    while not (found := list((home / "runs").glob("*/federation/result.json"))):
        if process.poll() is not None:
            raise RuntimeError((home / "log.txt").read_text())
        look()
        time.sleep(0.1)
    look()
    process.send_signal(signal.SIGTERM)
    process.wait()
    return found[0].parents[1]


def seconds_of_rounds(run: Path) -> list[float]:
    """The time of each round of a run, from commit to commit, with the measurements in it."""
    times: dict[int, float] = {}
    for path in sorted((run / "federation" / "commits").glob("*.json")):
        state: dict[str, Any] = json.loads(path.read_text())["state"]
        times[state["round"]] = path.stat().st_mtime
    return [times[number] - times[number - 1] for number in sorted(times)[1:]]
