"""The run folder: where a run keeps what it made, and what it is called.

    runs/<run>/
        recipe.yaml      the whole recipe, defaults included
        run.json         ids of the MLflow run and of the Prefect run, the commits that the run was opened with
        .lock            held by the process that works on the run
        <phase>.done     empty; the phase is complete and logged (report.done: the whole run is)
        prepared/        data (components/data/records.py)
        federation/      adapters/, updates/, commits/, rewards/ (scores of frozen reward models), selectors/ (PEFT folders), result.json
        federation-clients/   what never leaves the clients, a folder each (components/federation/private.py)
        alignment/       completions.json, pairs.parquet, epoch-1/ ..., final/ (PEFT folders), result.json
        evaluation/      answers.json, judgements.json (of a judge that writes), questions/ (answers by policy and set), result.json, pictures
        report/          metrics.json, summary.txt, curves for `dvc plots`

A phase's result.json is written when its work is complete, and <phase>.done when that is logged too. A resumed run
skips what is done, logs what is only complete, and takes up the rest where it was left.

    runs/<benchmark>/
        benchmark.yaml   the benchmark as it was started
        run.json         the id of its MLflow run
        <arm>-seed-<n>/  a run folder each
        contests/        verdicts of each contest and seed
        report/          report.html, report.md, figures.json, pictures
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from components.benchmarks import Benchmark
from components.config import Recipe, RecipeError
from components.models.adapters import write_atomically
from components.recipes import dump_recipe, load_recipe

PROJECT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Run:
    """A run folder.

    Attributes:
        id: its name.
        folder: where it is.
    """

    id: str
    folder: Path

    @property
    def prepared(self) -> Path:
        return self.folder / "prepared"

    @property
    def federation(self) -> Path:
        return self.folder / "federation"

    @property
    def alignment(self) -> Path:
        return self.folder / "alignment"

    @property
    def evaluation(self) -> Path:
        return self.folder / "evaluation"

    @property
    def report(self) -> Path:
        return self.folder / "report"

    def recipe(self) -> Recipe:
        """The recipe that the run was started with."""
        return load_recipe(str(self.folder / "recipe.yaml"))

    def notes(self) -> dict[str, Any]:
        """Ids noted so far."""
        path = self.folder / "run.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def note(self, **values: Any) -> None:
        """Add to the ids."""
        self.replace_notes(**self.notes() | values)

    def note_commit(self, commit: str) -> None:
        """Add the commit that the run is opened with, where it is not the one that it was opened with before."""
        known = self.notes().get("commits", [])
        if known[-1:] != [commit]:
            self.note(commits=[*known, commit])

    def replace_notes(self, **values: Any) -> None:
        """Forget the ids noted so far, and note others."""
        write_json(self.folder / "run.json", values)


def runs_root() -> Path:
    """Folder of all runs: FED_RLHF_RUNS, or runs/ of the project."""
    return Path(os.environ.get("FED_RLHF_RUNS", PROJECT / "runs"))


def judges_root() -> Path:
    """Folder of trained judges, shared by runs: FED_RLHF_JUDGES, or judges/ beside the runs' own folders."""
    return Path(os.environ.get("FED_RLHF_JUDGES", runs_root() / "judges"))


def trees_root() -> Path:
    """Folder of trees of thoughts, shared by runs: FED_RLHF_TREES, or trees/ beside the runs' own folders."""
    return Path(os.environ.get("FED_RLHF_TREES", runs_root() / "trees"))


def open_run(recipe: Recipe) -> Run:
    """A new run folder with its recipe in it."""
    moment = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    run_id = f"{recipe.name.replace('/', '-')}-{moment}-{uuid.uuid4().hex[:4]}"
    return claim_folder(recipe, runs_root() / run_id)


def claim_folder(recipe: Recipe, folder: Path) -> Run:
    """A run in a folder of one's own choice, with its recipe in it (replacing the one that was there)."""
    write_atomically(folder / "recipe.yaml", dump_recipe(recipe).encode())
    return Run(folder.name, folder)


def find_run(name: str) -> Run:
    """The run to resume, by its id or its folder.

    Raises:
        RecipeError: there is no such run; names the latest ones.
    """
    for folder in (runs_root() / name, Path(name)):
        if (folder / "recipe.yaml").is_file():
            return Run(folder.resolve().name, folder.resolve())
    known = sorted((p.parent for p in runs_root().glob("*/recipe.yaml")), key=lambda p: p.stat().st_mtime)
    latest = ", ".join(p.name for p in known[-3:]) or "none"
    raise RecipeError(f"--resume {name}: there is no such run under {runs_root()}. Latest runs: {latest}.")


def open_benchmark(name: str, benchmark: Benchmark) -> Path:
    """A new folder with the benchmark in it, and the recipe of each of its runs, so that it is the same when it is resumed."""
    moment = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder = runs_root() / f"benchmark-{Path(name).stem}-{moment}"
    for arm in benchmark.arms:
        for seed in benchmark.seeds:
            claim_folder(benchmark.recipe_of(arm, seed), arm_run(folder, arm, seed).folder)
    write_atomically(folder / "benchmark.yaml", yaml.safe_dump(benchmark.model_dump(mode="json"), sort_keys=False).encode())
    return folder


def find_benchmark(name: str) -> Path:
    """The folder of a benchmark to resume, by its name or path.

    Raises:
        RecipeError: there is none; names the latest.
    """
    for folder in (runs_root() / name, Path(name)):
        if (folder / "benchmark.yaml").is_file():
            return folder.resolve()
    known = sorted((p.parent for p in runs_root().glob("*/benchmark.yaml")), key=lambda p: p.stat().st_mtime)
    raise RecipeError(f"--resume {name}: there is no such benchmark under {runs_root()}. Latest: {', '.join(p.name for p in known[-3:]) or 'none'}.")


def arm_run(folder: Path, arm: str, seed: int) -> Run:
    """The run of an arm and a seed."""
    return Run(f"{folder.name}/{arm}-seed-{seed}", folder / f"{arm}-seed-{seed}")


def contest_file(folder: Path, ours: str, theirs: str, seed: int) -> Path:
    """Where the verdicts of a contest are."""
    return folder / "contests" / ours / theirs / f"seed-{seed}.json"


@contextlib.contextmanager
def hold(run: Run) -> Iterator[None]:
    """Keep a run to this process; the lock ends with the process, however it ends.

    Raises:
        RecipeError: another process is working on it.
    """
    with (run.folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecipeError(f"run {run.id} is being worked on by another process: wait for it, or stop it, and then resume the run.") from None
        yield


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically."""
    write_atomically(path, (json.dumps(content, indent=1, default=str) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def file_hash(path: Path) -> str:
    """sha256 of a file, as it is tagged in MLflow."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def git_commit() -> str:
    """The commit of this checkout, with '-dirty' where files differ from it; 'unknown' outside git."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("-dirty" if dirty else "")
