"""The table of runs for the command line: their state, headline figures, age and size."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.config import RecipeError
from components.io import read_json
from components.paths import runs_root
from tasks.benchmark_folder import find_benchmark
from tasks.runs import Run, find_run, list_runs, lock

PHASES = ("prepare", "federate", "align", "evaluate")


@dataclass(frozen=True)
class RunStatus:
    """A run in the table of runs.

    Attributes:
        id: its id, by which it is resumed.
        recipe: name of its recipe.
        method: its federated method.
        state: 'finished', 'running: <phase>' or 'stopped: <phase>', with the first phase that is
            not complete.
        headline: held-out accuracy before and after the rounds, and win rate against the base
            policy; empty before the report.
        age: time since it last wrote, as a short text.
        size: bytes of its folder.
    """

    id: str
    recipe: str
    method: str
    state: str
    headline: str
    age: str
    size: int


def run_statuses() -> list[RunStatus]:
    """The status of each run under the folder of runs, the latest last."""
    return [run_status(run) for run in list_runs()]


def run_status(run: Run) -> RunStatus:
    """The status of a run; a recipe of another version of the project is shown as '?'."""
    try:
        recipe = run.recipe()
        name = recipe.name
        method = recipe.federation.method
    except RecipeError:
        name = method = "?"
    files = file_statuses(run.folder)
    changed = max((file.st_mtime for file in files), default=0.0)
    return RunStatus(
        run.id,
        name,
        method,
        run_state(run),
        headline(run),
        format_age(datetime.now(UTC).timestamp() - changed),
        sum(file.st_size for file in files),
    )


def file_statuses(folder: Path) -> list[os.stat_result]:
    """The status of each file of a folder; files that a running process removes meanwhile are skipped."""
    statuses = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                statuses.append(status)
    return statuses


def run_state(run: Run) -> str:
    """Whether a run is finished, or the phase that it is in."""
    if run.is_done("report"):
        return "finished"
    phase = next((phase for phase in PHASES if not run.is_done(phase)), "report")
    return f"{'running' if is_locked(run) else 'stopped'}: {phase}"


def is_locked(run: Run) -> bool:
    """Whether a process works on the run."""
    path = run.folder / ".lock"
    if not path.is_file():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def headline(run: Run) -> str:
    """The main figures of a finished run; '?' for a report of another version of the project."""
    path = run.report / "metrics.json"
    if not path.is_file():
        return ""
    try:
        return format_headline(read_json(path))
    except (KeyError, TypeError, ValueError):
        return "?"


def format_headline(metrics: Mapping[str, Any]) -> str:
    """Accuracy before and after the rounds, and the win rate, of a report's metrics."""
    parts = []
    before = metrics["accuracy"]["before"]["mean"]
    after = metrics["accuracy"]["after"]["mean"]
    if before is not None and after is not None:
        parts.append(f"accuracy {before:.3f} -> {after:.3f}{_clients_words(metrics['accuracy']['after'])}")
    rate = metrics["win_rate"].get("aligned_vs_base", {}).get("win_rate")
    if rate is not None:
        parts.append(f"win rate {rate:.1%}")
    return ", ".join(parts)


def _clients_words(accuracy: Mapping[str, Any]) -> str:
    """The worst client and the spread, in brackets; empty for earlier reports, which have no spread."""
    if "spread" not in accuracy:
        return ""
    return f" (worst client {accuracy['worst']:.3f}, spread {accuracy['spread']:.3f})"


def format_age(seconds: float) -> str:
    """A duration in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def format_size(size: int) -> str:
    """Bytes in their largest unit."""
    for unit, length in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= length:
            return f"{size / length:.1f} {unit}"
    return f"{size} B"


def describe_run(run: Run) -> str:
    """The state of a run, its folder and MLflow run, and the table of a finished one."""
    status = run_status(run)
    lines = [
        f"{status.id}: {status.recipe}, {status.method}, {status.state}",
        f"  folder      {run.folder} ({format_size(status.size)}, last written {status.age} ago)",
    ]
    metadata = run.metadata()
    if metadata.get("mlflow_run_id"):
        lines.append(f"  MLflow run  {metadata['mlflow_run_id']}")
    if metadata.get("commits"):
        lines.append(f"  commits     {', '.join(metadata['commits'])}")
    commits = sorted((run.federation / "commits").glob("[0-9]*.json"))
    if commits:
        lines.append(f"  committed   {int(commits[-1].stem)} steps of the rounds")
    summary = run.report / "summary.txt"
    if summary.is_file():
        lines += ["", summary.read_text(encoding="utf-8").rstrip()]
    elif status.state != "finished":
        lines.append(f"  resume it   fed-rlhf resume {status.id}")
    return "\n".join(lines)


def find_deletable(name: str) -> Path:
    """The folder of a run or a benchmark that may be deleted.

    Raises:
        RecipeError: there is none, or the run belongs to a benchmark, which could not be resumed
            without it.
    """
    folder = _find_folder(name)
    _require_inside_runs(folder)
    if (folder.parent / "benchmark.yaml").is_file():
        raise RecipeError(
            f"run '{name}' belongs to benchmark {folder.parent.name}, which could not be resumed without it:"
            " delete the benchmark."
        )
    return folder


def _find_folder(name: str) -> Path:
    try:
        return find_benchmark(name)
    except RecipeError:
        return find_run(name).folder


def _require_inside_runs(folder: Path) -> None:
    """Refuse to delete a folder that is not below the folder of runs.

    Raises:
        RecipeError: naming both folders.
    """
    root = runs_root().resolve()
    if root not in folder.parents:
        raise RecipeError(
            f"{folder} is outside the folder of runs, {root}: only runs and benchmarks in it are deleted."
            " Remove the folder yourself."
        )


def delete_folder(folder: Path) -> None:
    """Delete the folder of a run or a benchmark.

    Raises:
        RecipeError: a process works on it.
    """
    with lock(Run(folder.name, folder)):
        shutil.rmtree(folder)
