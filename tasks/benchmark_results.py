"""What a benchmark's report reads from its finished runs and contests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.config import Recipe, implicit_reward_scale
from components.config.benchmark import BASE_POLICY, REFERENCES, Benchmark
from components.data.records import known_groups
from components.evaluation.contests import Contest
from components.evaluation.diagnostics import load_diagnostics
from components.evaluation.diagnostics.base import DiagnosedRun, Summary
from components.evaluation.plotting import Point
from components.federation.protocol import method_of
from components.io import read_json
from components.reporting.figures import answer_figures, reward_curve, run_figures
from components.reporting.fronts import Front, front_figures, worst_rewards
from components.reporting.units import Units, run_units
from components.results import CurvePoint, EvaluationResult, FederationResult
from tasks.benchmark_folder import arm_run, contest_path
from tasks.runs import Run, contest_file

OWN_CONTESTS = {
    "aligned_vs_base": f"{{arm}} against {BASE_POLICY}",
    "aligned_vs_human": f"{{arm}} against {REFERENCES}",
    "base_vs_human": f"{BASE_POLICY} against {REFERENCES}",
}
"""Names of a run's own contests in a benchmark."""


@dataclass
class BenchmarkResults:
    """The finished runs, by arm (or name of a contest or front) and seed.

    Attributes:
        figures: numbers by name; fronts have some too.
        units: what figures are means of.
        resamples: of the bootstrap intervals; the most of any run.
        base: the base policy's figures, by seed.
        contests: verdicts.
        judges: figures of the judges, by seed.
        rewards: implicit rewards by round.
        hacking: reward-hacking curves.
        diagnostics: summaries of the methods' diagnostics, by name of the diagnostic first.
        commits: commits of each run.
        fronts: policies in the space of the objectives.
    """

    figures: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    units: dict[str, dict[int, dict[str, Units]]] = field(default_factory=dict)
    resamples: int = 0
    base: dict[int, dict[str, float]] = field(default_factory=dict)
    contests: dict[str, dict[int, Contest]] = field(default_factory=dict)
    judges: dict[int, dict[str, float]] = field(default_factory=dict)
    rewards: dict[str, dict[int, list[Point]]] = field(default_factory=dict)
    hacking: dict[str, dict[int, list[CurvePoint]]] = field(default_factory=dict)
    diagnostics: dict[str, dict[str, dict[int, Summary]]] = field(default_factory=dict)
    commits: dict[str, list[str]] = field(default_factory=dict)
    fronts: dict[str, dict[int, Front]] = field(default_factory=dict)


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
    for ours, theirs in benchmark.contests:
        for seed in benchmark.seeds:
            path = contest_path(folder, ours, theirs, seed)
            if path.is_file():
                results.contests.setdefault(f"{ours} against {theirs}", {})[seed] = Contest.read(path)
    return results


def _add_run(results: BenchmarkResults, run: Run, arm: str, seed: int) -> None:
    recipe = run.recipe()
    federation = run.federation_result()
    evaluation = run.evaluation_result()
    answers = read_json(run.evaluation / "answers.json")
    texts = {name: [row[name]["text"] for row in answers] for name in ("aligned", "base")}
    scale = implicit_reward_scale(method_of(recipe.federation).local_objective)
    curve = reward_curve(federation, scale) if scale is not None else []
    if curve:
        results.rewards.setdefault(arm, {})[seed] = curve
    if evaluation.curve:
        results.hacking.setdefault(arm, {})[seed] = evaluation.curve
    figures = run_figures(federation, run.alignment_result(), evaluation, texts["aligned"], curve)
    figures |= _add_diagnostics(results, run, recipe, federation, arm)
    results.figures.setdefault(arm, {})[seed] = figures
    results.units.setdefault(arm, {})[seed] = _read_units(run, federation, evaluation, answers, scale)
    results.resamples = max(results.resamples, recipe.evaluation.bootstrap)
    base = answer_figures(evaluation, "base", texts["base"])
    results.base.setdefault(seed, {name: value for name, value in base.items() if value is not None})
    results.judges.setdefault(seed, evaluation.judge_figures)
    results.commits[f"{arm}-seed-{seed}"] = run.metadata().get("commits", [])
    for key in evaluation.contests:
        contest = Contest.read(contest_file(run.evaluation, key))
        results.contests.setdefault(OWN_CONTESTS[key].format(arm=arm), {})[seed] = contest


def _read_units(
    run: Run,
    federation: FederationResult,
    evaluation: EvaluationResult,
    answers: Sequence[Mapping[str, Any]],
    scale: float | None,
) -> dict[str, Units]:
    """The units of a run's figures."""
    questions: list[Mapping[str, Any]] = []
    if "aligned" in evaluation.questions:
        for name in evaluation.questions["aligned"].sets:
            questions += read_json(run.evaluation / "questions" / f"aligned-{name}.json")
    texts = {row["prompt_id"]: row["aligned"]["text"] for row in answers}
    return run_units(federation, evaluation, texts, questions, scale)


def _add_diagnostics(
    results: BenchmarkResults, run: Run, recipe: Recipe, federation: FederationResult, arm: str
) -> dict[str, float]:
    """Summarize a run by the diagnostics of its method; gives their figures."""
    figures: dict[str, float] = {}
    diagnosed = DiagnosedRun(
        arm, recipe.seed, known_groups(run.prepared), method_of(recipe.federation).preferences()
    )
    for name, diagnostic in zip(
        federation.diagnostics, load_diagnostics(federation.diagnostics), strict=True
    ):
        summary = diagnostic.summarize(federation, diagnosed)
        results.diagnostics.setdefault(name, {}).setdefault(arm, {})[recipe.seed] = summary
        figures |= summary.figures
    return figures


def _add_fronts(results: BenchmarkResults, benchmark: Benchmark, seed: int) -> None:
    """The figures of each front of a seed whose arms are all done."""
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
        results.figures.setdefault(name, {})[seed] = front_figures(front, worst_rewards(fronts))
        results.fronts.setdefault(name, {})[seed] = front
