"""The results of a campaign: a JSON line for each finished run, and for the contests of a seed.

Those of docs/results/data/<family>.jsonl are published: tables and claims are functions of them.
"""

from __future__ import annotations

import importlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config import UserError
from components.config.benchmark import Benchmark
from components.io import write_atomically
from components.results import finite_or_none
from perf.campaign.plan import runs_of

if TYPE_CHECKING:
    from components.evaluation.contests import Contest
    from components.reporting.benchmark_results import BenchmarkResults

RUN = "run"
CONTESTS = "contests"
"""Kinds of lines: a run, and the contests between the arms of a seed."""
PUBLISHED = Path("docs", "results", "data")
"""Folder of the published lines in a checkout."""

RESAMPLES = 10_000
"""Of the bootstrap of the claims of collected lines."""

Line = dict[str, Any]


class CampaignError(UserError):
    """A campaign that cannot be run or collected."""


def read_lines(path: Path) -> list[Line]:
    """The lines of a file; none if there is no file.

    Raises:
        CampaignError: a line is not JSON.
    """
    rows: list[Line] = []
    if not path.is_file():
        return rows
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(json.loads(text))
        except ValueError:
            raise CampaignError(
                f"{path}, line {number} is not JSON: restore the file from git, or delete the line"
            ) from None
    return rows


def publish(checkout: Path, family: str, lines: Iterable[Line]) -> int:
    """Append the lines of a family that its file in a checkout does not have; gives their number.

    A line is there if there is one of the same kind, arm, seed and commits.
    """
    path = checkout / PUBLISHED / f"{family}.jsonl"
    known = {_identity(line) for line in read_lines(path)}
    new = [line for line in lines if _identity(line) not in known]
    if new:
        texts = [json.dumps(finite_or_none(line), sort_keys=True) for line in new]
        earlier = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        write_atomically(path, "".join(f"{text}\n" for text in [*earlier, *texts]).encode())
    return len(new)


def _identity(line: Line) -> tuple[str, str, int, tuple[str, ...]]:
    return line["kind"], line["arm"], line["seed"], tuple(sorted(line["commits"]))


def is_complete(lines: Sequence[Line], benchmark: Benchmark, seed: int) -> bool:
    """Whether lines have all runs of a seed, and its contests."""
    wanted = {(RUN, arm) for arm in benchmark.arms}
    if benchmark.contests:
        wanted.add((CONTESTS, ""))
    return wanted <= {(line["kind"], line["arm"]) for line in lines if line["seed"] == seed}


def read_results(lines: Iterable[Line], benchmark: Benchmark) -> BenchmarkResults:
    """The results of a family's finished runs and contests, of which its claims and tables are functions.

    A line has the combined verdict of both orders of a pair, so that what depends on the single orders
    (the position consistency) is not among them.

    Args:
        lines: of the family; of several lines of a run or contest the last one counts.
        benchmark: of the family.
    """
    from components.evaluation.diagnostics.diagnostic import FrontPoint
    from components.reporting.benchmark_results import BenchmarkResults
    from components.reporting.fronts import complete_fronts
    from components.reporting.units import Units

    results = BenchmarkResults(benchmark.seeds, RESAMPLES)
    points: dict[int, dict[str, FrontPoint]] = {}
    arms = {*benchmark.arms, ""}  # contests between arms are of no arm
    lines = [line for line in lines if line["seed"] in benchmark.seeds and line["arm"] in arms]
    for line in sorted(lines, key=lambda line: benchmark.seeds.index(line["seed"])):
        arm, seed = line["arm"], line["seed"]
        for name, contest in line["contests"].items():
            results.contests.setdefault(name, {})[seed] = _read_contest(contest)
        if line["kind"] == RUN:
            results.metrics.setdefault(arm, {})[seed] = _numbers(line["metrics"])
            results.units.setdefault(arm, {})[seed] = {
                name: Units(units["unit"], units["groups"]) for name, units in line["units"].items()
            }
            results.base[seed] = _numbers(line["base"])
            results.judges[seed] = _numbers(line["judge"])
            results.commits[f"{arm}-seed-{seed}"] = line["commits"]
            if "front" in line:
                points.setdefault(seed, {})[arm] = FrontPoint(**line["front"])
    for seed, by_arm in points.items():
        results.add_fronts(seed, complete_fronts(benchmark.fronts, by_arm))
    return results


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    """The numbers of a line, in which null is one that is not finite."""
    return {name: math.nan if value is None else value for name, value in values.items()}


