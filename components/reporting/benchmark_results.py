"""The results of a benchmark, of which its claims, choices and report are functions.

A front of preferences is the policies of one method in the space of the rewards of its objectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from components.evaluation.contests import Contest, pooled_figures
from components.evaluation.diagnostics.diagnostic import FrontPoint, Summary
from components.evaluation.pareto import hypervolume
from components.reporting.units import Units
from components.results import ContestFigures, CurvePoint

Front = Mapping[str, FrontPoint]
"""Points of a front, by arm."""


@dataclass
class BenchmarkResults:
    """The finished runs, by arm (or name of a contest or front) and seed."""

    seeds: Sequence[int] = ()  # of the benchmark
    metrics: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)  # of fronts too
    # what metrics are means of; those without units have one value per seed
    units: dict[str, dict[int, dict[str, Units]]] = field(default_factory=dict)
    base: dict[int, dict[str, float]] = field(default_factory=dict)  # the base policy's metrics
    base_prompts: dict[int, int] = field(default_factory=dict)  # that these are means over
    contests: dict[str, dict[int, Contest]] = field(default_factory=dict)
    judges: dict[int, dict[str, float]] = field(default_factory=dict)  # numbers of the judges
    rewards: dict[str, dict[int, Sequence[Mapping[str, float]]]] = field(default_factory=dict)  # by round
    hacking: dict[str, dict[int, list[CurvePoint]]] = field(default_factory=dict)
    diagnostics: dict[str, dict[str, dict[int, Summary]]] = field(default_factory=dict)  # by name first
    commits: dict[str, list[str]] = field(default_factory=dict)  # of each run
    fronts: dict[str, dict[int, Front]] = field(default_factory=dict)
    # rows of answers.json of the arms of fronts, of a front's first complete seed
    answers: dict[str, dict[str, list[Mapping[str, Any]]]] = field(default_factory=dict)

    def add_base(self, seed: int, metrics: Mapping[str, float], contests: Iterable[Sequence[str]]) -> None:
        """Add the base policy's metrics of a run; those of a seed are of the run that answers most prompts.

        Arms with settings of their own may answer fewer ones.

        Args:
            seed: of the run.
            metrics: of the run's base policy, under the names of the aligned policy's.
            contests: the ids of the prompts of each of the run's contests.
        """
        prompts = max(map(len, contests), default=0)
        if prompts >= self.base_prompts.get(seed, 0):
            self.base_prompts[seed], self.base[seed] = prompts, dict(metrics)

    def add_fronts(self, seed: int, fronts: Mapping[str, Front]) -> None:
        """Add the fronts of a seed, and their metrics."""
        for name, front in fronts.items():
            self.metrics.setdefault(name, {})[seed] = front_metrics(front, worst_rewards(fronts))
            self.fronts.setdefault(name, {})[seed] = front

    @cached_property
    def pools(self) -> dict[str, ContestFigures]:
        """The contests' figures over all seeds."""
        return {
            name: pooled_figures(by_seed, judges=self.judges_of(name))
            for name, by_seed in self.contests.items()
        }

    def judges_of(self, name: str) -> list[dict[str, float]]:
        """Numbers of the judges of a contest, seed by seed."""
        return [self.judges[seed] for seed in self.contests[name] if seed in self.judges]


def complete_fronts(arms: Mapping[str, Sequence[str]], points: Mapping[str, FrontPoint]) -> dict[str, Front]:
    """The fronts of which every arm has a point; the arms are by front, and the points by arm of one seed."""
    return {
        name: {arm: points[arm] for arm in own} for name, own in arms.items() if points.keys() >= set(own)
    }


def front_metrics(front: Front, worst: Mapping[str, float]) -> dict[str, float]:
    """Hypervolume, from the worst rewards by objective, and rank correlation of a front with one seed.

    The rank is the smallest of Spearman's correlations between an arm's share of preference and its reward,
    over the objectives whose shares differ; 0 for an objective whose reward is the same in all arms.
    """
    from scipy.stats import spearmanr

    objectives = list(worst)
    rewards = np.array([[point.scores[name] for name in objectives] for point in front.values()])
    preferences = np.array([[point.preferences[name] for name in objectives] for point in front.values()])
    # Rounded, so that equal shares are not told apart by their rounding errors.
    shares = np.round(preferences / preferences.sum(axis=1, keepdims=True), 9)
    figures = {"front/hypervolume": hypervolume(rewards, np.array([worst[name] for name in objectives]))}
    correlations = []
    for own, reward in zip(shares.T, rewards.T, strict=True):
        if np.ptp(own) > 0:
            correlations.append(float(spearmanr(own, reward).statistic) if np.ptp(reward) > 0 else 0.0)
    if correlations:
        figures["front/rank"] = min(correlations)
    return figures


def worst_rewards(fronts: Mapping[str, Front]) -> dict[str, float]:
    """Smallest reward of each objective over all policies of the fronts and the base policy."""
    points = [point for front in fronts.values() for point in front.values()]
    scores = [values for point in points for values in (point.scores, point.base_scores)]
    return {name: min(values[name] for values in scores) for name in scores[0]}
