"""The table of runs and benchmarks for the command line: their state, headline figures, age and size."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from humanize import naturalsize, naturaltime
from pydantic import BaseModel, Field

from components.config import RecipeError, UserError, unknown_name
from components.io import read_mapping
from components.recipes.load import name_and_method
from components.reporting.formats import are_all_ties, format_rate
from tasks.runs import Run, list_runs_and_benchmarks, run_id
from tasks.text_table import fit_columns, table_lines

HEADLINE = (
    "before/accuracy/mean",
    "after/accuracy/mean",
    "after/accuracy/worst",
    "after/accuracy/spread",
    "aligned_vs_base/wins",
    "aligned_vs_base/ties",
    "aligned_vs_base/losses",
    "aligned_vs_base/ties_half",
    "aligned_vs_base/ties_half_low",
    "aligned_vs_base/ties_half_high",
)
"""The main metrics of a run."""
STATES = ("finished", "running", "stopped", "not started")
"""What the state of a run or a benchmark begins with; 'not started' is of benchmarks and their runs."""
SHORTENED = {"state": 11, "headline": 26, "method": 10}
"""Least characters in a narrow terminal: 'not started', 'accuracy 0.529 -> 0.750...' and 'fedbiscuit'."""
LEFT_OUT = ("size", "last written", "recipe", "method", "headline", "state")
"""Columns that a narrow terminal does without, the least important first."""


class RunStatus(BaseModel):
    """A run or a benchmark in the table of runs."""

    run: str = Field(description="its id, by which it is shown and resumed")
    kind: str = Field(description="`run` or `benchmark`")
    recipe: str = Field(description="name of its recipe; `?` if its recipe.yaml cannot be read")
    method: str = Field(description="its federated method; those of a benchmark with commas")
    state: str = Field(
        description="`finished`, `running: PHASE` or `stopped: PHASE`: the first phase that is not complete;"
        " `not started` of a benchmark's run; of a benchmark, how many of its runs are in which state"
    )
    headline: str = Field(
        description="held-out accuracy before and after the rounds; wins, ties and losses against the base"
        " policy, and the win rate with ties as 1/2; empty before the report, and of benchmarks"
    )
    written: datetime = Field(description="when it last wrote a file (UTC)")
    size: int = Field(description="bytes of its folder")
    folder: Path = Field(description="its folder")


class RunDetails(RunStatus):
    """A run."""

    mlflow_run_id: str | None = Field(description="its MLflow run; null before it has one")
    flow_run_url: str | None = Field(description="page of its flow run in Prefect's UI; null without one")
    commits: list[str] = Field(description="commits of the code that ran it")
    committed_steps: int | None = Field(description="committed steps of the rounds; null before the first")
    metrics: dict[str, float] | None = Field(description="the content of report/metrics.json; null before it")


class BenchmarkDetails(RunStatus):
    """A benchmark."""

    mlflow_run_id: str | None = Field(description="its MLflow run; null before it has one")
    flow_run_url: str | None = Field(description="page of its flow run in Prefect's UI; null without one")
    report: Path | None = Field(description="its report.html; null before it")
    runs: dict[str, dict[str, str]] = Field(description="the states of its runs, by arm and seed")


def run_statuses(
    limit: int | None = None, recipe: str | None = None, method: str | None = None, state: str | None = None
) -> list[RunStatus]:
    """The statuses of runs and benchmarks, the latest last.

    Args:
        limit: how many; the latest ones.
        recipe: name of their recipe.
        method: a method that they have.
        state: one of STATES.

    Raises:
        UserError: there is no such state.
    """
    if state is not None and state not in STATES:
        raise UserError(unknown_name("state", state, STATES))
    matching = (
        status
        for status in map(run_status, reversed(list_runs_and_benchmarks()))
        if recipe in (None, *status.recipe.split(", "))
        and method in (None, *status.method.split(", "))
        and state in (None, status.state.partition(":")[0])
    )
    return [*islice(matching, limit)][::-1]


def runs_table(statuses: Sequence[RunStatus], width: int | None) -> list[str]:
    """The lines of the table of runs, in whole or fit to the width of a terminal."""
    header = ["run", "recipe", "method", "state", "headline", "last written", "size"]
    table = [header, *map(table_row, statuses)]
    return table_lines(table if width is None else fit_columns(table, width, SHORTENED, LEFT_OUT))


def table_row(status: RunStatus) -> list[str]:
    """The row of a run in the table of runs."""
    age, size = naturaltime(status.written), naturalsize(status.size)
    return [status.run, status.recipe, status.method, status.state, status.headline or "-", age, size]


def run_status(run: Run) -> RunStatus:
    """The status of a run or a benchmark; '?' stands for names and methods of recipes that have none."""
    recipes = [recipe_and_method(one) for one in (benchmark_runs(run) if run.is_benchmark else [run])]
    files = file_statuses(run.folder)
    changed = max((file.st_mtime for file in files), default=0.0)
    return RunStatus(
        run=run.id,
        kind=run.kind,
        recipe=", ".join(dict.fromkeys(name for name, _ in recipes)) or "?",
        method=", ".join(dict.fromkeys(method for _, method in recipes)) or "?",
        state=run_state(run),
        headline=headline(run),
        written=datetime.fromtimestamp(changed, UTC),
        size=sum(file.st_size for file in files),
        folder=run.folder,
    )


def recipe_and_method(run: Run) -> tuple[str, str]:
    """The name and the method of a run's recipe; '?' without them."""
    try:
        return name_and_method(run.folder / "recipe.yaml")
    except RecipeError:
        return "?", "?"


