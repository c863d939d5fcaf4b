"""The report of a benchmark: its page, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from components.config.benchmark import Benchmark
from components.evaluation.contests import Contest
from components.evaluation.diagnostics import load_diagnostics
from components.io import write_atomically, write_json
from components.reporting.benchmark import BenchmarkResults, ReportedBenchmark, benchmark_page
from components.reporting.choices import choose_arms
from components.reporting.claims import Evidence, Finding, check_claims
from components.reporting.metrics import mean_metrics
from components.reporting.page import to_html, to_markdown
from components.reporting.units import CLIENTS
from components.results import finite_or_none
from tasks.benchmark_results import read_results
from tasks.runs import git_commit
from tasks.uncached import task


@dataclass(frozen=True)
class BenchmarkReport:
    """A written report."""

    folder: Path  # report.html, report.md and metrics.json
    means: dict[str, dict[str, float]]  # means over seeds of each arm's metrics
    findings: Sequence[Finding]  # the checked claims


@task()
def write_benchmark_report(folder: Path, benchmark: Benchmark) -> BenchmarkReport:
    """Write report.html, report.md and metrics.json."""
    results = read_results(folder, benchmark)
    pools = {name: Contest.pooled(by_seed).figures() for name, by_seed in results.contests.items()}
    evidence = Evidence(
        results.metrics, results.units, results.contests, pools, benchmark.seeds, results.resamples
    )
    reported = ReportedBenchmark(
        folder.name,
        benchmark,
        results,
        pools,
        check_claims(benchmark.claims, evidence),
        choose_arms(benchmark.choices, results.metrics, results.units, benchmark.seeds),
        [
            figure
            for name, summaries in results.diagnostics.items()
            for figure in load_diagnostics([name])[0].benchmark_charts(summaries)
        ],
        git_commit(),
    )
    out = folder / "report"
    out.mkdir(exist_ok=True)
    page = benchmark_page(reported)
    write_json(out / "metrics.json", finite_or_none(_numbers(reported)))
    write_atomically(out / "report.md", to_markdown(page).encode())
    write_atomically(out / "report.html", to_html(page).encode())
    means = {arm: mean_metrics(runs) for arm, runs in results.metrics.items()}
    return BenchmarkReport(out, means, reported.findings)


def _numbers(reported: ReportedBenchmark) -> dict[str, Any]:
    """The content of metrics.json."""
    results = reported.results
    return {
        "metrics": results.metrics,
        "clients": _client_numbers(results),
        "base": results.base,
        "contests": {
            name: {seed: contest.combined() for seed, contest in by_seed.items()}
            for name, by_seed in results.contests.items()
        },
        "judges": results.judges,
        "rewards": results.rewards,
        "hacking": {
            arm: {seed: [point.model_dump() for point in curve] for seed, curve in by_seed.items()}
            for arm, by_seed in results.hacking.items()
        },
        "fronts": {
            name: {
                seed: {arm: asdict(point) for arm, point in front.items()} for seed, front in by_seed.items()
            }
            for name, by_seed in results.fronts.items()
        },
        "commits": results.commits,
        "pooled": {name: pool.model_dump() for name, pool in reported.pools.items()},
        "claims": [asdict(finding) for finding in reported.findings],
        "choices": [asdict(choice) for choice in reported.chosen],
    }


def _client_numbers(results: BenchmarkResults) -> dict[str, dict[int, dict[str, dict[str, float]]]]:
    """The worst client and the spread of each metric that is a mean over clients, by arm and seed."""
    return {
        arm: {
            seed: {
                name: {"worst": units.worst, "spread": units.spread}
                for name, units in by_metric.items()
                if units.unit == CLIENTS
            }
            for seed, by_metric in runs.items()
        }
        for arm, runs in results.units.items()
    }
