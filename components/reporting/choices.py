"""The choices of a benchmark's file: of arms that differ in a setting, the one with the best figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from components.config.benchmark import Choice
from components.reporting.formats import format_client_range
from components.reporting.metrics import MetricsByArm, alias_of, values_of
from components.reporting.page import Table
from components.reporting.units import UnitsByArm, client_range


@dataclass(frozen=True)
class ChosenArm:
    """A choice and its numbers."""

    name: str  # what is chosen for
    figure: str  # what is chosen by
    arm: str  # the chosen arm; empty as long as an arm is not measured with every seed
    means: dict[str, float]  # over the seeds, by arm; of arms that are measured with every seed
    clients: dict[str, tuple[float, float]]  # worst client and spread, where it is a mean over clients


def choose_arms(
    choices: Mapping[str, Choice], metrics: MetricsByArm, units: UnitsByArm, seeds: Sequence[int]
) -> list[ChosenArm]:
    """Choose the arm with the largest mean over the seeds; of equal ones, that which is named first."""
    chosen = []
    for name, choice in choices.items():
        means = {}
        clients = {}
        for arm in choice.among:
            values = values_of({seed: metrics.get(arm, {}).get(seed, {}) for seed in seeds}, choice.figure)
            if len(values) == len(seeds):
                means[arm] = float(np.mean(values))
                if (of_clients := client_range(units.get(arm, {}), choice.figure)) is not None:
                    clients[arm] = of_clients
        is_complete = len(means) == len(choice.among)
        best = max(means, key=lambda arm: means[arm]) if is_complete else ""  # the first of equal ones
        chosen.append(ChosenArm(name, choice.figure, best, means, clients))
    return chosen


def choices_table(chosen: Sequence[ChosenArm]) -> Table:
    """The choices as a table of the report."""
    rows = []
    for choice in chosen:
        means = [
            f"{arm}: {mean:.3f}{format_client_range(choice.clients.get(arm))}"
            for arm, mean in choice.means.items()
        ]
        rows.append(
            {
                "for": choice.name,
                "chosen arm": choice.arm or "not measured",
                "by": alias_of(choice.figure).label,
                "means over the seeds": "; ".join(means) or "-",
            }
        )
    return Table.of(
        "Choices",
        rows,
        "The arm with the largest mean over the seeds; of equal ones, the one that the benchmark's file names"
        " first. Nothing is chosen before every arm is measured with every seed. In brackets, beside a mean"
        " over clients: worst client; spread.",
    )
