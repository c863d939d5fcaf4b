"""The results of a benchmark, of which its claims, choices and report are functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from components.evaluation.contests import Contest, pooled_figures
from components.evaluation.diagnostics.diagnostic import Summary
from components.reporting.fronts import Front, front_metrics, worst_rewards
from components.reporting.units import Units
from components.results import ContestFigures, CurvePoint


@dataclass
class BenchmarkResults:
    """The finished runs, by arm (or name of a contest or front) and seed."""

    seeds: Sequence[int] = ()  # of the benchmark; the bootstrap of claims is a function of the first one
    resamples: int = 2000  # of that bootstrap
    metrics: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)  # of fronts too
    # what metrics are means of; those without units have one value per seed
    units: dict[str, dict[int, dict[str, Units]]] = field(default_factory=dict)
    base: dict[int, dict[str, float]] = field(default_factory=dict)  # the base policy's metrics
    contests: dict[str, dict[int, Contest]] = field(default_factory=dict)
    judges: dict[int, dict[str, float]] = field(default_factory=dict)  # numbers of the judges
    rewards: dict[str, dict[int, Sequence[Mapping[str, float]]]] = field(default_factory=dict)  # by round
    hacking: dict[str, dict[int, list[CurvePoint]]] = field(default_factory=dict)
    diagnostics: dict[str, dict[str, dict[int, Summary]]] = field(default_factory=dict)  # by name first
    commits: dict[str, list[str]] = field(default_factory=dict)  # of each run
    fronts: dict[str, dict[int, Front]] = field(default_factory=dict)
    # rows of answers.json of the arms of fronts, of a front's first complete seed
    answers: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)

    def add_fronts(self, seed: int, fronts: Mapping[str, Front]) -> None:
        """Add the fronts of a seed, and their metrics."""
        for name, front in fronts.items():
            self.metrics.setdefault(name, {})[seed] = front_metrics(front, worst_rewards(fronts))
            self.fronts.setdefault(name, {})[seed] = front

    @cached_property
    def pools(self) -> dict[str, ContestFigures]:
        """The contests' figures over all seeds."""
        return {name: pooled_figures(by_seed) for name, by_seed in self.contests.items()}
