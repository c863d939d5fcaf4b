"""What a run's metrics are means of: clients, prompts or questions, for intervals and spreads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from components.data.records import answered_prompt
from components.reporting.metrics import RunResults, named
from components.results import AccuracyReport, FederationResult, RoundEvaluation

CLIENTS = "clients"
PROMPTS = "prompts"
QUESTIONS = "questions"


@dataclass(frozen=True)
class Units:
    """A metric's values by unit.

    Attributes:
        unit: CLIENTS, PROMPTS or QUESTIONS.
        groups: by group (a question set; else only one) and unit. The metric is the mean over the
            groups of their means.
    """

    unit: str
    groups: Mapping[str, Mapping[str, float]]

    @property
    def values(self) -> list[float]:
        """Values of all units."""
        values: list[float] = []
        for group in self.groups.values():
            values += group.values()
        return values

    @property
    def mean(self) -> float:
        """The metric."""
        return float(np.mean([np.mean(list(group.values())) for group in self.groups.values()]))

    @property
    def worst(self) -> float:
        """The smallest value."""
        return min(self.values)

    @property
    def spread(self) -> float:
        """Standard deviation of the values, which are all there are (no sample of them)."""
        return float(np.std(self.values))


UnitsByMetric = Mapping[str, Units]
UnitsByArm = Mapping[str, Mapping[int, UnitsByMetric]]
"""Units by arm, seed and metric."""


def client_range(runs: Mapping[int, UnitsByMetric], name: str) -> tuple[float, float] | None:
    """The worst client and the spread over clients, as means over the seeds.

    None for a metric (or alias) that is no mean over clients.
    """
    units = [own for run in runs.values() if (own := named(run, name)) is not None and own.unit == CLIENTS]
    if not units:
        return None
    return float(np.mean([own.worst for own in units])), float(np.mean([own.spread for own in units]))


def run_units(results: RunResults, questions: Sequence[Mapping[str, Any]]) -> dict[str, Units]:
    """The units of those metrics of a run that are means of stored values.

    Other metrics have one value per seed: accuracies by taste are over pairs, whose verdicts are not
    stored; a worst client, ROUGE and the KL are no means of what is stored either.

    Args:
        results: of the run.
        questions: the aligned policy's answered questions.
    """
    units = _accuracy_units(results.federation)
    if results.scale is not None:
        units |= _reward_units(results.federation.evaluations, results.scale)
    if results.evaluation.implicit_reward is not None:
        units["implicit_reward/mean"] = _by_client(results.evaluation.implicit_reward.clients)
    lengths: dict[str, list[int]] = {}
    for row in results.answers:
        lengths.setdefault(answered_prompt(row["prompt_id"]), []).append(len(row["aligned"]["text"]))
    means = {prompt: float(np.mean(own)) for prompt, own in lengths.items()}
    units["answers/aligned_characters"] = Units(PROMPTS, {"": means})
    units |= _question_units(questions)
    return {name: measured for name, measured in units.items() if measured.values}


def _by_client(values: Mapping[str, float], scale: float = 1.0) -> Units:
    return Units(CLIENTS, {"": {client: scale * value for client, value in values.items()}})


def _accuracy_units(federation: FederationResult) -> dict[str, Units]:
    after = federation.after.accuracy
    units = {"after/accuracy/mean": _by_client(after.clients)}
    for name, summary in after.by_metric.items():
        units[f"after/accuracy/{name}/mean"] = _by_client(summary.clients)
    if federation.best is not None:
        units["best/accuracy/mean"] = _by_client(federation.best.accuracy.clients)
        measured = [evaluation.accuracy.by_metric for evaluation in federation.evaluations[1:]]
        for name in after.by_metric.keys() & {"summed", "per_token"}:
            best = max((by_metric[name] for by_metric in measured), key=lambda summary: summary.mean)
            units[f"largest/accuracy/{name}/mean"] = _by_client(best.clients)
    return units


def _reward_units(evaluations: Sequence[RoundEvaluation], scale: float) -> dict[str, Units]:
    """Units of the metrics of the implicit reward."""
    measured = [one.accuracy for one in evaluations if one.accuracy.rewards is not None]
    if not measured:
        return {}

    def reward(report: AccuracyReport) -> float:
        return scale * (report.reward or 0.0)

    best = max(measured, key=reward)
    last = measured[-1]
    return {
        "after/reward_margin": _by_client(last.margins, scale),
        "after/reward": _by_client(last.rewards or {}, scale),
        "largest/reward": _by_client(best.rewards or {}, scale),
    }


def _question_units(rows: Sequence[Mapping[str, Any]]) -> dict[str, Units]:
    """Units of the accuracy and of the success rate of answered questions, a group per set."""
    right: dict[str, dict[str, float]] = {}
    succeeded: dict[str, dict[str, float]] = {}
    for row in rows:
        right.setdefault(row["set"], {})[row["id"]] = float(row["answer"] == row["key"])
        if row["samples"]:
            success = any(sample["answer"] == row["key"] for sample in row["samples"])
            succeeded.setdefault(row["set"], {})[row["id"]] = float(success)
    prefix = "questions/aligned/mean"
    figures = {f"{prefix}/accuracy": right, f"{prefix}/success": succeeded}
    return {name: Units(QUESTIONS, groups) for name, groups in figures.items() if groups}