def benchmark_runs(benchmark: Run) -> list[Run]:
    """The runs of a benchmark in the order in which they were created: by arm, then by seed."""
    recipes = sorted(benchmark.folder.glob("*-seed-*/recipe.yaml"), key=lambda path: path.stat().st_mtime)
    return [Run(run_id(path.parent), path.parent) for path in recipes]


def benchmark_details(benchmark: Run) -> BenchmarkDetails:
    """All that is known of a benchmark without its figures."""
    metadata = benchmark.metadata()
    page = benchmark.report / "report.html"
    states: dict[str, dict[str, str]] = {}
    for run in benchmark_runs(benchmark):
        arm, _, seed = run.folder.name.rpartition("-seed-")
        states.setdefault(arm, {})[seed] = run_state(run)
    return BenchmarkDetails(
        **run_status(benchmark).model_dump(),
        mlflow_run_id=metadata.get("mlflow_run_id"),
        flow_run_url=metadata.get("flow_run_url"),
        report=page if page.is_file() else None,
        runs=states,
    )


def run_details(run: Run) -> RunDetails:
    """All that is known of a run without its adapters."""
    metadata = run.metadata()
    commits = sorted((run.federation / "commits").glob("[0-9]*.json"))
    metrics = run.report / "metrics.json"
    return RunDetails(
        **run_status(run).model_dump(),
        mlflow_run_id=metadata.get("mlflow_run_id"),
        flow_run_url=metadata.get("flow_run_url"),
        commits=metadata.get("commits", []),
        committed_steps=int(commits[-1].stem) if commits else None,
        metrics=read_mapping(metrics) if metrics.is_file() else None,
    )


def file_statuses(folder: Path) -> list[os.stat_result]:
    """The status of each file of a folder but locks; files that a process removes meanwhile are skipped."""
    statuses = []
    for place, _, names in os.walk(folder):  # a third of the time of rglob
        for name in names:
            if name == ".lock":  # which is opened for writing without any work
                continue
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(os.path.join(place, name))
                if stat.S_ISREG(status.st_mode):
                    statuses.append(status)
    return statuses


def run_state(run: Run) -> str:
    """Whether a run is finished, or the phase that it is in; of a benchmark, the states of its runs."""
    if run.is_benchmark:
        return benchmark_state(run)
    if run.is_done("report"):
        return "finished"
    if run.is_in_benchmark and not (run.folder / ".lock").is_file():
        return "not started"
    return f"{'running' if is_locked(run) else 'stopped'}: {run.phase()}"


def benchmark_state(benchmark: Run) -> str:
    """The state of a benchmark and of its runs, such as 'stopped: 2 of 6 runs finished, 4 not started'."""
    runs = benchmark_runs(benchmark)
    counts = Counter(run_state(run).partition(":")[0] for run in runs)
    others = [f"{counts[state]} {state}" for state in STATES[1:] if counts[state]]
    text = ", ".join([f"{counts['finished']} of {len(runs)} runs finished", *others])
    if is_locked(benchmark):
        return f"running: {text}"
    if counts["not started"] == len(runs):
        return f"not started: {text}"
    is_finished = counts["finished"] == len(runs) and has_full_report(benchmark, runs)
    return f"{'finished' if is_finished else 'stopped'}: {text}"


