"""Plots of a run: learning curves, and accuracy before and after the rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from components.evaluation.plotting import integer_ticks, label, save_figure
from components.results import AccuracyReport, StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_NAMES = 24
"""Maximum number of clients or domains whose names are shown."""


def plot_learning_curves(records: Sequence[StepRecord], path: Path) -> None:
    """Clients' training loss before and after their local steps, by round, with the mean.

    Args:
        records: committed steps; those without losses are skipped.
        path: PNG to write.
    """
    with save_figure(path, dpi=120, figsize=(7, 4)) as (_, axes):
        for key, color, name in (
            ("loss_first", "tab:orange", "first local step (received adapter)"),
            ("loss_last", "tab:blue", "last local step"),
        ):
            trained = [record for record in records if key in record.client_means()]
            rounds = [record.rounds_done for record in trained]
            means = [record.client_means()[key] for record in trained]
            axes.plot(rounds, means, color=color, marker="o", label=f"mean, {name}")
            for record in trained:
                scalars = [client.metrics.scalars for client in record.clients.values()]
                values = [numbers[key] for numbers in scalars if key in numbers]
                axes.scatter(
                    [record.rounds_done] * len(values), values, color=color, s=12, alpha=0.35, linewidths=0
                )
        axes.axhline(math.log(2), color="grey", linewidth=0.8, linestyle="--", label="chance (ln 2)")
        axes.set(xlabel="round", ylabel="loss of a minibatch (nats)", title="Clients' training loss")
        integer_ticks(axes)
        axes.legend(fontsize=8)


def plot_accuracy(before: AccuracyReport, after: AccuracyReport, title: str, path: Path) -> None:
    """Held-out accuracy before and after the rounds, by client and by domain.

    Args:
        before, after: the accuracies.
        title: what they are accuracies of.
        path: PNG to write.
    """
    with save_figure(path, dpi=120, nrows=1, ncols=2, figsize=(10, 4), width_ratios=[3, 1], sharey=True) as (
        figure,
        (left, right),
    ):
        _draw_bars(left, before.clients, after.clients, "by client")
        _draw_bars(right, before.domains, after.domains, "by domain")
        left.set_ylabel("accuracy")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower right", ncols=2, fontsize=8)
        figure.suptitle(f"Held-out accuracy: {title.lower()}")


def _draw_bars(axes: Axes, before: Mapping[str, float], after: Mapping[str, float], title: str) -> None:
    """Two bars for each name; with many names, none is shown."""
    names = sorted(after)
    positions = range(len(names))
    for shift, values, color, moment in (
        (-0.2, before, "tab:grey", "before"),
        (0.2, after, "tab:blue", "after"),
    ):
        places = [position + shift for position in positions]
        axes.bar(places, [values[name] for name in names], 0.4, color=color, label=moment)
    axes.axhline(0.5, color="black", linewidth=0.8, linestyle="--")
    axes.set(title=title, ylim=(0, 1))
    labels = [label(name) for name in names] if len(names) <= MAX_NAMES else [""] * len(names)
    axes.set_xticks(list(positions), labels, rotation=60, ha="right", fontsize=8)
