"""Pictures of methods with several objectives (FIRM figures 1 to 6). Drawn without a display, so any worker can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from components.benchmarks import RAW
from components.evaluation.pareto import dominated

Curve = Sequence[Mapping[str, float]]


def objectives_picture(curves: Mapping[str, Mapping[int, Curve]], path: Path) -> None:
    """What is measured over the rounds, a panel each: rewards, KL, and how far clients disagree; a line for each arm (mean over seeds) in a band from the least to the greatest seed.

    Args:
        curves: by arm and seed, points with `round` and some of the panels' keys.
        path: PNG to write.
    """
    pyplot = _pyplot()
    keys = list(dict.fromkeys(key for runs in curves.values() for curve in runs.values() for point in curve for key in point if key != "round"))
    figure, panels = pyplot.subplots(1, len(keys), figsize=(1.4 + 4 * len(keys), 4.2), layout="constrained", squeeze=False)
    for axes, key in zip(panels[0], keys, strict=True):
        for n, (arm, runs) in enumerate(curves.items()):
            by_round: dict[int, list[float]] = {}
            for point in (point for curve in runs.values() for point in curve if key in point):
                by_round.setdefault(int(point["round"]), []).append(point[key])
            rounds = sorted(by_round)
            if rounds:
                axes.plot(rounds, [np.mean(by_round[r]) for r in rounds], marker="o", markersize=3, color=f"C{n % 10}", label=arm)
                axes.fill_between(rounds, [min(by_round[r]) for r in rounds], [max(by_round[r]) for r in rounds], color=f"C{n % 10}", alpha=0.12, linewidth=0)
        axes.set(xlabel="rounds done", title=key)
        axes.xaxis.get_major_locator().set_params(integer=True)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def weights_picture(weights: Mapping[str, Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]], path: Path) -> None:
    """lambda of every client in every step, a row for each arm and a column for each objective.

    Args:
        weights: by arm, objective and client, (rounds done, lambda) of each step; of one seed.
        path: PNG to write.
    """
    pyplot = _pyplot()
    objectives = list(dict.fromkeys(objective for given in weights.values() for objective in given))
    figure, panels = pyplot.subplots(len(weights), len(objectives), figsize=(4.2 * len(objectives), 0.6 + 2.2 * len(weights)), sharex=True, sharey=True, layout="constrained", squeeze=False)
    for row, (arm, given) in zip(panels, weights.items(), strict=True):
        for axes, objective in zip(row, objectives, strict=True):
            for points in given.get(objective, {}).values():
                axes.plot([done for done, _ in points], [value for _, value in points], marker="o", markersize=2, linewidth=1)
            axes.set(title=f"{arm}: {objective}", ylim=(-0.03, 1.03))
            axes.xaxis.get_major_locator().set_params(integer=True)
        row[0].set_ylabel("lambda")
    for axes in panels[-1]:
        axes.set_xlabel("rounds done")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def fronts_picture(fronts: Mapping[str, Mapping[int, Mapping[str, Mapping[str, float]]]], path: Path) -> None:
    """The rewards of each front's policies in the plane of two objectives, a panel for each seed and pair of objectives; hollow ones are dominated by another of the same front.

    Args:
        fronts: by front and seed, rewards by objective of each arm, and of the raw policy.
        path: PNG to write.
    """
    pyplot = _pyplot()
    seeds = sorted({seed for runs in fronts.values() for seed in runs})
    objectives = list(next(iter(next(iter(next(iter(fronts.values())).values())).values())))
    pairs = [(a, b) for i, a in enumerate(objectives) for b in objectives[i + 1 :]]
    figure, panels = pyplot.subplots(len(pairs), len(seeds), figsize=(4.6 * len(seeds) + 1.6, 4.2 * len(pairs)), layout="constrained", squeeze=False)
    for row, (across, up) in zip(panels, pairs, strict=True):
        for axes, seed in zip(row, seeds, strict=True):
            raw = None
            for n, (front, runs) in enumerate(fronts.items()):
                points = {arm: scores for arm, scores in runs.get(seed, {}).items() if arm != RAW}
                if not points:
                    continue
                raw = runs[seed].get(RAW, raw)
                hollow = dominated(np.array([[scores[name] for name in objectives] for scores in points.values()]))
                color = f"C{n % 10}"
                beside = {"xytext": (-4, -8), "ha": "right"} if n % 2 else {"xytext": (4, 3), "ha": "left"}  # names of two fronts do not meet
                for arm, under, scores in zip(points, hollow, points.values(), strict=True):
                    axes.scatter(scores[across], scores[up], s=45, facecolors="none" if under else color, edgecolors=color, zorder=3)
                    axes.annotate(arm, (scores[across], scores[up]), fontsize=6, color=color, textcoords="offset points", **beside)
                kept = sorted((scores[across], scores[up]) for scores, under in zip(points.values(), hollow, strict=True) if not under)
                axes.plot([x for x, _ in kept], [y for _, y in kept], color=color, linewidth=1, label=front)
            if raw is not None:
                axes.scatter(raw[across], raw[up], marker="x", color="black", zorder=3, label=RAW)
            axes.set(xlabel=across, ylabel=up, title=f"seed {seed}")
            axes.margins(0.25, 0.12)  # room for the names beside the points
    named = {label: handle for axes in panels.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
