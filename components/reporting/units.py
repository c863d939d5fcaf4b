"""What a run's metrics are means of: clients, prompts or questions, for intervals and spreads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from components.data.records import answered_prompt
from components.reporting.metrics import RunResults, largest, values_of

CLIENTS = "clients"
PROMPTS = "prompts"
QUESTIONS = "questions"


@dataclass(frozen=True)
class Units:
    """A metric's values by stratum (a question set; else only one) and unit.

    The metric is the mean over the strata of their means.
    """

    unit: str  # CLIENTS, PROMPTS or QUESTIONS
    strata: Mapping[str, Mapping[str, float]]

    @property
    def values(self) -> list[float]:
        """Values of all units."""
        return [value for stratum in self.strata.values() for value in stratum.values()]

    @property
    def mean(self) -> float:
        """The metric."""
        return float(np.mean([np.mean(list(stratum.values())) for stratum in self.strata.values()]))

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
    units = [own for own in values_of(runs, name) if own.unit == CLIENTS]
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
    federation, scale = results.federation, results.scale
    after = federation.after.accuracy
    clients = {"after/accuracy/mean": after.clients}
    clients |= {f"after/accuracy/{name}/mean": one.clients for name, one in after.by_metric.items()}
    if federation.best is not None:
        clients["best/accuracy/mean"] = federation.best.accuracy.clients
    clients |= {f"largest/accuracy/{name}/mean": one.clients for name, one in largest(federation).items()}
    measured = [one.accuracy for one in federation.evaluations if one.accuracy.rewards is not None]
    if scale is not None and measured:
        best = max(measured, key=lambda report: scale * (report.reward or 0.0))
        clients["after/reward_margin"] = _scaled(measured[-1].margins, scale)
        clients["after/reward"] = _scaled(measured[-1].rewards, scale)
        clients["largest/reward"] = _scaled(best.rewards, scale)
    if results.evaluation.implicit_reward is not None:
        clients["implicit_reward/mean"] = results.evaluation.implicit_reward.clients
    units = {name: Units(CLIENTS, {"": values}) for name, values in clients.items()}
    lengths: dict[str, list[int]] = {}
    for row in results.answers:
        lengths.setdefault(answered_prompt(row["prompt_id"]), []).append(len(row["aligned"]["text"]))
    means = {prompt: float(np.mean(own)) for prompt, own in lengths.items()}
    units["answers/aligned_characters"] = Units(PROMPTS, {"": means})
    units |= _question_units(questions)
    return {name: own for name, own in units.items() if own.values}


def _scaled(values: Mapping[str, float] | None, scale: float) -> dict[str, float]:
    return {client: scale * value for client, value in (values or {}).items()}


def _question_units(rows: Sequence[Mapping[str, Any]]) -> dict[str, Units]:
    """Units of the accuracy and of the success rate of answered questions, a stratum per set."""
    right: dict[str, dict[str, float]] = {}
    succeeded: dict[str, dict[str, float]] = {}
    for row in rows:
        right.setdefault(row["set"], {})[row["id"]] = float(row["answer"] == row["key"])
        if row["samples"]:
            success = any(sample["answer"] == row["key"] for sample in row["samples"])
            succeeded.setdefault(row["set"], {})[row["id"]] = float(success)
    prefix = "questions/aligned/mean"
    figures = {f"{prefix}/accuracy": right, f"{prefix}/success": succeeded}
    return {name: Units(QUESTIONS, strata) for name, strata in figures.items() if strata}
