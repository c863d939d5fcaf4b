"""The folder of a benchmark, which holds its runs, contests and report.

runs/<benchmark>/
    benchmark.yaml   the benchmark as it was started
    run.json         id of its MLflow run
    <arm>-seed-<n>/  a run folder each
    contests/        each contest and seed (components/evaluation/contests.py)
    report/          report.html, report.md, metrics.json
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import yaml

from components.benchmarks import arm_recipe
from components.config import RecipeError
from components.config.benchmark import Benchmark
from components.io import read_json, write_atomically
from components.paths import runs_root
from tasks.devices import choose_workers
from tasks.runs import Run, create_run


def open_benchmark(name: str, benchmark: Benchmark) -> Path:
    """A new folder with the benchmark and the recipe of each run; a resumed benchmark reads them."""
    moment = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    day = date.today()  # the same for all runs, which are compared
    folder = runs_root() / f"benchmark-{Path(name).stem}-{moment}"
    inputs: dict[Path, Path] = {}
    for arm in benchmark.arms:
        for seed in benchmark.seeds:
            recipe = choose_workers(arm_recipe(benchmark, arm, seed))
            create_run(recipe, arm_run(folder, arm, seed).folder, day, inputs)
    content = yaml.safe_dump(benchmark.model_dump(mode="json"), sort_keys=False)
    write_atomically(folder / "benchmark.yaml", content.encode())
    return folder


def find_benchmark(name: str) -> Path:
    """The folder of a benchmark, by its name or path.

    Raises:
        RecipeError: there is no benchmark of this name; the message has the latest ones.
    """
    for folder in (runs_root() / name, Path(name)):
        if (folder / "benchmark.yaml").is_file():
            return folder.resolve()
    paths = sorted(runs_root().glob("*/benchmark.yaml"), key=lambda path: path.parent.stat().st_mtime)
    latest = ", ".join(path.parent.name for path in paths[-3:]) or "none"
    raise RecipeError(f"there is no benchmark '{name}' under {runs_root()}. Latest: {latest}.")


def arm_run(folder: Path, arm: str, seed: int) -> Run:
    """The run of an arm and a seed of a benchmark."""
    return Run(f"{folder.name}/{arm}-seed-{seed}", folder / f"{arm}-seed-{seed}")


def contest_path(folder: Path, ours: str, theirs: str, seed: int) -> Path:
    """File of a contest between two arms."""
    return folder / "contests" / ours / theirs / f"seed-{seed}.json"


def answers_by_prompt(run: Run) -> dict[str, dict[str, Any]]:
    """Answers of a run's aligned policy to the held-out prompts, by prompt id."""
    return {row["prompt_id"]: row for row in read_json(run.evaluation / "answers-aligned.json")}
