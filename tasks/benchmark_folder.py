"""The folder of a benchmark, which holds its runs, contests and report.

runs/<benchmark>/
    benchmark.yaml   the benchmark as it was started
    run.json         id of its MLflow run
    <arm>-seed-<n>/  a run folder each
    contests/        each contest and seed (components/evaluation/contests.py)
    report/          report.html, report.md, summary.txt, metrics.json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import yaml

from components.config import RecipeError, check_section
from components.config.benchmark import Benchmark
from components.config.loading import Tree, apply_overrides
from components.io import read_json, write_atomically
from components.paths import runs_root
from components.recipes.benchmarks import arm_recipe
from tasks.devices import choose_workers
from tasks.runs import Run, create_run


def open_benchmark(name: str, benchmark: Benchmark) -> Path:
    """A new folder with the benchmark and the recipe of each run; a resumed benchmark reads them."""
    moment = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder = runs_root() / f"benchmark-{Path(name).stem}-{moment}"
    day = date.today()  # the same for all runs, which are compared
    inputs: dict[Path, Path] = {}
    for arm in benchmark.arms:
        for seed in benchmark.seeds:
            recipe = choose_workers(arm_recipe(benchmark, arm, seed))
            create_run(recipe, arm_run(folder, arm, seed).folder, day, inputs)
    _write_plan(folder, benchmark)
    return folder


def extend_plan(plan: Benchmark, overrides: Sequence[str]) -> Benchmark:
    """A started benchmark with more seeds, which come after those that it has.

    Args:
        plan: the benchmark.
        overrides: empty, or one 'seeds=[...]' with all seeds, old and new.

    Raises:
        RecipeError: another key is set, or a seed is left out.
    """
    if not overrides:
        return plan
    tree: Tree = {}
    apply_overrides(tree, overrides)
    if list(tree) != ["seeds"]:
        more = [*plan.seeds, max(plan.seeds) + 1]
        raise RecipeError(
            "a resumed benchmark continues with its own arms, and only takes more seeds, e.g."
            f" 'seeds={more}': leave out the other overrides, or start a new one."
        )
    extended = check_section(Benchmark, plan.model_dump(mode="json") | tree, "the resumed benchmark")
    missing = [seed for seed in plan.seeds if seed not in extended.seeds]
    if missing:
        raise RecipeError(
            f"seeds={extended.seeds} leaves out {missing[0]}, which the benchmark has: name all its seeds,"
            f" {plan.seeds}, and the new ones."
        )
    added = [seed for seed in extended.seeds if seed not in plan.seeds]
    return extended.model_copy(update={"seeds": [*plan.seeds, *added]})


def add_seeds(folder: Path, plan: Benchmark) -> None:
    """Create the runs of the seeds of `extend_plan`, with the recipes and files of the first seed's."""
    for arm in plan.arms:
        first = arm_run(folder, arm, plan.seeds[0])
        copies = {path: path for path in first.inputs.resolve().glob("*/*")}
        for seed in plan.seeds:
            run = arm_run(folder, arm, seed)
            if not (run.folder / "recipe.yaml").is_file():
                create_run(first.recipe().model_copy(update={"seed": seed}), run.folder, known=copies)
    _write_plan(folder, plan)


def _write_plan(folder: Path, plan: Benchmark) -> None:
    content = yaml.safe_dump(plan.model_dump(mode="json"), sort_keys=False)
    write_atomically(folder / "benchmark.yaml", content.encode())


def arm_run(folder: Path, arm: str, seed: int) -> Run:
    """The run of an arm and a seed of a benchmark."""
    return Run(f"{folder.name}/{arm}-seed-{seed}", folder / f"{arm}-seed-{seed}")


def contest_path(folder: Path, ours: str, theirs: str, seed: int) -> Path:
    """File of a contest between two arms."""
    return folder / "contests" / ours / theirs / f"seed-{seed}.json"


def answers_by_prompt(run: Run) -> dict[str, Mapping[str, Any]]:
    """Answers of a run's aligned policy to the held-out prompts, by prompt id."""
    return {row["prompt_id"]: row for row in read_json(run.evaluation / "answers-aligned.json")}
