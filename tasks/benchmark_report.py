"""The report of a benchmark: tables, plots, claims, and the numbers behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from components.config.benchmark import Benchmark
from components.evaluation.contests import Contest
from components.evaluation.diagnostics import load_diagnostics
from components.evaluation.plotting import Image
from components.io import read_json, write_json
from components.reporting.choices import ChosenArm, choices_table, choose_arms
from components.reporting.claims import Evidence, Finding, check_claims, claims_table
from components.reporting.figures import mean_figures
from components.reporting.tables import Table
from components.reporting.units import CLIENTS
from components.results import ContestFigures
from tasks.benchmark_folder import arm_run
from tasks.benchmark_results import BenchmarkResults, read_results
from tasks.runs import git_commit
from tasks.uncached import task

Parts = list[Table | Image]


@dataclass(frozen=True)
class BenchmarkReport:
    """A written report."""

    folder: Path  # report.html, report.md, figures.json and plots
    means: dict[str, dict[str, float]]  # means over seeds of each arm's figures
    findings: Sequence[Finding]  # the checked claims


@dataclass(frozen=True)
class ReportedBenchmark:
    """What a report shows."""

    folder: Path  # of the benchmark
    benchmark: Benchmark  # its arms, seeds and claims
    results: BenchmarkResults  # of the finished runs
    pools: Mapping[str, ContestFigures]  # figures of the contests over all seeds
    findings: Sequence[Finding]  # the checked claims
    chosen: Sequence[ChosenArm]  # the choices


@task()
def write_benchmark_report(folder: Path, benchmark: Benchmark) -> BenchmarkReport:
    """Write report.html, report.md, figures.json and the plots."""
    from components.reporting.html import to_html
    from components.reporting.tables import to_markdown

    results = read_results(folder, benchmark)
    pools = {name: Contest.pooled(by_seed).figures() for name, by_seed in results.contests.items()}
    evidence = Evidence(
        results.figures, results.units, results.contests, pools, benchmark.seeds, results.resamples
    )
    findings = check_claims(benchmark.claims, evidence)
    chosen = choose_arms(benchmark.choices, results.figures, results.units, benchmark.seeds)
    reported = ReportedBenchmark(folder, benchmark, results, pools, findings, chosen)
    out = folder / "report"
    out.mkdir(exist_ok=True)
    notes = _notes(reported)
    parts = _parts(reported, out)
    write_json(out / "figures.json", _numbers(reported))
    (out / "report.md").write_text(to_markdown(folder.name, parts, notes), encoding="utf-8")
    (out / "report.html").write_text(to_html(folder.name, parts, notes), encoding="utf-8")
    means = {arm: mean_figures(runs) for arm, runs in results.figures.items()}
    return BenchmarkReport(out, means, findings)


def _notes(reported: ReportedBenchmark) -> list[str]:
    """The settings and the commits, a line each."""
    benchmark = reported.benchmark
    notes = [
        f"recipe {benchmark.recipe}, seeds {', '.join(map(str, benchmark.seeds))}",
        commits_line(reported.results.commits),
        f"report written by commit {short_commit(git_commit())}",
        "accuracies are of the selectors' majority, or of the trained policy's implicit reward; a client"
        " step is an optimizer step of the arm's own batch size",
    ]
    if benchmark.settings:
        notes.append(f"all arms: {'; '.join(benchmark.settings)}")
    return notes + [f"{arm}: {'; '.join(settings)}" for arm, settings in benchmark.arms.items()]


def _numbers(reported: ReportedBenchmark) -> dict[str, Any]:
    """The content of figures.json."""
    results = reported.results
    return {
        "figures": results.figures,
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
    """The worst client and the spread of each figure that is a mean over clients, by arm and seed."""
    numbers: dict[str, dict[int, dict[str, dict[str, float]]]] = {}
    for arm, runs in results.units.items():
        for seed, by_figure in runs.items():
            numbers.setdefault(arm, {})[seed] = {
                figure: {"worst": units.worst, "spread": units.spread}
                for figure, units in by_figure.items()
                if units.unit == CLIENTS
            }
    return numbers


def _parts(reported: ReportedBenchmark, out: Path) -> Parts:
    """The tables and plots; the plots are written into `out`."""
    from components.reporting.benchmark_plots import plot_overview
    from components.reporting.tables import contests_table, figures_tables, judges_table

    results = reported.results
    means, single = figures_tables(results.figures, results.base, results.units)
    plot_overview(results.figures, results.contests, reported.pools, out / "benchmark.png")
    parts: Parts = [claims_table(reported.findings)] if reported.findings else []
    if reported.chosen:
        parts.append(choices_table(reported.chosen))
    parts += [
        means,
        contests_table(results.contests, reported.pools),
        Image("Accuracies and win rates", out / "benchmark.png", "Dots: seeds."),
        judges_table(results.contests, results.judges),
    ]
    return [*parts, *_curve_parts(results, out), *_front_parts(reported, out), single]


def _curve_parts(results: BenchmarkResults, out: Path) -> Parts:
    """The curves over rounds and over DPO's steps, and the plots of the methods' diagnostics."""
    from components.evaluation.hacking_curve import plot_hacking_grid
    from components.reporting.benchmark_plots import plot_rewards

    parts: Parts = []
    if results.rewards:
        plot_rewards(results.rewards, out / "rewards.png")
        caption = "Mean over seeds, in a band from the smallest to the largest."
        parts.append(Image("Rewards over the rounds", out / "rewards.png", caption))
    if results.hacking:
        plot_hacking_grid(results.hacking, out / "reward-hacking.png")
        caption = (
            "Share of prompts on which the policy's answer is preferred to the base policy's, a tie half."
            " Where the judge's share falls while the selectors' rises, the reward is hacked."
        )
        parts.append(Image("Selectors and judge over the alignment", out / "reward-hacking.png", caption))
    for name, summaries in results.diagnostics.items():
        (diagnostic,) = load_diagnostics([name])
        parts += diagnostic.plot_benchmark(summaries, out)
    return parts


def _front_parts(reported: ReportedBenchmark, out: Path) -> Parts:
    """The plot of the fronts, and answers of each front's policies of its first complete seed."""
    from components.reporting.fronts import plot_fronts
    from components.reporting.tables import samples_table

    parts: Parts = []
    fronts = reported.results.fronts
    if not fronts:
        return parts
    point = next(iter(next(iter(next(iter(fronts.values())).values())).values()))
    if len(point.scores) > 1:
        plot_fronts(fronts, out / "fronts.png")
        caption = "A point is an arm's policy; a hollow one is dominated by another of its front."
        parts.append(Image("Fronts", out / "fronts.png", caption))
    for name, by_seed in fronts.items():
        seed = min(by_seed)
        answers = {
            arm: read_json(arm_run(reported.folder, arm, seed).evaluation / "answers.json")
            for arm in reported.benchmark.fronts[name]
        }
        parts.append(samples_table(f"{name}, seed {seed}", answers))
    return parts


def short_commit(commit: str) -> str:
    """The first 12 digits of a commit, with '-dirty' where files differed from it."""
    return commit[:12] + ("-dirty" if commit.endswith("-dirty") else "")


def commits_line(commits: Mapping[str, Sequence[str]]) -> str:
    """The commits of the runs, and which run is of which where they differ.

    Args:
        commits: by run, the commits of the code that worked on it; empty where none was recorded.
    """
    runs_of: dict[str, list[str]] = {}
    for run, own in commits.items():
        runs_of.setdefault(", then ".join(map(short_commit, own)) or "not recorded", []).append(run)
    if len(runs_of) == 1:
        return f"commit of the runs: {next(iter(runs_of))}"
    parts = [f"{commit} ({', '.join(runs)})" for commit, runs in runs_of.items()]
    return f"commits of the runs: {'; '.join(parts)}"
