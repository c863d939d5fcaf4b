"""Plots of a benchmark for any method: accuracies, win rates, implicit rewards over the rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from components.evaluation.contests import Contest
from components.evaluation.plotting import Curves, label, plot_bands, save_figure
from components.reporting.figures import FIGURES
from components.reporting.tables import Figures
from components.results import ContestFigures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("tab:grey", "tab:blue", "tab:orange", "tab:green")
REWARD_PANELS = {
    "reward": "reward of the chosen completions",
    "margin": "reward margin",
    "accuracy": "accuracy by the implicit reward",
    "summed": "accuracy by log-likelihood",
}


def plot_overview(
    figures: Figures,
    contests: Mapping[str, Mapping[int, Contest]],
    pools: Mapping[str, ContestFigures],
    path: Path,
) -> None:
    """Accuracies by arm, and win rates over all seeds with their intervals; a dot is a seed.

    Args:
        figures: by arm and seed.
        contests: by name and seed.
        pools: their figures over all seeds.
        path: PNG to write.
    """
    size = (14, max(4.5, 1.5 + 0.3 * len(pools)))
    with save_figure(path, nrows=1, ncols=2, figsize=size) as (figure, (left, right)):
        _draw_accuracies(left, figures)
        handles, labels = left.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, fontsize=8, loc="outside lower left", ncols=4)
        _draw_win_rates(right, contests, pools)
        handles, labels = right.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, fontsize=8, loc="outside lower right", ncols=3)


def _draw_accuracies(axes: Axes, figures: Figures) -> None:
    all_runs: list[Mapping[str, float]] = []
    for runs in figures.values():
        all_runs += runs.values()
    kinds = accuracy_kinds(all_runs)
    arms = [
        arm for arm, runs in figures.items() if not set(kinds).isdisjoint(set[str]().union(*runs.values()))
    ]
    for position, name in enumerate(kinds):
        values = [[run[name] for run in figures[arm].values() if name in run] for arm in arms]
        offset = (position - (len(kinds) - 1) / 2) * 0.9 / len(kinds)
        places = [i + offset for i in range(len(arms))]
        axes.bar(
            places,
            [float(np.mean(numbers)) if numbers else 0 for numbers in values],
            width=0.8 / len(kinds),
            color=COLORS[position],
            alpha=0.6,
            label=FIGURES[name],
        )
        for place, numbers in zip(places, values, strict=True):
            axes.scatter([place] * len(numbers), numbers, color="black", s=10, zorder=3)
    axes.axhline(0.5, color="black", linewidth=0.8, linestyle="--")
    axes.set(title="Accuracy on held-out pairs (dots: seeds)", ylim=(0, 1))
    rotated = sum(map(len, arms)) > 40
    axes.set_xticks(
        range(len(arms)),
        [label(arm) for arm in arms],
        rotation=30 if rotated else 0,
        ha="right" if rotated else "center",
        rotation_mode="anchor",
    )


def _draw_win_rates(
    axes: Axes, contests: Mapping[str, Mapping[int, Contest]], pools: Mapping[str, ContestFigures]
) -> None:
    labeled = False
    for row, (name, rate) in enumerate(pools.items()):
        if math.isnan(rate.win_rate):
            continue
        names = (
            ("", "", "")
            if labeled
            else ("wins, all seeds, 95% over answers", "losses, all seeds", "wins, each seed")
        )
        labeled = True
        error = [[rate.win_rate - rate.low], [rate.high - rate.win_rate]]
        axes.errorbar(
            [rate.win_rate], [row], xerr=error, fmt="o", color="tab:blue", capsize=3, label=names[0]
        )
        losses = rate.losses / (rate.wins + rate.ties + rate.losses)
        axes.scatter([losses], [row], marker="x", color="tab:red", zorder=3, label=names[1])
        seeds = [contest.win_rate().win_rate for contest in contests[name].values()]
        axes.scatter(seeds, [row + 0.22] * len(seeds), color="black", s=10, zorder=3, label=names[2])
    axes.set_yticks(range(len(pools)), [label(name) for name in pools], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set(title="Win rate", xlim=(0, 1))


def accuracy_kinds(runs: Sequence[Mapping[str, float]]) -> list[str]:
    """Names of the accuracies that are shown for these runs.

    Runs with tastes: by taste, and with the clients' own adapters if that differs. Other runs: by
    the metric that scores a pair.
    """
    by_taste = [name for name in ("common", "own") if any(name in run for run in runs)]
    if by_taste:
        differs = any(run["own_assigned"] != run.get("own") for run in runs if "own_assigned" in run)
        return [*by_taste, "own_assigned"] if differs else by_taste
    kinds = ("accuracy", "summed", "per_token", "explicit")
    return [name for name in kinds if any(name in run for run in runs)]


def plot_rewards(curves: Curves, path: Path) -> None:
    """Implicit reward, its margin and accuracies on held-out pairs by round.

    Args:
        curves: by arm and seed, see reward_curve.
        path: PNG to write.
    """
    present: set[str] = set()
    for runs in curves.values():
        for curve in runs.values():
            present |= set[str]().union(*curve)
    panels = {key: title for key, title in REWARD_PANELS.items() if key in present}
    size = (1.4 + 4.2 * len(panels), 4.2)
    with save_figure(path, nrows=1, ncols=len(panels), figsize=size, squeeze=False) as (_, axes):
        for panel, (key, title) in zip(axes[0], panels.items(), strict=True):
            plot_bands(panel, curves, key)
            panel.set(xlabel="round", title=title)
        axes[0][-1].legend(fontsize=8)
