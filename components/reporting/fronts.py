"""Fronts of preferences: policies of one method in the space of the rewards of its objectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from components.charts import front_chart
from components.config.benchmark import BASE_POLICY
from components.evaluation.diagnostics.diagnostic import FrontPoint
from components.evaluation.pareto import dominated as find_dominated
from components.evaluation.pareto import hypervolume

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Array = npt.NDArray[np.float64]
Front = Mapping[str, FrontPoint]
"""Points of a front, by arm."""


def complete_fronts(arms: Mapping[str, Sequence[str]], points: Mapping[str, FrontPoint]) -> dict[str, Front]:
    """The fronts of which every arm has a point.

    Args:
        arms: of each front.
        points: by arm, of one seed.
    """
    return {
        name: {arm: points[arm] for arm in own} for name, own in arms.items() if points.keys() >= set(own)
    }


def front_metrics(front: Front, worst: Mapping[str, float]) -> dict[str, float]:
    """Hypervolume, from the worst rewards by objective, and rank correlation of a front with one seed.

    Returns:
        hypervolume; and rank, the smallest of Spearman's correlations between an arm's share of
        preference and its reward, over the objectives whose shares differ; 0 for an objective whose
        reward is the same in all arms.
    """
    objectives = list(worst)
    rewards = np.array([[point.scores[name] for name in objectives] for point in front.values()])
    preferences = np.array([[point.preferences[name] for name in objectives] for point in front.values()])
    # Rounded, so that equal shares are not told apart by their rounding errors.
    shares = np.round(preferences / preferences.sum(axis=1, keepdims=True), 9)
    figures = {"front/hypervolume": hypervolume(rewards, np.array([worst[name] for name in objectives]))}
    correlations = [
        _rank_correlation(shares[:, j], rewards[:, j])
        for j in range(len(objectives))
        if np.ptp(shares[:, j]) > 0
    ]
    if correlations:
        figures["front/rank"] = min(correlations)
    return figures


def _rank_correlation(shares: Array, rewards: Array) -> float:
    """Spearman's correlation of shares that differ, [N], with rewards, [N]; 0 for equal rewards."""
    from scipy.stats import spearmanr

    return float(spearmanr(shares, rewards).statistic) if np.ptp(rewards) > 0 else 0.0


def worst_rewards(fronts: Mapping[str, Front]) -> dict[str, float]:
    """Smallest reward of each objective over all policies of the fronts and the base policy."""
    points = [point for front in fronts.values() for point in front.values()]
    scores = [values for point in points for values in (point.scores, point.base_scores)]
    return {name: min(values[name] for values in scores) for name in scores[0]}


def front_charts(fronts: Mapping[str, Mapping[int, Front]]) -> list[Figure]:
    """The rewards of each front's policies by name and seed, a chart per seed and pair of objectives.

    A policy that another one of the same front dominates is hollow and off the front's line.
    """
    charts = []
    for seed in sorted(set[int]().union(*fronts.values())):
        points = []
        for name, runs in fronts.items():
            front = runs.get(seed, {})
            scores = np.array([list(point.scores.values()) for point in front.values()])
            worse = find_dominated(scores) if front else np.array([])
            points += [(name, arm, front[arm], bool(w)) for arm, w in zip(front, worse, strict=True)]
        base = points[0][2].base_scores
        for one, other in combinations(base, 2):
            policies = [(name, arm, own.scores[one], own.scores[other], w) for name, arm, own, w in points]
            origin = (BASE_POLICY, base[one], base[other])
            charts.append(front_chart(f"Fronts, seed {seed}", (one, other), policies, origin))
    return charts
