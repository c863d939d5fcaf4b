"""Several objectives (FIRM figures 1 to 6): rewards, the clients' weights, their disagreement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from components.evaluation.charts import Point, curve_charts, line_chart
from components.evaluation.diagnostics.diagnostic import DiagnosedRun, Diagnostic, FrontPoint, Summary
from components.federation.multi_objective import RESERVED_NAMES, REWARDS_MEASURE, weight_series
from components.results import FederationResult, Metrics

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

DRIFT_LABELS = {
    "lambda_drift": "distance of clients' weights",
    "mean_lambda_drift": "distance of their rounds' means",
    "update_drift": "distance of clients' updates",
}
WeightCurves = dict[str, list[tuple[str, float, float]]]
"""Points (client, rounds done, lambda) of each local step, a fraction of its round, by objective."""
ObjectivesData = tuple[list[Point], WeightCurves]
"""Data of the charts: rewards, KL and disagreement by round; lambda of each local step."""


class ObjectivesDiagnostic(Diagnostic):
    """Rewards of the server's policy, lambda of each local step, and the clients' disagreement."""

    def summarize(self, result: FederationResult, run: DiagnosedRun) -> Summary:
        """Rewards after the rounds, mean disagreement, and the run's point in a front."""
        base, scores = (_scores(one.measures[REWARDS_MEASURE]) for one in (result.before, result.after))
        figures = {"mean_reward": float(np.mean(list(scores.values())))}
        for key in DRIFT_LABELS:
            figures[key] = float(np.mean([record.server.scalars[key] for record in result.round_ends()]))
        data: ObjectivesData = (rewards_curve(result), weight_curves(result))
        return Summary(figures, data, FrontPoint(scores, base, dict(run.preferences)))

    def run_charts(self, result: FederationResult, run: DiagnosedRun) -> list[Figure]:
        """Rewards and disagreement over the rounds, and the clients' weights."""
        return self.benchmark_charts({run.name: {run.seed: self.summarize(result, run)}})

    def benchmark_charts(self, summaries: Mapping[str, Mapping[int, Summary]]) -> list[Figure]:
        """Rewards and disagreement of all arms, and lambda of every local step with the first seed."""
        seed = min(set[int]().union(*summaries.values()))
        curves: dict[str, dict[int, list[Point]]] = {}
        titles: dict[str, str] = {}
        weights: list[Figure] = []
        for arm, runs in summaries.items():
            for number, summary in runs.items():
                curve, own = summary.data
                curves.setdefault(arm, {})[number] = curve
                for point in curve:
                    titles |= {key: key[0].upper() + key[1:] for key in point if key != "round"}
                for objective, points in (own if number == seed else {}).items():
                    title = f"{arm}, seed {seed}: weight of {objective}"
                    weights.append(line_chart(title, "rounds done", "lambda", points, y_range=(-0.03, 1.03)))
        return curve_charts(curves, titles) + weights


def _scores(measured: Metrics) -> dict[str, float]:
    """Mean score by objective."""
    return {name: value for name, value in measured.scalars.items() if name not in RESERVED_NAMES}


def rewards_curve(result: FederationResult) -> list[Point]:
    """Rewards and KL if they were measured, and the clients' disagreement, by the rounds done."""
    points: dict[int, dict[str, float]] = {}
    for evaluation in result.evaluations:
        measured = evaluation.measures[REWARDS_MEASURE]
        rewards = {f"reward, {name}": score for name, score in _scores(measured).items()}
        points[evaluation.rounds_done] = rewards | {"KL (nats)": measured.scalars["kl"]}
    for record in result.round_ends():
        point = points.setdefault(record.rounds_done, {})
        for key in ("lambda_drift", "update_drift"):
            point[DRIFT_LABELS[key]] = record.server.scalars[key]
    return [{"round": rounds, **points[rounds]} for rounds in sorted(points)]


def weight_curves(result: FederationResult) -> WeightCurves:
    """lambda of each client in each local step."""
    curves: WeightCurves = {}
    prefix = weight_series("")
    for record in result.round_ends():
        for client, update in record.clients.items():
            for series, values in update.metrics.series.items():
                if series.startswith(prefix):
                    start = record.rounds_done - 1
                    curves.setdefault(series.removeprefix(prefix), []).extend(
                        (client, start + (n + 1) / len(values), value) for n, value in enumerate(values)
                    )
    return curves
