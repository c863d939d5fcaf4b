"""Several objectives (FIRM figures 1 to 6): rewards, the clients' weights, their disagreement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from components.evaluation.diagnostics.base import (
    DiagnosedRun,
    Diagnostic,
    DiagnosticSink,
    FrontPoint,
    Summary,
)
from components.evaluation.plotting import Image, Point, integer_ticks, label, plot_bands, save_figure
from components.federation.multi_objective import RESERVED_NAMES, REWARDS_MEASURE, weight_series
from components.results import FederationResult, Metrics, RoundEvaluation

DRIFT_LABELS = {
    "lambda_drift": "distance of clients' weights",
    "mean_lambda_drift": "distance of their rounds' means",
    "update_drift": "distance of clients' updates",
}
REWARD_PREFIX = "reward:"
"""Prefix of the figure of a single objective."""

WeightCurves = dict[str, dict[str, list[tuple[float, float]]]]
"""Points (rounds done, lambda) of each local step, by objective and client.

Local steps are fractions of their round."""


@dataclass(frozen=True)
class ObjectivesData:
    """Data of the plots.

    Attributes:
        curve: rewards, KL and disagreement by round.
        weights: lambda of each local step.
    """

    curve: list[Point]
    weights: WeightCurves


class ObjectivesDiagnostic(Diagnostic):
    """Rewards of the server's policy, lambda of each local step, and the clients' disagreement."""

    figure_labels: ClassVar[dict[str, str]] = {
        "mean_reward": "mean reward",
        "sampled_kl": "KL of sampled answers (nats)",
        **DRIFT_LABELS,
    }

    def log_result(self, result: FederationResult, run: DiagnosedRun, sink: DiagnosticSink) -> None:
        """Log the plots of a run."""
        curves = {run.name: {run.seed: rewards_curve(result)}}
        weights = {run.name: weight_curves(result)}
        sink.log_plot(lambda path: plot_objectives(curves, path), "federation/objectives.png")
        sink.log_plot(lambda path: plot_weights(weights, path), "federation/weights.png")

    def summarize(self, result: FederationResult, run: DiagnosedRun) -> Summary:
        """Rewards after the rounds, mean disagreement, and the run's point in a front."""
        measured = rewards_of(result.after)
        scores = objective_scores(measured)
        figures = {f"{REWARD_PREFIX}{name}": score for name, score in scores.items()}
        figures["mean_reward"] = float(np.mean(list(scores.values())))
        figures["sampled_kl"] = measured.scalars["kl"]
        for key in DRIFT_LABELS:
            values = [record.server.scalars[key] for record in result.round_ends()]
            figures[key] = float(np.mean(values))
        base = objective_scores(rewards_of(result.before))
        front = FrontPoint(scores, base, dict(run.preferences))
        return Summary(figures, ObjectivesData(rewards_curve(result), weight_curves(result)), front)

    def plot_benchmark(self, summaries: Mapping[str, Mapping[int, Summary]], folder: Path) -> list[Image]:
        """Rewards and disagreement of all arms, and the weights of the first seed."""
        data: dict[str, dict[int, ObjectivesData]] = {
            arm: {seed: summary.data for seed, summary in runs.items()} for arm, runs in summaries.items()
        }
        curves = {arm: {seed: one.curve for seed, one in runs.items()} for arm, runs in data.items()}
        seed = min(set[int]().union(*data.values()))
        weights = {arm: runs[seed].weights for arm, runs in data.items() if seed in runs}
        plot_objectives(curves, folder / "objectives.png")
        plot_weights(weights, folder / "weights.png")
        return [
            Image(
                "Rewards and disagreement over the rounds",
                folder / "objectives.png",
                "Rewards of sampled answers to held-out prompts. Mean over seeds, in a band from the"
                " smallest to the largest.",
            ),
            Image(
                f"Weights of the objectives, seed {seed}",
                folder / "weights.png",
                "A line is a client, a point a local step.",
            ),
        ]


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
                    points = [(start + (n + 1) / len(values), value) for n, value in enumerate(values)]
                    objective = series.removeprefix(prefix)
                    curves.setdefault(objective, {}).setdefault(client, []).extend(points)
    return curves


def plot_objectives(curves: Mapping[str, Mapping[int, Sequence[Point]]], path: Path) -> None:
    """Rewards, KL, and disagreement over the rounds, a panel for each number.

    Args:
        curves: by arm and seed, see rewards_curve.
        path: PNG to write.
    """
    keys: dict[str, None] = {}
    for runs in curves.values():
        for curve in runs.values():
            for point in curve:
                keys |= dict.fromkeys(key for key in point if key != "round")
    size = (1.4 + 4 * len(keys), 4.2)
    with save_figure(path, nrows=1, ncols=len(keys), figsize=size, squeeze=False) as (figure, panels):
        for axes, key in zip(panels[0], keys, strict=True):
            plot_bands(axes, curves, key)
            axes.set(xlabel="rounds done", title=label(key))
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, fontsize=8, loc="outside right upper")


def plot_weights(weights: Mapping[str, WeightCurves], path: Path) -> None:
    """lambda of every client in every local step, a row per arm and a column per objective.

    Args:
        weights: by arm, of one seed.
        path: PNG to write.
    """
    names: dict[str, None] = {}
    for curves in weights.values():
        names |= dict.fromkeys(curves)
    objectives = list(names)
    with save_figure(
        path,
        nrows=len(weights),
        ncols=len(objectives),
        figsize=(4.2 * len(objectives), 0.6 + 2.2 * len(weights)),
        sharex=True,
        sharey=True,
        squeeze=False,
    ) as (_, panels):
        for row, (arm, curves) in zip(panels, weights.items(), strict=True):
            for axes, objective in zip(row, objectives, strict=True):
                for points in curves.get(objective, {}).values():
                    rounds = [done for done, _ in points]
                    axes.plot(rounds, [value for _, value in points], marker="o", markersize=2, linewidth=1)
                axes.set(title=label(f"{arm}: {objective}"), ylim=(-0.03, 1.03))
                integer_ticks(axes)
            row[0].set_ylabel("lambda")
        for axes in panels[-1]:
            axes.set_xlabel("rounds done")