def has_full_report(benchmark: Run, runs: Sequence[Run]) -> bool:
    """Whether the report of a benchmark, which is written after the contests of each seed, has all runs.

    What a report of another version has is not known.
    """
    path = benchmark.report / "metrics.json"
    try:
        reported = read_mapping(path)["commits"] if path.is_file() else {}
    except (KeyError, ValueError):  # of another version of the project
        return True
    return not isinstance(reported, Mapping) or all(run.folder.name in reported for run in runs)


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
    if run.is_benchmark or not path.is_file():
        return ""
    try:
        return format_headline(read_mapping(path)) or "?"
    except (AttributeError, TypeError, ValueError):
        return "?"


def format_headline(metrics: Mapping[str, float]) -> str:
    """Accuracy before and after the rounds, over the clients; the outcome of the contest.

    Reports of earlier versions lack the rate, or its interval.
    """
    before, after, worst, spread, wins, ties, losses, _, low, high = map(metrics.get, HEADLINE)
    parts = []
    if before is not None and after is not None:
        parts.append(f"accuracy {before:.3f} -> {after:.3f}")
        if worst is not None and spread is not None:
            parts[-1] += f" (worst client {worst:.3f}, sd {spread:.3f})"
    if wins is not None and ties is not None and losses is not None:
        count = wins + ties + losses
        rate = (wins + ties / 2) / count if count else None
        rate_text = format_rate(rate, low, high, are_all_ties(wins, ties, losses))
        parts.append(f"wins/ties/losses {wins:.0f}/{ties:.0f}/{losses:.0f}, ties as 1/2: {rate_text}")
    return ", ".join(parts)


def describe_run(run: Run) -> str:
    """The state of a run, its folder and MLflow run, and the table of a finished one."""
    status = run_details(run)
    lines = _first_lines(status)
    if status.commits:
        lines.append(f"  commits     {', '.join(status.commits)}")
    if status.committed_steps is not None:
        lines.append(f"  committed   {run.committed_round()} rounds")
    if summary := _summary(run):
        lines += summary
    elif status.state != "finished":
        lines.append(f"  resume it   {run.resume_command}")
    return "\n".join(lines)


def _summary(run: Run) -> list[str]:
    """The lines that a run or benchmark ended with; none where there are none."""
    path = run.report / "summary.txt"
    return ["", path.read_text(encoding="utf-8").rstrip()] if path.is_file() else []


def _first_lines(status: RunDetails | BenchmarkDetails) -> list[str]:
    size, age = naturalsize(status.size), naturaltime(status.written)
    lines = [
        f"{status.run}: {status.recipe}, {status.method}, {status.state}",
        f"  folder      {status.folder} ({size}, last written {age})",
    ]
    if status.mlflow_run_id:
        lines.append(f"  MLflow run  {status.mlflow_run_id}")
    return lines


def describe_benchmark(benchmark: Run) -> str:
    """The state of a benchmark, its folder, MLflow run and report, and of each run, or the summary of all."""
    status = benchmark_details(benchmark)
    lines = _first_lines(status)
    if status.report is not None:
        lines.append(f"  report      {status.report}")
    if not status.state.startswith("finished"):
        lines.append(f"  resume it   {benchmark.resume_command}")
    elif summary := _summary(benchmark):
        return "\n".join([*lines, *summary])
    seeds = list(dict.fromkeys(seed for states in status.runs.values() for seed in states))
    table = [["arm", *(f"seed {seed}" for seed in seeds)]]
    for arm, states in status.runs.items():
        table.append([arm, *(states.get(seed, "-") for seed in seeds)])
    return "\n".join([*lines, "", *table_lines(table)] if status.runs else lines)


def report_page(run: Run) -> Path:
    """The report of a finished run or benchmark.

    Raises:
        RecipeError: it has none.
    """
    page = run.report / "report.html"
    if not page.is_file():
        raise RecipeError(
            f"{run.kind} '{run.id}' has no report.html, it is {run_state(run)}: finish it with"
            f" `{run.resume_command}`, or show a finished run (`fed-rlhf runs`)."
        )
    return page
