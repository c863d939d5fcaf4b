"""Plots of reward hacking: judge and selectors over DPO's steps (FedBiscuit section 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from components.evaluation.plotting import integer_ticks, label, save_figure
from components.results import CurvePoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HackingCurves = Mapping[str, Mapping[int, Sequence[CurvePoint]]]
"""Curves by arm and seed."""


def plot_hacking_curve(curve: Sequence[CurvePoint], path: Path) -> None:
    """The curve of one run.

    The reward is hacked if the judge's share falls while the selectors' rises.

    Args:
        curve: shares against the base policy at each checkpoint.
        path: PNG to write.
    """
    with save_figure(path, dpi=120, figsize=(6, 4)) as (_, axes):
        _draw(axes, curve)
        axes.set(
            xlabel="DPO step",
            ylabel="preferred to the base policy (ties half)",
            title="Selectors and judge over the alignment",
        )
        axes.legend(fontsize=8)


def plot_hacking_grid(curves: HackingCurves, path: Path) -> None:
    """The curves of a benchmark, a row per arm and a column per seed.

    Args:
        curves: by arm and seed.
        path: PNG to write.
    """
    seeds = sorted(set[int]().union(*curves.values()))
    with save_figure(
        path,
        nrows=len(curves),
        ncols=len(seeds),
        figsize=(3.8 * len(seeds), 0.8 + 2.4 * len(curves)),
        sharex="row",
        sharey=True,
        squeeze=False,
    ) as (_, panels):
        for row, (arm, runs) in zip(panels, curves.items(), strict=True):
            for axes, seed in zip(row, seeds, strict=True):
                _draw(axes, runs.get(seed, ()))
                axes.set_title(label(f"{arm}, seed {seed}"))
                integer_ticks(axes)
            row[0].set_ylabel("preferred to base", fontsize=8)
        for axes in panels[-1]:
            axes.set_xlabel("DPO step")
        panels[0][-1].legend(fontsize=8)


def _draw(axes: Axes, curve: Sequence[CurvePoint]) -> None:
    steps = [0, *(point.step for point in curve)]
    proxy = [0.5, *(point.proxy for point in curve)]
    judge = [0.5, *(point.judge for point in curve)]
    axes.plot(steps, proxy, marker="o", markersize=4, label="selectors (proxy)", color="tab:orange")
    axes.plot(steps, judge, marker="o", markersize=4, label="judge (gold)", color="tab:blue")
    axes.axhline(0.5, color="grey", linewidth=0.8, linestyle="--")
    axes.set_ylim(0, 1)
