"""The results of a campaign: a JSON line for each finished or failed run, a file for each family."""

from __future__ import annotations

import importlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config import UserError
from components.config.benchmark import Benchmark
from components.io import write_atomically
from components.results import finite_or_none

if TYPE_CHECKING:
    from components.evaluation.contests import Contest
    from components.reporting.benchmark_results import BenchmarkResults

FINISHED = "finished"
FAILED = "failed"
RUN = "run"
CONTESTS = "contests"
"""Kinds of lines: a run, and the contests between the arms of a seed."""
PUBLISHED = Path("docs", "results", "data")
"""Folder of the collected lines in a checkout."""

RESAMPLES = 10_000
"""Of the bootstrap of the claims of collected lines."""

Line = dict[str, Any]


class CampaignError(UserError):
    """A campaign that cannot be run, paused or collected."""


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


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line; after a crash the file has it whole or not at all."""
    text = json.dumps(finite_or_none(line), sort_keys=True, default=str)
    earlier = path.read_bytes() if path.is_file() else b""
    write_atomically(path, earlier + text.encode() + b"\n")


def collect(source: Path, checkout: Path) -> dict[str, int]:
    """Copy the lines of finished runs and contests into docs/results/data/ of a checkout.

    Lines that are there already are not copied again.

    Args:
        source: folder of the campaign's lines.
        checkout: of the project.

    Returns:
        number of new lines by family.

    Raises:
        CampaignError: it is no checkout of the project.
    """
    if not (checkout / "pyproject.toml").is_file() or not (checkout / "docs" / "results").is_dir():
        raise CampaignError(
            f"{checkout} is no checkout of the project: name the folder that has pyproject.toml"
        )
    counts = {}
    for path in sorted(source.glob("*.jsonl")):
        target = checkout / PUBLISHED / path.name
        known = set(target.read_text(encoding="utf-8").splitlines()) if target.is_file() else set()
        new = [
            text
            for text in path.read_text(encoding="utf-8").splitlines()
            if text not in known and json.loads(text)["status"] == FINISHED
        ]
        if new:
            earlier = target.read_bytes() if target.is_file() else b""
            write_atomically(target, earlier + "".join(f"{text}\n" for text in new).encode())
        counts[path.stem] = len(new)
    return counts


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
    lines = [
        line
        for line in lines
        if line["status"] == FINISHED and line["seed"] in benchmark.seeds and line["arm"] in arms
    ]
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


def run_results(folder: Path, benchmark: Benchmark, arm: str, seed: int, measure: str = "") -> Line:
    """The figures of a finished run, what they are means of, and its verdicts by answer.

    Args:
        folder: of the family, which holds its runs.
        benchmark: of the family.
        arm, seed: of the run.
        measure: see Family.
    """
    from tasks.benchmark_folder import arm_run
    from tasks.benchmark_report import read_results

    alone = benchmark.model_copy(
        update={
            "arms": {arm: benchmark.arms[arm]},
            "seeds": [seed],
            "contests": [],
            "fronts": {},
        }
    )
    results = read_results(folder, alone)
    run = arm_run(folder, arm, seed)
    line: Line = {
        "commits": results.commits[f"{arm}-seed-{seed}"],
        "metrics": results.metrics[arm][seed],
        "units": {
            name: {"unit": units.unit, "groups": units.strata}
            for name, units in results.units[arm][seed].items()
        },
        "base": results.base[seed],
        "judge": results.judges[seed],
        "contests": {name: _contest_line(by_seed[seed]) for name, by_seed in results.contests.items()},
    }
    fronts = [asdict(point) for point in _front_points(results.diagnostics, arm, seed)]
    if fronts:
        line["front"] = fronts[0]
    if measure:
        module, _, name = measure.partition(":")
        line["measured"] = getattr(importlib.import_module(module), name)(run.folder)
    return line


def _front_points(diagnostics: Mapping[str, Any], arm: str, seed: int) -> Iterator[Any]:
    for summaries in diagnostics.values():
        point = summaries[arm][seed].front
        if point is not None:
            yield point


def contest_results(folder: Path, benchmark: Benchmark, seed: int) -> Line:
    """The verdicts of the contests between the arms of a seed."""
    from components.evaluation.contests import Contest
    from tasks.benchmark_folder import contest_path

    return {
        "contests": {
            f"{ours} against {theirs}": _contest_line(Contest.read(contest_path(folder, ours, theirs, seed)))
            for ours, theirs in benchmark.contests
        }
    }


def _contest_line(contest: Contest) -> Line:
    """A contest with the counts of its verdicts."""
    line = contest.combined()
    return line | {"counts": Counter(line["verdicts"])}
