"""Published results of a benchmark: a JSON line for each finished run, and for the contests of a seed.

Tables, claims and pictures of docs/results are functions of the lines of docs/results/data/<benchmark>.jsonl.
A line has all figures of a run, the values that they are means of, and the judge's verdict on each answer.
By these a benchmark's time and power are estimated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.config import UserError
from components.config.benchmark import Benchmark
from components.evaluation.contests import Contest
from components.evaluation.diagnostics.diagnostic import FrontPoint
from components.evaluation.winrate import Verdict
from components.io import write_atomically
from components.reporting.benchmark_results import BenchmarkResults, complete_fronts
from components.reporting.claims import check_claims
from components.reporting.formats import format_number
from components.reporting.units import Units, UnitsByMetric
from components.results import finite_or_none

RUN = "run"
CONTESTS = "contests"
"""Kinds of lines: a run, and the contests between the arms of a seed."""
SUFFIX = ".jsonl"
PAIR_ACCURACY = "after/accuracy"
"""Beginning of the names of metrics of the clients' pair accuracies."""

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """The lines of a file; none if there is no file. One that is not JSON is a UserError."""
    rows: list[Line] = []
    if not path.is_file():
        return rows
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(json.loads(text))
        except ValueError:
            raise UserError(
                f"{path}, line {number} is not JSON: restore the file from git, or delete the line"
            ) from None
    return rows


def publish(path: Path, lines: Iterable[Line]) -> int:
    """Append the lines that a file does not have; gives their number.

    A line is there if there is one of the same kind, arm, seed, commits and settings. A file with lines that
    are not of a benchmark is a UserError.
    """
    try:
        known = {_identity(line) for line in read_lines(path)}
    except (KeyError, TypeError):
        raise UserError(
            f"{path} has lines that are no results of a benchmark: name another file, which may be new"
        ) from None
    new = [line for line in lines if _identity(line) not in known]
    if new:
        texts = [json.dumps(finite_or_none(line), sort_keys=True) for line in new]
        earlier = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        write_atomically(path, "".join(f"{text}\n" for text in [*earlier, *texts]).encode())
    return len(new)


def _identity(line: Line) -> tuple[str, str, int, tuple[str, ...], str]:
    commits = tuple(sorted(line["commits"]))
    return line["kind"], line["arm"], line["seed"], commits, json.dumps(line.get("settings"), sort_keys=True)


def read_results(lines: Iterable[Line], benchmark: Benchmark) -> BenchmarkResults:
    """The results of a benchmark's published runs and contests, of which its claims and tables are functions.

    The lines are the benchmark's (components.recipes.benchmarks.select_lines); of several of a run or contest
    the last one counts. A line has the combined verdict of both orders of a pair, so that what depends on the
    single orders (the position consistency) is not among them.
    """
    results = BenchmarkResults(benchmark.seeds)
    points: dict[int, dict[str, FrontPoint]] = {}
    for line in sorted(lines, key=lambda line: benchmark.seeds.index(line["seed"])):
        arm, seed = line["arm"], line["seed"]
        for name, contest in line["contests"].items():
            verdicts = [Verdict(verdict) for verdict in contest["verdicts"]]  # of both orders combined
            results.contests.setdefault(name, {})[seed] = Contest(
                prompts=contest["prompts"],
                original=verdicts,
                swapped=[verdict.swapped() for verdict in verdicts],
                equal=[False] * len(verdicts),
                ours=contest["ours"],
                theirs=contest["theirs"],
                style=contest.get("style", {}),
            )
        if line["kind"] == RUN:
            units = {name: Units(own["unit"], own["groups"]) for name, own in line["units"].items()}
            results.units.setdefault(arm, {})[seed] = units
            results.metrics.setdefault(arm, {})[seed] = _ranges(units) | _numbers(line["metrics"])
            prompts = [contest["prompts"] for contest in line["contests"].values()]
            results.add_base(seed, _numbers(line["base"]), prompts)
            results.judges[seed] = _numbers(line["judge"])
            results.commits[f"{arm}-seed-{seed}"] = line["commits"]
            if "front" in line:
                points.setdefault(seed, {})[arm] = FrontPoint(**line["front"])
    for seed, by_arm in points.items():
        results.add_fronts(seed, complete_fronts(benchmark.fronts, by_arm))
    return results


def _ranges(units: UnitsByMetric) -> dict[str, float]:
    """How pair accuracy differs over the clients, which lines of earlier commits have in their units only."""
    own = units.get(f"{PAIR_ACCURACY}/mean")
    if own is None:
        return {}
    return {f"{PAIR_ACCURACY}/{name}": own.ranges()[name] for name in ("worst_tenth", "jain")}


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    """The numbers of a line, in which null is one that is not finite."""
    return {name: math.nan if value is None else value for name, value in values.items()}


def runs_of(benchmark: Benchmark) -> list[tuple[str, int]]:
    """Arm and seed of the runs: all arms of the first seed, then those of the next one."""
    return [(arm, seed) for seed in benchmark.seeds for arm in benchmark.arms]


def seconds_of(lines: Sequence[Line]) -> dict[str, list[float]]:
    """Elapsed seconds of the runs, by arm."""
    seconds: dict[str, list[float]] = {}
    for line in lines:
        if line["kind"] == RUN:
            seconds.setdefault(line["arm"], []).append(line["seconds"])
    return seconds


def expected_minutes(
    runs: Sequence[tuple[str, int]], seconds: Mapping[str, Sequence[float]]
) -> tuple[float, list[str]]:
    """Minutes of runs by the mean time of finished runs of their arms, and the arms without any.

    An arm without a finished run takes the mean time of the others; NaN where no run is finished.
    """
    means = {arm: sum(own) / len(own) for arm, own in seconds.items() if own}
    other = sum(means.values()) / len(means) if means else math.nan
    unknown = list(dict.fromkeys(arm for arm, _ in runs if arm not in means))
    return sum(means.get(arm, other) for arm, _ in runs) / 60, unknown


def time_line(runs: Sequence[tuple[str, int]], seconds: Mapping[str, Sequence[float]]) -> str:
    """What the runs will take, as a line."""
    minutes, unknown = expected_minutes(runs, seconds)
    if not math.isfinite(minutes):
        return f"estimated time: not known for {len(runs)} runs before one of them is finished"
    line = f"estimated time: about {minutes:,.0f} minutes for {len(runs)} runs, by the time of earlier runs"
    return f"{line} ({', '.join(unknown)}: the mean of the other arms)" if unknown else line


def power_lines(benchmark: Benchmark, results: BenchmarkResults) -> list[str]:
    """The smallest difference that the benchmark's seeds can decide, a line for each claim.

    That is the difference from the limit that they decide in 80% of cases, by simulation over the
    components of variance of the finished seeds (components/evaluation/intervals.py), of `results`.
    """
    seeds = len(benchmark.seeds)
    lines = []
    for finding in check_claims(benchmark.claims, results):
        known = finding.estimate
        difference = known.with_seeds(seeds).detectable() if known and seeds > 1 else math.nan
        text = f"{format_number(difference)} or more from the limit"
        if not math.isfinite(difference):
            unknown = "its variance is not known" if known else finding.reason
            unknown = unknown or "it is a count, which has no variance"
            text = f"not known ({unknown if seeds > 1 else 'one seed decides no difference'})"
        lines.append(f"{finding.claim}: {text}")
    if not lines:
        return []
    head = f"what {seeds} seeds decide in 80% of cases, by the variance of earlier runs (not corrected):"
    return [head, *(f"  {line}" for line in lines)]
