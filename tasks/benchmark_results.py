"""What a benchmark's report reads from its finished runs and contests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.config.benchmark import BASE_POLICY, REFERENCES, Benchmark
from components.evaluation.contests import Contest
from components.io import read_json
from components.reporting.benchmark import BenchmarkResults
from components.reporting.fronts import Front, front_metrics, worst_rewards
from components.reporting.metrics import base_metrics
from components.reporting.units import run_units
from tasks.benchmark_folder import arm_run, contest_path
from tasks.report import read_results as read_run
from tasks.runs import Run

OWN_CONTESTS = {
    "aligned_vs_base": f"{{arm}} against {BASE_POLICY}",
    "aligned_vs_human": f"{{arm}} against {REFERENCES}",
    "base_vs_human": f"{BASE_POLICY} against {REFERENCES}",
}
"""Names of a run's own contests in a benchmark."""


def read_results(folder: Path, benchmark: Benchmark) -> BenchmarkResults:
    """Read the finished runs and contests of a benchmark."""
    results = BenchmarkResults()
    for arm in benchmark.arms:
        for seed in benchmark.seeds:
            run = arm_run(folder, arm, seed)
            if run.is_done("report"):
                _add_run(results, run, arm, seed)
    for seed in benchmark.seeds:
        _add_fronts(results, benchmark, seed)
    for name, by_seed in results.fronts.items():
        seed = min(by_seed)
        runs = {arm: arm_run(folder, arm, seed) for arm in benchmark.fronts[name]}
        rows = {arm: read_json(run.evaluation / "answers.json") for arm, run in runs.items()}
        results.answers[f"{name}, seed {seed}"] = rows
    for ours, theirs in benchmark.contests:
        for seed in benchmark.seeds:
            path = contest_path(folder, ours, theirs, seed)
            if path.is_file():
                results.contests.setdefault(f"{ours} against {theirs}", {})[seed] = Contest.read(path)
    return results


def _add_run(results: BenchmarkResults, run: Run, arm: str, seed: int) -> None:
    read = read_run(run, run.recipe())
    if read.curve:
        results.rewards.setdefault(arm, {})[seed] = read.curve
    if read.evaluation.curve:
        results.hacking.setdefault(arm, {})[seed] = read.evaluation.curve
    results.metrics.setdefault(arm, {})[seed] = read.metrics
    results.base.setdefault(seed, base_metrics(read.metrics))
    questions: list[Mapping[str, Any]] = []
    if "aligned" in read.evaluation.questions:
        for name in read.evaluation.questions["aligned"].sets:
            questions += read_json(run.evaluation / "questions" / f"aligned-{name}.json")
    results.units.setdefault(arm, {})[seed] = run_units(read, questions)
    results.resamples = max(results.resamples, read.recipe.evaluation.bootstrap)
    results.judges.setdefault(seed, read.evaluation.judge_figures)
    results.commits[f"{arm}-seed-{seed}"] = run.metadata().get("commits", [])
    for name, summary in read.diagnostics.items():
        results.diagnostics.setdefault(name, {}).setdefault(arm, {})[seed] = summary
    for name, contest in read.contests.items():
        results.contests.setdefault(OWN_CONTESTS[name].format(arm=arm), {})[seed] = contest


def _add_fronts(results: BenchmarkResults, benchmark: Benchmark, seed: int) -> None:
    """The metrics of each front of a seed whose arms are all done."""
    points = {}
    for summaries in results.diagnostics.values():
        for arm, runs in summaries.items():
            point = runs[seed].front if seed in runs else None
            if point is not None:
                points[arm] = point
    fronts: dict[str, Front] = {}
    for name, arms in benchmark.fronts.items():
        front: Front = {arm: point for arm in arms if (point := points.get(arm)) is not None}
        if len(front) == len(arms):
            fronts[name] = front
    for name, front in fronts.items():
        results.metrics.setdefault(name, {})[seed] = front_metrics(front, worst_rewards(fronts))
        results.fronts.setdefault(name, {})[seed] = front
