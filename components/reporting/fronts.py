"""Fronts of preferences: policies of one method in the space of the rewards of its objectives."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from components.charts import front_chart
from components.config.benchmark import BASE_POLICY
from components.evaluation.diagnostics.base import FrontPoint
from components.evaluation.pareto import dominated as find_dominated
from components.evaluation.pareto import hypervolume

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Array = npt.NDArray[np.float64]
Front = Mapping[str, FrontPoint]
"""Points of a front, by arm."""


def front_metrics(front: Front, worst: Mapping[str, float]) -> dict[str, float]:
    """Hypervolume and rank correlation of a front with one seed.

    Args:
        front: the points.
        worst: reference point of the hypervolume, by objective.

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
    """The rewards of each front's policies, a chart per seed and pair of objectives.

    A policy that another one of the same front dominates is hollow and off the front's line.

    Args:
        fronts: by name and seed.
    """
    charts = []
    for seed in sorted(set[int]().union(*fronts.values())):
        shown = {name: runs[seed] for name, runs in fronts.items() if seed in runs}
        objectives = _first_point(shown).scores
        charts += [_front_chart(shown, seed, plane) for plane in combinations(objectives, 2)]
    return charts


def _first_point(fronts: Mapping[str, Front]) -> FrontPoint:
    return next(iter(next(iter(fronts.values())).values()))


def _front_chart(fronts: Mapping[str, Front], seed: int, plane: tuple[str, str]) -> Figure:
    one, other = plane
    policies = []
    for name, front in fronts.items():
        scores = np.array([list(point.scores.values()) for point in front.values()])
        for (arm, point), worse in zip(front.items(), find_dominated(scores), strict=True):
            policies.append((name, arm, point.scores[one], point.scores[other], bool(worse)))
    base = _first_point(fronts).base_scores
    return front_chart(f"Fronts, seed {seed}", plane, policies, (BASE_POLICY, base[one], base[other]))
