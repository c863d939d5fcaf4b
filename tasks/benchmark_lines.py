"""The lines of a benchmark's finished runs and contests, as they are published."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from components.config import UserError
from components.config.benchmark import Benchmark
from components.evaluation.contests import Contest
from components.paths import PACKAGE
from components.recipes.benchmarks import (
    benchmark_names,
    read_benchmark,
    select_lines,
    settings_of,
    settings_of_contests,
)
from components.reporting.benchmark_results import BenchmarkResults
from components.reporting.published import (
    CONTESTS,
    RUN,
    SUFFIX,
    Line,
    power_lines,
    publish,
    read_lines,
    runs_of,
    seconds_of,
    time_line,
)
from components.reporting.published import read_results as read_published
from tasks.benchmark_folder import arm_run, contest_path
from tasks.benchmark_report import read_results

PUBLISHED = PACKAGE / "docs" / "results" / "data"
"""Folder of the project's published results in a checkout."""


def publish_lines(folder: Path, file: Path) -> int:
    """Append the finished runs and contests of a benchmark to a file; gives the number of new lines.

    Raises:
        UserError: the folder of the file is missing, it is a folder itself, or it has other lines.
    """
    if file.is_dir():
        raise UserError(
            f"--publish {file} is a folder: name a file in it, such as {file / 'results'}{SUFFIX}"
        )
    if not file.parent.is_dir():
        raise UserError(
            f"--publish {file}: there is no folder {file.parent}: create it, or name another file"
        )
    return publish(file, own_lines(folder))


def prospects(name: str, benchmark: Benchmark, folder: Path | None) -> list[str]:
    """What the missing runs of a benchmark will take, and what it can decide, as lines.

    Both follow from the finished runs of its folder, or else from those with the same settings that the
    project has published of a benchmark of the package.

    Args:
        name: of the benchmark, or the path of its file.
        benchmark: what is run.
        folder: of a benchmark that is resumed.
    """
    lines = read_lines(PUBLISHED / f"{name}{SUFFIX}") if name in benchmark_names() else []
    own = [] if folder is None else [*own_lines(folder)]
    done = {(line["arm"], line["seed"]) for line in own}
    missing = [run for run in runs_of(benchmark) if run not in done]
    seeds = sorted({line["seed"] for line in (*lines, *own)})
    earlier = benchmark.model_copy(update={"seeds": seeds})
    every = select_lines([*lines, *own], earlier)
    measured = read_published(every, earlier) if every else BenchmarkResults()
    return [time_line(missing, seconds_of(every)), *power_lines(benchmark, measured)]


def own_lines(folder: Path) -> Iterator[Line]:
    """The lines of the finished runs and contests in a benchmark's folder, which may still be running."""
    benchmark = read_benchmark(str(folder / "benchmark.yaml"))
    commits: dict[int, set[str]] = defaultdict(set)
    for arm, seed in runs_of(benchmark):
        if arm_run(folder, arm, seed).is_done("report"):
            line = _run_line(folder, benchmark, arm, seed)
            commits[seed].update(line["commits"])
            yield line
    for seed in benchmark.seeds:
        paths = {
            f"{ours} against {theirs}": contest_path(folder, ours, theirs, seed)
            for ours, theirs in benchmark.contests
        }
        if paths and all(path.is_file() for path in paths.values()):
            contests = {name: _contest_line(Contest.read(path)) for name, path in paths.items()}
            yield {
                "kind": CONTESTS,
                "arm": "",
                "seed": seed,
                "commits": sorted(commits[seed]),
                "settings": settings_of_contests(benchmark),
                "contests": contests,
            }


def _run_line(folder: Path, benchmark: Benchmark, arm: str, seed: int) -> Line:
    """The figures of a finished run, what they are means of, and its verdicts by answer."""
    changes = {"arms": {arm: benchmark.arms[arm]}, "seeds": [seed], "contests": [], "fronts": {}}
    results = read_results(folder, benchmark.model_copy(update=changes))
    units = results.units[arm][seed]
    line: Line = {
        "kind": RUN,
        "arm": arm,
        "seed": seed,
        "commits": results.commits[f"{arm}-seed-{seed}"],
        "settings": settings_of(benchmark, arm),
        "seconds": round(sum(arm_run(folder, arm, seed).metadata()["seconds"].values())),
        "metrics": results.metrics[arm][seed],
        "units": {name: {"unit": each.unit, "groups": each.strata} for name, each in units.items()},
        "base": results.base[seed],
        "judge": results.judges[seed],
        "contests": {name: _contest_line(by_seed[seed]) for name, by_seed in results.contests.items()},
    }
    fronts = [summaries[arm][seed].front for summaries in results.diagnostics.values()]
    if front := next(filter(None, fronts), None):
        line["front"] = asdict(front)
    return line


def _contest_line(contest: Contest) -> Line:
    """A contest with the counts of its verdicts."""
    line = contest.combined()
    return line | {"counts": Counter(line["verdicts"])}