def _read_contest(line: Line) -> Contest:
    """A contest with the combined verdict of each pair as the verdict of both orders."""
    from components.evaluation.contests import Contest
    from components.evaluation.winrate import Verdict

    verdicts = [Verdict(verdict) for verdict in line["verdicts"]]
    return Contest(
        prompts=line["prompts"],
        original=verdicts,
        swapped=[verdict.swapped() for verdict in verdicts],
        equal=[False] * len(verdicts),
        ours=line["ours"],
        theirs=line["theirs"],
    )


def own_lines(folder: Path, benchmark: Benchmark, measure: str = "") -> Iterator[Line]:
    """The lines of the finished runs and contests in a benchmark's folder.

    Args:
        folder: of the benchmark.
        benchmark: what is in it.
        measure: see Family.
    """
    from components.evaluation.contests import Contest
    from tasks.benchmark_folder import arm_run, contest_path

    commits: dict[int, set[str]] = defaultdict(set)
    for arm, seed in runs_of(benchmark):
        if arm_run(folder, arm, seed).is_done("report"):
            line = _run_line(folder, benchmark, arm, seed, measure)
            commits[seed].update(line["commits"])
            yield line
    for seed in benchmark.seeds:
        paths = {
            f"{ours} against {theirs}": contest_path(folder, ours, theirs, seed)
            for ours, theirs in benchmark.contests
        }
        if paths and all(path.is_file() for path in paths.values()):
            contests = {name: _contest_line(Contest.read(path)) for name, path in paths.items()}
            head = {"kind": CONTESTS, "arm": "", "seed": seed, "commits": sorted(commits[seed])}
            yield head | {"contests": contests}


def _run_line(folder: Path, benchmark: Benchmark, arm: str, seed: int, measure: str) -> Line:
    """The figures of a finished run, what they are means of, and its verdicts by answer."""
    from tasks.benchmark_folder import arm_run
    from tasks.benchmark_report import read_results

    settings = benchmark.arms[arm]
    changes = {"arms": {arm: settings}, "seeds": [seed], "contests": [], "fronts": {}}
    results = read_results(folder, benchmark.model_copy(update=changes))
    run = arm_run(folder, arm, seed)
    units = results.units[arm][seed]
    line: Line = {
        "kind": RUN,
        "arm": arm,
        "seed": seed,
        "commits": results.commits[f"{arm}-seed-{seed}"],
        "settings": [*benchmark.settings, *settings],
        "seconds": round(sum(run.metadata()["seconds"].values())),
        "metrics": results.metrics[arm][seed],
        "units": {name: {"unit": each.unit, "groups": each.strata} for name, each in units.items()},
        "base": results.base[seed],
        "judge": results.judges[seed],
        "contests": {name: _contest_line(by_seed[seed]) for name, by_seed in results.contests.items()},
    }
    fronts = [summaries[arm][seed].front for summaries in results.diagnostics.values()]
    if front := next(filter(None, fronts), None):
        line["front"] = asdict(front)
    if measure:
        module, _, name = measure.partition(":")
        line["measured"] = getattr(importlib.import_module(module), name)(run.folder)
    return line


def _contest_line(contest: Contest) -> Line:
    """A contest with the counts of its verdicts."""
    line = contest.combined()
    return line | {"counts": Counter(line["verdicts"])}
