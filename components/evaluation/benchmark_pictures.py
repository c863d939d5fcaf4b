"""Pictures of a benchmark. Drawn without a display, so any worker can."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from components.benchmarks import FIGURES
from components.evaluation.benchmark import Pooled

COLORS = ("tab:grey", "tab:blue", "tab:orange", "tab:green")


def picture(figures: Mapping[str, Mapping[int, Mapping[str, float]]], pools: Mapping[str, Pooled], path: Path) -> None:
    """Accuracies by method (by taste, where the pairs have tastes) and win rates over all seeds with their intervals; a dot is a seed.

    Args:
        figures: by arm and seed, see benchmark.arm_figures.
        pools: the contests, by name.
        path: PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, max(4.5, 1.5 + 0.3 * len(pools))), layout="constrained")
    kinds = accuracy_kinds([run for runs in figures.values() for run in runs.values()])
    arms = [arm for arm, runs in figures.items() if any(name in run for run in runs.values() for name in kinds)]
    for k, name in enumerate(kinds):
        values = [[run[name] for run in figures[arm].values() if name in run] for arm in arms]
        places = [i + (k - (len(kinds) - 1) / 2) * 0.9 / len(kinds) for i in range(len(arms))]
        left.bar(places, [np.mean(v) if v else 0 for v in values], width=0.8 / len(kinds), color=COLORS[k], alpha=0.6, label=FIGURES[name])
        for place, given in zip(places, values, strict=True):
            left.scatter([place] * len(given), given, color="black", s=10, zorder=3)
    left.axhline(0.5, color="black", linewidth=0.8, linestyle="--")
    left.set(title="Accuracy on held-out pairs (dots: seeds)", ylim=(0, 1))
    many = sum(map(len, arms)) > 40
    left.set_xticks(range(len(arms)), arms, rotation=30 if many else 0, ha="right" if many else "center", rotation_mode="anchor")
    if arms:
        figure.legend(*left.get_legend_handles_labels(), fontsize=8, loc="outside lower left", ncols=4)
    for i, found in enumerate(pools.values()):
        rate = found.rate
        if not math.isnan(rate.rate):
            right.errorbar([rate.rate], [i], xerr=[[rate.rate - rate.low], [rate.high - rate.rate]], fmt="o", color="tab:blue", capsize=3, label="" if i else "wins, all seeds, 95% over answers")
            right.scatter([rate.losses / (rate.wins + rate.ties + rate.losses)], [i], marker="x", color="tab:red", zorder=3, label="" if i else "losses, all seeds")
            right.scatter([one.rate for one in found.by_seed.values()], [i + 0.22] * len(found.by_seed), color="black", s=10, zorder=3, label="" if i else "wins, each seed")
    right.set_yticks(range(len(pools)), list(pools), fontsize=8)
    right.invert_yaxis()
    right.grid(axis="x", alpha=0.3)
    right.set(title="Win rate", xlim=(0, 1))
    if pools:
        figure.legend(*right.get_legend_handles_labels(), fontsize=8, loc="outside lower right", ncols=3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def accuracy_kinds(runs: Sequence[Mapping[str, float]]) -> list[str]:
    """Which accuracies of FIGURES say most of these runs: by taste where there are tastes, own adapters' where they differ; else by what a pair is found right."""
    by_taste = [name for name in ("common", "own") if any(name in run for run in runs)]
    if by_taste:
        return by_taste + (["own_assigned"] if any(run["own_assigned"] != run.get("own") for run in runs if "own_assigned" in run) else [])
    return [name for name in ("accuracy", "summed", "per_token", "explicit") if any(name in run for run in runs)]


def rewards_picture(curves: dict[str, dict[int, list[dict[str, float]]]], path: Path) -> None:
    """Reward, reward margin and accuracies on held-out pairs by round, a line for each arm (mean over seeds) in a band from the least to the greatest seed.

    Args:
        curves: by arm and seed, see reward_curve.
        path: PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = (("reward", "reward of the chosen completions"), ("margin", "reward margin"), ("accuracy", "accuracy by the implicit reward"), ("summed", "accuracy by log-likelihood"))
    titles = [title for title in titles if any(title[0] in point for runs in curves.values() for curve in runs.values() for point in curve)]
    figure, panels = pyplot.subplots(1, len(titles), figsize=(1.4 + 4.2 * len(titles), 4.2), layout="constrained")
    for axes, (key, title) in zip(panels, titles, strict=True):
        for arm, runs in curves.items():
            by_round: dict[int, list[float]] = {}
            for point in (point for curve in runs.values() for point in curve if key in point):
                by_round.setdefault(int(point["round"]), []).append(point[key])
            if not by_round:
                continue
            rounds = sorted(by_round)
            (line,) = axes.plot(rounds, [np.mean(by_round[n]) for n in rounds], marker="o", markersize=3, label=arm)
            axes.fill_between(rounds, [min(by_round[n]) for n in rounds], [max(by_round[n]) for n in rounds], color=line.get_color(), alpha=0.12, linewidth=0)
        axes.set(xlabel="round", title=title)
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[-1].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def rand_picture(curves: Mapping[str, Mapping[int, Sequence[Mapping[str, float]]]], path: Path) -> None:
    """Adjusted Rand index of each grouping by the rounds done, a line for each arm and seed.

    Args:
        curves: by arm and seed, see benchmark.rand_curve.
        path: PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for (arm, runs), style in zip(curves.items(), _cycle(["-", "--", ":", "-."], len(curves)), strict=True):
        for n, (seed, curve) in enumerate(runs.items()):
            axes.plot([point["round"] for point in curve], [point["index"] for point in curve], linestyle=style, marker="o", markersize=4, color=f"C{n % 10}", label=f"{arm}, seed {seed}")
    for level in (0, 1):
        axes.axhline(level, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="rounds done", ylabel="adjusted Rand index", title="Groups against the clients' true ones (1: the same, 0: chance)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def hacking_grid(curves: Mapping[str, Mapping[int, Sequence[Mapping[str, float]]]], path: Path) -> None:
    """Judge score and proxy score over DPO's steps, a row for each arm and a column for each seed.

    Args:
        curves: by arm and seed; step, prompts, proxy and judge of each checkpoint.
        path: PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seeds = sorted({seed for runs in curves.values() for seed in runs})
    figure, panels = pyplot.subplots(len(curves), len(seeds), figsize=(3.8 * len(seeds), 0.8 + 2.4 * len(curves)), sharex="row", sharey=True, squeeze=False, layout="constrained")
    for row, (arm, runs) in zip(panels, curves.items(), strict=True):
        for axes, seed in zip(row, seeds, strict=True):
            axes.axhline(0.5, color="grey", linewidth=0.8, linestyle="--")
            axes.set(title=f"{arm}, seed {seed}", ylim=(0, 1))
            axes.xaxis.get_major_locator().set_params(integer=True)
            for key, label, color in (("proxy", "selectors (proxy)", "tab:orange"), ("judge", "judge (gold)", "tab:blue")):
                curve = runs.get(seed, ())
                axes.plot([0, *(point["step"] for point in curve)], [0.5, *(point[key] for point in curve)], marker="o", markersize=4, label=label, color=color)
        row[0].set_ylabel("preferred to raw", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("DPO step")
    panels[0][-1].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _cycle(values: Sequence[str], length: int) -> list[str]:
    return [values[n % len(values)] for n in range(length)]
