"""The grouping of clients (FedBiscuit section 5.1): losses, and agreement with the true groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import ClassVar

import numpy as np

from components.evaluation.diagnostics.base import (
    DiagnosedRun,
    Diagnostic,
    DiagnosticSink,
    Groups,
    Summary,
)
from components.evaluation.plotting import Image, integer_ticks, label, save_figure
from components.federation.grouping import adjusted_rand_index
from components.federation.methods.fedbiscuit import GroupingMemory
from components.results import FederationResult, StepRecord

FOLDER = "grouping"
"""Prefix of the logged metrics, and folder of the logged plots."""

RandCurve = list[tuple[int, float]]
"""(rounds done, adjusted Rand index) of each grouping."""


class GroupingDiagnostic(Diagnostic):
    """Heat map of the losses, and adjusted Rand index if the true groups are known."""

    figure_labels: ClassVar[dict[str, str]] = {"adjusted_rand_index": "adjusted Rand index"}

    def log(self, record: StepRecord, groups: Groups, sink: DiagnosticSink) -> None:
        """Log a grouping; other steps have none."""
        assignment = grouping_of(record)
        if assignment is None:
            return
        if any(groups.values()):
            index = adjusted_rand_index(assignment, groups)
            sink.log_metrics({f"{FOLDER}/adjusted_rand_index": index}, record.logged_at)
        losses = {name: client.losses for name, client in record.clients.items()}
        slots = list(record.adapters)
        sink.log_plot(
            lambda path: plot_losses(slots, losses, assignment, groups, path),
            f"{FOLDER}/{record.step:05d}.png",
        )

    def summarize(self, result: FederationResult, run: DiagnosedRun) -> Summary:
        """Agreement of the last grouping, and of each."""
        if not any(run.groups.values()):
            return Summary()
        curve: RandCurve = []
        for record in result.records:
            assignment = grouping_of(record)
            if assignment is not None:
                curve.append((record.rounds_done, adjusted_rand_index(assignment, run.groups)))
        figures = {}
        if result.outcome.assignment:
            figures["adjusted_rand_index"] = adjusted_rand_index(result.outcome.assignment, run.groups)
        return Summary(figures, curve)

    def plot_benchmark(self, summaries: Mapping[str, Mapping[int, Summary]], folder: Path) -> list[Image]:
        """Agreement over the rounds."""
        curves = {
            arm: {seed: summary.data for seed, summary in runs.items() if summary.data}
            for arm, runs in summaries.items()
        }
        curves = {arm: runs for arm, runs in curves.items() if runs}
        if not curves:
            return []
        path = folder / "grouping.png"
        plot_rand_index(curves, path)
        return [Image("Groups over the rounds", path, "Every grouping of all clients.")]


def grouping_of(record: StepRecord) -> dict[str, str] | None:
    """Selector by client after a step that grouped the clients; None for any other step."""
    memory = GroupingMemory.model_validate(record.memory)
    is_grouping = memory.grouped_at == record.round and not record.ends_round
    return memory.assignment if is_grouping else None


def plot_losses(
    slots: Sequence[str],
    losses: Mapping[str, Sequence[float]],
    assignment: Mapping[str, str],
    groups: Groups,
    path: Path,
) -> None:
    """Clients' validation losses on all selectors, with the group of each client.

    Args:
        slots: names of the selectors, in the order of the losses.
        losses: by client, one per selector (nats); clients that reported none are missing.
        assignment: selector by client.
        groups: the clients' true groups, by which the rows are sorted.
        path: PNG to write.
    """
    names = sorted(assignment, key=lambda name: (groups.get(name) or "", name))
    no_vote = [float("nan")] * len(slots)
    table = np.array([losses.get(name, no_vote) for name in names], dtype=float)
    size = (2.5 + 1.1 * len(slots), 1.2 + min(0.28 * len(names), 12))
    with save_figure(path, dpi=120, figsize=size) as (figure, axes):
        image = axes.imshow(table, aspect="auto", cmap="viridis")
        figure.colorbar(image, ax=axes, label="validation loss (nats)")
        columns = [slots.index(assignment[name]) for name in names]
        axes.scatter(
            columns,
            range(len(names)),
            marker="s",
            s=60,
            facecolors="none",
            edgecolors="red",
            linewidths=1.5,
        )
        axes.set_xticks(range(len(slots)), slots, rotation=30, ha="right", fontsize=8)
        labels = [label(name + (f" ({groups[name]})" if groups.get(name) else "")) for name in names]
        axes.set_yticks(range(len(names)), labels if len(names) <= 60 else [""] * len(names), fontsize=7)
        axes.set_title("Client grouping (red: the client's group)", fontsize=9)


def plot_rand_index(curves: Mapping[str, Mapping[int, RandCurve]], path: Path) -> None:
    """Adjusted Rand index of each grouping by the rounds done, a line per arm and seed.

    Args:
        curves: by arm and seed.
        path: PNG to write.
    """
    with save_figure(path, figsize=(9, 4)) as (figure, axes):
        for (arm, runs), style in zip(curves.items(), cycle(["-", "--", ":", "-."]), strict=False):
            for position, (seed, curve) in enumerate(runs.items()):
                axes.plot(
                    [rounds for rounds, _ in curve],
                    [index for _, index in curve],
                    linestyle=style,
                    marker="o",
                    markersize=4,
                    color=f"C{position % 10}",
                    label=label(f"{arm}, seed {seed}"),
                )
        for level in (0, 1):
            axes.axhline(level, color="grey", linewidth=0.8, linestyle="--")
        axes.set(
            xlabel="rounds done",
            ylabel="adjusted Rand index",
            title="Agreement of the groups with the clients' true ones (1: equal, 0: chance)",
        )
        integer_ticks(axes)
        figure.legend(fontsize=8, loc="outside right upper")
