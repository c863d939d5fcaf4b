"""The report of a benchmark: its page, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from components.config.benchmark import BASE_POLICY, REFERENCES, Benchmark
from components.evaluation.contests import Contest
from components.io import read_json, write_atomically, write_json
from components.reporting.benchmark_page import benchmark_page, benchmark_summary
from components.reporting.benchmark_results import BenchmarkResults, complete_fronts
from components.reporting.changes import Change, MeansByArm, choose_arms, find_changes
from components.reporting.claims import Finding, check_claims
from components.reporting.metrics import base_metrics, mean_metrics
from components.reporting.page import to_html, to_markdown
from components.reporting.units import CLIENTS, run_units
from components.results import finite_or_none
from tasks.benchmark_folder import arm_run, contest_path
from tasks.report import read_results as read_run
from tasks.runs import Run, git_commit
from tasks.uncached import task

OWN_CONTESTS = {
    "aligned_vs_base": f"{{arm}} against {BASE_POLICY}",
    "aligned_vs_human": f"{{arm}} against {REFERENCES}",
    "base_vs_human": f"{BASE_POLICY} against {REFERENCES}",
}
"""Names of a run's own contests in a benchmark."""


T = TypeVar("T")


def read_results(folder: Path, benchmark: Benchmark) -> BenchmarkResults:
    """Read the finished runs and contests of a benchmark."""
    results = BenchmarkResults(benchmark.seeds)
    for arm in benchmark.arms:
        for seed in benchmark.seeds:
            run = arm_run(folder, arm, seed)
            if run.is_done("report"):
                _add_run(results, run, arm, seed)
    for seed in benchmark.seeds:
        points = {
            arm: point
            for summaries in results.diagnostics.values()
            for arm, runs in summaries.items()
            if seed in runs and (point := runs[seed].front) is not None
        }
        results.add_fronts(seed, complete_fronts(benchmark.fronts, points))
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
    results.add_base(seed, base_metrics(read.metrics), [each.prompts for each in read.contests.values()])
    questions: list[Mapping[str, Any]] = []
    if "aligned" in read.evaluation.questions:
        for name in read.evaluation.questions["aligned"].sets:
            questions += read_json(run.evaluation / "questions" / f"aligned-{name}.json")
    results.units.setdefault(arm, {})[seed] = run_units(read, questions)
    results.judges.setdefault(seed, read.evaluation.judge_figures)
    results.commits[f"{arm}-seed-{seed}"] = run.metadata().get("commits", [])
    for name, summary in read.diagnostics.items():
        results.diagnostics.setdefault(name, {}).setdefault(arm, {})[seed] = summary
    for name, contest in read.contests.items():
        results.contests.setdefault(OWN_CONTESTS[name].format(arm=arm), {})[seed] = contest


@task()
def write_benchmark_report(
    folder: Path, benchmark: Benchmark, earlier: Sequence[MeansByArm] | None
) -> tuple[Path, MeansByArm, Sequence[Finding], Sequence[Change]]:
    """Write report.html, report.md, summary.txt and metrics.json.

    Args:
        folder: of the benchmark.
        benchmark: its file.
        earlier: means over the seeds in its last runs; None before all seeds are finished.

    Returns:
        the folder of the report, the means over seeds of each arm's metrics, the checked claims, and the
        changes since the last runs.
    """
    results = read_results(folder, benchmark)
    means = {arm: mean_metrics(runs) for arm, runs in results.metrics.items()}
    changes = (
        []
        if earlier is None
        else find_changes({arm: means.get(arm, {}) for arm in benchmark.arms}, earlier, benchmark.regressions)
    )
    findings = check_claims(benchmark.claims, results)
    chosen = choose_arms(benchmark.choices, results.metrics, benchmark.seeds)
    out = folder / "report"
    out.mkdir(exist_ok=True)
    numbers = {
        name: getattr(results, name) for name in ("metrics", "base", "judges", "rewards", "commits")
    } | {
        "clients": _by_arm_and_seed(  # how each metric that is a mean over clients differs over them
            results.units,
            lambda units: {name: one.ranges() for name, one in units.items() if one.unit == CLIENTS},
        ),
        "contests": _by_arm_and_seed(results.contests, Contest.combined),
        "hacking": _by_arm_and_seed(results.hacking, lambda curve: [point.model_dump() for point in curve]),
        "fronts": _by_arm_and_seed(
            results.fronts, lambda front: {arm: asdict(point) for arm, point in front.items()}
        ),
        "pooled": {name: pool.model_dump() for name, pool in results.pools.items()},
        "claims": [asdict(finding) for finding in findings],
        "choices": chosen,
        "changes": [asdict(change) for change in changes],
    }
    write_json(out / "metrics.json", finite_or_none(numbers))
    page = benchmark_page(folder.name, benchmark, results, findings, chosen, changes, git_commit())
    write_atomically(out / "report.md", to_markdown(page).encode())
    write_atomically(out / "report.html", to_html(page).encode())
    summary = benchmark_summary(folder.name, benchmark, results, findings, chosen, changes)
    write_atomically(out / "summary.txt", f"{summary}\n".encode())
    return out, means, findings, changes


def _by_arm_and_seed(
    values: Mapping[str, Mapping[int, T]], convert: Callable[[T], Any]
) -> dict[str, dict[int, Any]]:
    return {arm: {seed: convert(value) for seed, value in by_seed.items()} for arm, by_seed in values.items()}
