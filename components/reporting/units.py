"""What a run's metrics are means of: clients, prompts or questions, for intervals and spreads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from components.data.records import answered_prompt
from components.reporting.metrics import RunResults, largest, values_of
from components.results import jain_index, worst_tenth

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

    def ranges(self) -> dict[str, float]:
        """How the values differ; their spread is the standard deviation of all there are, of no sample."""
        values = self.values
        figures = {"worst": min(values), "worst_tenth": worst_tenth(values), "spread": float(np.std(values))}
        return figures | {"jain": jain_index(values)}


UnitsByMetric = Mapping[str, Units]


def client_range(runs: Mapping[int, UnitsByMetric], name: str) -> tuple[float, float, float] | None:
    """The worst tenth of the clients, the spread and Jain's index over clients, as means over the seeds.

    Jain's index is NaN of metrics that may be negative, such as margins. None for a metric (or alias) that
    is no mean over clients.
    """
    ranges = [own.ranges() for own in values_of(runs, name) if own.unit == CLIENTS]
    if not ranges:
        return None
    worst, spread, jain = (
        float(np.mean([one[key] for one in ranges])) for key in ("worst_tenth", "spread", "jain")
    )
    return worst, spread, jain


def run_units(results: RunResults, questions: Sequence[Mapping[str, Any]]) -> dict[str, Units]:
    """The units of those metrics of a run that are means of stored values.

    Other metrics have one value per seed: accuracies by taste are over pairs, whose verdicts are not
    stored; a worst client, ROUGE and the KL are no means of what is stored either. The questions are those
    that the aligned policy answered.
    """
    federation, scale = results.federation, results.scale
    after = federation.after.accuracy
    clients = {"after/accuracy/mean": after.clients}
    clients |= {f"after/accuracy/{name}/mean": one.clients for name, one in after.by_metric.items()}
    if federation.best is not None:
        clients["best/accuracy/mean"] = federation.best.accuracy.clients
    clients |= {f"largest/accuracy/{name}/mean": one.clients for name, one in largest(federation).items()}
    measured = [one.accuracy for one in federation.comparable if one.accuracy.rewards is not None]
    if scale is not None and measured:
        best = max(measured, key=lambda report: scale * (report.reward or 0.0))
        last = measured[-1]
        rewards = {"after/reward_margin": last.margins, "after/reward": last.rewards}
        for name, own in (rewards | {"largest/reward": best.rewards}).items():
            clients[name] = {client: scale * value for client, value in (own or {}).items()}
    if results.evaluation.implicit_reward is not None:
        report = results.evaluation.implicit_reward
        clients["implicit_reward/mean"] = report.clients
        clients |= {f"implicit_reward/{name}/mean": one.clients for name, one in report.by_metric.items()}
    units = {name: Units(CLIENTS, {"": values}) for name, values in clients.items()}
    lengths: dict[str, list[int]] = {}
    for row in results.answers:
        lengths.setdefault(answered_prompt(row["prompt_id"]), []).append(len(row["aligned"]["text"]))
    means = {prompt: float(np.mean(own)) for prompt, own in lengths.items()}
    units["answers/aligned_characters"] = Units(PROMPTS, {"": means})
    right: dict[str, dict[str, float]] = {}  # by question set
    succeeded: dict[str, dict[str, float]] = {}
    for row in questions:
        right.setdefault(row["set"], {})[row["id"]] = float(row["answer"] == row["key"])
        if row["samples"]:
            success = any(sample["answer"] == row["key"] for sample in row["samples"])
            succeeded.setdefault(row["set"], {})[row["id"]] = float(success)
    prefix = "questions/aligned/mean"
    figures = {f"{prefix}/accuracy": right, f"{prefix}/success": succeeded}
    units |= {name: Units(QUESTIONS, strata) for name, strata in figures.items() if strata}
    return {name: own for name, own in units.items() if own.values}
