"""Several objectives (FIRM figures 1 to 6): rewards, the clients' weights, their disagreement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from components.charts import Point, curve_charts, line_chart
from components.evaluation.diagnostics.base import (
    DiagnosedRun,
    Diagnostic,
    FrontPoint,
    Summary,
)
from components.federation.multi_objective import RESERVED_NAMES, REWARDS_MEASURE, weight_series
from components.results import FederationResult, Metrics, RoundEvaluation

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

DRIFT_LABELS = {
    "lambda_drift": "distance of clients' weights",
    "mean_lambda_drift": "distance of their rounds' means",
    "update_drift": "distance of clients' updates",
}
WeightCurves = dict[str, list[tuple[str, float, float]]]
"""Points (client, rounds done, lambda) of each local step, by objective.

Local steps are fractions of their round."""


@dataclass(frozen=True)
class ObjectivesData:
    """Data of the charts.

    Attributes:
        curve: rewards, KL and disagreement by round.
        weights: lambda of each local step.
    """

    curve: list[Point]
    weights: WeightCurves


class ObjectivesDiagnostic(Diagnostic):
    """Rewards of the server's policy, lambda of each local step, and the clients' disagreement."""

    def summarize(self, result: FederationResult, run: DiagnosedRun) -> Summary:
        """Rewards after the rounds, mean disagreement, and the run's point in a front."""
        measured = rewards_of(result.after)
        scores = objective_scores(measured)
        figures = {"mean_reward": float(np.mean(list(scores.values())))}
        for key in DRIFT_LABELS:
            values = [record.server.scalars[key] for record in result.round_ends()]
            figures[key] = float(np.mean(values))
        base = objective_scores(rewards_of(result.before))
        front = FrontPoint(scores, base, dict(run.preferences))
        return Summary(figures, ObjectivesData(rewards_curve(result), weight_curves(result)), front)

    def run_charts(self, result: FederationResult, run: DiagnosedRun) -> list[Figure]:
        """Rewards and disagreement over the rounds, and the clients' weights."""
        return self.benchmark_charts({run.name: {run.seed: self.summarize(result, run)}})

    def benchmark_charts(self, summaries: Mapping[str, Mapping[int, Summary]]) -> list[Figure]:
        """Rewards and disagreement of all arms, and the weights of the first seed."""
        data: dict[str, dict[int, ObjectivesData]] = {
            arm: {seed: summary.data for seed, summary in runs.items()} for arm, runs in summaries.items()
        }
        curves = {arm: {seed: one.curve for seed, one in runs.items()} for arm, runs in data.items()}
        keys: dict[str, str] = {}
        for runs in curves.values():
            for curve in runs.values():
                for point in curve:
                    keys |= {key: key[0].upper() + key[1:] for key in point if key != "round"}
        seed = min(set[int]().union(*data.values()))
        weights = {arm: runs[seed].weights for arm, runs in data.items() if seed in runs}
        return curve_charts(curves, keys) + weight_charts(weights, seed)


def rewards_of(evaluation: RoundEvaluation) -> Metrics:
    """The rewards that were measured between two rounds."""
    return evaluation.measures[REWARDS_MEASURE]


def objective_scores(measured: Metrics) -> dict[str, float]:
    """Mean score by objective."""
    return {name: value for name, value in measured.scalars.items() if name not in RESERVED_NAMES}


def rewards_curve(result: FederationResult) -> list[Point]:
    """Rewards and KL if they were measured, and the clients' disagreement, by the rounds done."""
    points: dict[int, dict[str, float]] = {}
    for evaluation in result.evaluations:
        point = points.setdefault(evaluation.rounds_done, {})
        measured = rewards_of(evaluation)
        point |= {f"reward, {name}": score for name, score in objective_scores(measured).items()}
        point["KL (nats)"] = measured.scalars["kl"]
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


def weight_charts(weights: Mapping[str, WeightCurves], seed: int) -> list[Figure]:
    """lambda of every client in every local step, a chart per arm and objective.

    Args:
        weights: by arm.
        seed: that they are of.
    """
    return [
        line_chart(
            f"{arm}, seed {seed}: weight of {objective}",
            "rounds done",
            "lambda",
            points,
            y_range=(-0.03, 1.03),
        )
        for arm, curves in weights.items()
        for objective, points in curves.items()
    ]
