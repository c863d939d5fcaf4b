"""What a run's figures are means of: clients, prompts or questions, for intervals and spreads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from components.data.records import answered_prompt
from components.results import AccuracyReport, EvaluationResult, FederationResult, RoundEvaluation

CLIENTS = "clients"
PROMPTS = "prompts"
QUESTIONS = "questions"


@dataclass(frozen=True)
class Units:
    """A figure's values by unit.

    Attributes:
        unit: CLIENTS, PROMPTS or QUESTIONS.
        groups: by group (a question set; else only one) and unit. The figure is the mean over the
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
        """The figure."""
        return float(np.mean([np.mean(list(group.values())) for group in self.groups.values()]))

    @property
    def worst(self) -> float:
        """The smallest value."""
        return min(self.values)

    @property
    def spread(self) -> float:
        """Standard deviation of the values, which are all there are (no sample of them)."""
        return float(np.std(self.values))


UnitsByFigure = Mapping[str, Units]
UnitsByArm = Mapping[str, Mapping[int, UnitsByFigure]]
"""Units by arm, seed and figure."""


def client_range(runs: Mapping[int, UnitsByFigure], figure: str) -> tuple[float, float] | None:
    """The worst client and the spread over clients, as means over the seeds.

    None for a figure that is no mean over clients.
    """
    clients = [run[figure] for run in runs.values() if figure in run and run[figure].unit == CLIENTS]
    if not clients:
        return None
    return float(np.mean([units.worst for units in clients])), float(
        np.mean([units.spread for units in clients])
    )


def run_units(
    federation: FederationResult,
    evaluation: EvaluationResult,
    answers: Mapping[str, str],
    questions: Sequence[Mapping[str, Any]],
    scale: float | None,
) -> dict[str, Units]:
    """The units of those figures of run_figures that are means of stored values.

    Other figures have one value per seed: accuracies by taste are over pairs, whose verdicts are not
    stored; a worst client, ROUGE and the KL are no means of what is stored either.

    Args:
        federation, evaluation: results of the phases.
        answers: of the aligned policy, by id of the answer.
        questions: the aligned policy's answered questions.
        scale: of the implicit reward, as of reward_curve; None where selectors were trained.
    """
    units = _accuracy_units(federation)
    if scale is not None:
        units |= _reward_units(federation.evaluations, scale)
    if evaluation.implicit_reward is not None:
        units["implicit_reward"] = _by_client(evaluation.implicit_reward.clients)
    if answers:
        lengths: dict[str, list[int]] = {}
        for answer, text in answers.items():
            lengths.setdefault(answered_prompt(answer), []).append(len(text))
        means = {prompt: float(np.mean(own)) for prompt, own in lengths.items()}
        units["characters"] = Units(PROMPTS, {"": means})
    units |= _question_units(questions)
    return {name: measured for name, measured in units.items() if measured.values}


def _by_client(values: Mapping[str, float], scale: float = 1.0) -> Units:
    return Units(CLIENTS, {"": {client: scale * value for client, value in values.items()}})


def _accuracy_units(federation: FederationResult) -> dict[str, Units]:
    after = federation.after.accuracy
    units = {name: _by_client(summary.clients) for name, summary in after.by_metric.items()}
    if federation.best is not None:
        units["best_accuracy"] = _by_client(federation.best.accuracy.clients)
        measured = [evaluation.accuracy.by_metric for evaluation in federation.evaluations[1:]]
        for name in after.by_metric.keys() & {"summed", "per_token"}:
            best = max((by_metric[name] for by_metric in measured), key=lambda summary: summary.mean)
            units[f"{name}_best"] = _by_client(best.clients)
    return units


def _reward_units(evaluations: Sequence[RoundEvaluation], scale: float) -> dict[str, Units]:
    """Units of the figures of the implicit reward."""
    measured = [one.accuracy for one in evaluations if one.accuracy.rewards is not None]
    if not measured:
        return {}

    def reward(report: AccuracyReport) -> float:
        return scale * (report.reward or 0.0)

    best = max(measured, key=reward)
    last = measured[-1]
    return {
        "accuracy": _by_client(evaluations[-1].accuracy.clients),
        "margin": _by_client(last.margins, scale),
        "reward": _by_client(last.rewards or {}, scale),
        "best_reward": _by_client(best.rewards or {}, scale),
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
    figures = {"answer_accuracy": right, "success": succeeded}
    return {name: Units(QUESTIONS, groups) for name, groups in figures.items() if groups}
