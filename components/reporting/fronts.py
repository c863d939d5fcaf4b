"""Fronts of preferences: policies of one method in the space of the rewards of its objectives."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from components.config.benchmark import BASE_POLICY
from components.evaluation.diagnostics.base import FrontPoint
from components.evaluation.pareto import dominated as find_dominated
from components.evaluation.pareto import hypervolume
from components.evaluation.plotting import label, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = npt.NDArray[np.float64]
Front = Mapping[str, FrontPoint]
"""Points of a front, by arm."""


def front_figures(front: Front, worst: Mapping[str, float]) -> dict[str, float]:
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
    figures = {"hypervolume": hypervolume(rewards, np.array([worst[name] for name in objectives]))}
    correlations = [
        _rank_correlation(shares[:, j], rewards[:, j])
        for j in range(len(objectives))
        if np.ptp(shares[:, j]) > 0
    ]
    if correlations:
        figures["rank"] = min(correlations)
    return figures


def _rank_correlation(shares: Array, rewards: Array) -> float:
    """Spearman's correlation of shares that differ, [N], with rewards, [N]; 0 for equal rewards."""
    from scipy.stats import spearmanr

    return float(spearmanr(shares, rewards).statistic) if np.ptp(rewards) > 0 else 0.0


def worst_rewards(fronts: Mapping[str, Front]) -> dict[str, float]:
    """Smallest reward of each objective over all policies of the fronts and the base policy."""
    scores: list[Mapping[str, float]] = []
    for front in fronts.values():
        for point in front.values():
            scores += [point.scores, point.base_scores]
    return {name: min(values[name] for values in scores) for name in scores[0]}


def plot_fronts(fronts: Mapping[str, Mapping[int, Front]], path: Path) -> None:
    """The rewards of each front's policies, a panel per seed and pair of objectives.

    A hollow point is dominated by another one of the same front.

    Args:
        fronts: by name and seed.
        path: PNG to write.
    """
    seeds = sorted(set[int]().union(*fronts.values()))
    first = next(iter(next(iter(next(iter(fronts.values())).values())).values()))
    pairs = list(combinations(first.scores, 2))
    with save_figure(
        path,
        nrows=len(pairs),
        ncols=len(seeds),
        figsize=(4.6 * len(seeds) + 1.6, 4.2 * len(pairs)),
        squeeze=False,
    ) as (figure, panels):
        for row, (across, up) in zip(panels, pairs, strict=True):
            for axes, seed in zip(row, seeds, strict=True):
                _draw_panel(axes, fronts, seed, (across, up))
        handles: dict[str, Any] = {}
        for axes in panels.flat:
            for handle, text in zip(*axes.get_legend_handles_labels(), strict=True):
                handles[text] = handle
        figure.legend(handles.values(), handles.keys(), fontsize=8, loc="outside right upper")


def _draw_panel(
    axes: Axes, fronts: Mapping[str, Mapping[int, Front]], seed: int, plane: tuple[str, str]
) -> None:
    """All fronts with a seed in the plane of two objectives."""
    for position, (name, runs) in enumerate(fronts.items()):
        if seed in runs:
            _draw_front(axes, name, runs[seed], plane, position)
    _draw_base(axes, fronts, seed, plane)
    axes.set(xlabel=label(plane[0]), ylabel=label(plane[1]), title=f"seed {seed}")
    axes.margins(0.25, 0.12)  # room for the names beside the points


def _draw_front(axes: Axes, name: str, front: Front, plane: tuple[str, str], position: int) -> None:
    objectives = list(next(iter(front.values())).scores)
    scores = np.array([[point.scores[objective] for objective in objectives] for point in front.values()])
    dominated = find_dominated(scores)
    color = f"C{position % 10}"
    # Every other front has its names below its points, so that names of two fronts do not overlap.
    offset = (-4, -8) if position % 2 else (4, 3)
    alignment = "right" if position % 2 else "left"
    undominated = []
    for (arm, point), is_dominated in zip(front.items(), dominated, strict=True):
        place = (point.scores[plane[0]], point.scores[plane[1]])
        axes.scatter(*place, s=45, facecolors="none" if is_dominated else color, edgecolors=color, zorder=3)
        axes.annotate(
            label(arm),
            place,
            fontsize=6,
            color=color,
            textcoords="offset points",
            xytext=offset,
            ha=alignment,
        )
        if not is_dominated:
            undominated.append(place)
    undominated.sort()
    x_values = [x for x, _ in undominated]
    y_values = [y for _, y in undominated]
    axes.plot(x_values, y_values, color=color, linewidth=1, label=label(name))


def _draw_base(
    axes: Axes, fronts: Mapping[str, Mapping[int, Front]], seed: int, plane: tuple[str, str]
) -> None:
    for runs in fronts.values():
        if seed in runs:
            base = next(iter(runs[seed].values())).base_scores
            axes.scatter(
                base[plane[0]], base[plane[1]], marker="x", color="black", zorder=3, label=BASE_POLICY
            )
            return
