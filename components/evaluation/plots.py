"""Pictures of a run: learning curves and accuracy by client. Drawn without a display, so any worker can."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def learning_curves(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Clients' training loss before and after their local steps, by round, with the mean.

    Args:
        records: of committed steps; those without losses are left out.
        path: PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rounds = [r["rounds_done"] for r in records if any("loss" in c for c in r["clients"].values())]
    trained = [[c for c in r["clients"].values() if "loss" in c] for r in records]
    trained = [clients for clients in trained if clients]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for key, color, label in (("loss_first", "tab:orange", "first local step (received adapter)"), ("loss_last", "tab:blue", "last local step")):
        axes.plot(rounds, [sum(c[key] for c in clients) / len(clients) for clients in trained], color=color, marker="o", label=f"mean, {label}")
        for number, clients in zip(rounds, trained, strict=True):
            axes.scatter([number] * len(clients), [c[key] for c in clients], color=color, s=12, alpha=0.35, linewidths=0)
    axes.axhline(0.6931, color="grey", linewidth=0.8, linestyle="--", label="chance (ln 2)")
    axes.set(xlabel="round", ylabel="cross-entropy of a minibatch (nats)", title="Clients' training loss")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def loss_heatmap(slots: Sequence[str], losses: dict[str, Sequence[float]], assigned: dict[str, str], known: dict[str, str | None], path: Path) -> None:
    """Clients' validation losses on all selectors, with the group that each client was put in.

    Args:
        slots: names of the selectors, in the order of the losses.
        losses: by client, one for each selector (nats); NaN is a client without a vote.
        assigned: name of a selector by client.
        known: the clients' groups where the source knows them; rows are sorted by them.
        path: PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    names = sorted(assigned, key=lambda name: (known.get(name) or "", name))
    table = np.array([losses.get(name, [float("nan")] * len(slots)) for name in names], dtype=float)
    figure, axes = pyplot.subplots(figsize=(2.5 + 1.1 * len(slots), 1.2 + min(0.28 * len(names), 12)), layout="constrained")
    image = axes.imshow(table, aspect="auto", cmap="viridis")
    figure.colorbar(image, ax=axes, label="validation loss (nats)")
    axes.scatter([slots.index(assigned[name]) for name in names], range(len(names)), marker="s", s=60, facecolors="none", edgecolors="red", linewidths=1.5)
    axes.set_xticks(range(len(slots)), slots, rotation=30, ha="right", fontsize=8)
    labels = [name + (f" ({known[name]})" if known.get(name) else "") for name in names]
    axes.set_yticks(range(len(names)), labels if len(names) <= 60 else [""] * len(names), fontsize=7)
    axes.set_title("Client grouping (red: the client's group)", fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def hacking_picture(curve: Sequence[dict[str, float]], path: Path) -> None:
    """Judge score against proxy score over DPO's steps; where the first falls while the second rises, the reward is hacked.

    Args:
        curve: step, proxy and judge (shares against the raw policy) of each checkpoint.
        path: PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    steps = [0, *(point["step"] for point in curve)]
    for key, label, color in (("proxy", "selectors (proxy)", "tab:orange"), ("judge", "judge (gold)", "tab:blue")):
        axes.plot(steps, [0.5, *(point[key] for point in curve)], marker="o", label=label, color=color)
    axes.axhline(0.5, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="DPO step", ylabel="preferred to the raw policy (ties half)", ylim=(0, 1), title="Proxy and judge over the alignment")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def accuracy_picture(before: dict[str, Any], after: dict[str, Any], path: Path) -> None:
    """Held-out accuracy before and after, by client and by domain.

    Args:
        before, after: as evaluation.accuracy.client_accuracy gives them.
        path: PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), width_ratios=[3, 1], layout="constrained", sharey=True)
    for axes, part, title in ((left, "clients", "by client"), (right, "domains", "by domain")):
        names = sorted(after[part])
        places = range(len(names))
        axes.bar([p - 0.2 for p in places], [before[part][n] for n in names], width=0.4, color="tab:grey", label="before")
        axes.bar([p + 0.2 for p in places], [after[part][n] for n in names], width=0.4, color="tab:blue", label="after")
        axes.axhline(0.5, color="black", linewidth=0.8, linestyle="--")
        axes.set(title=title, ylim=(0, 1))
        axes.set_xticks(list(places), names if len(names) <= 24 else [""] * len(names), rotation=60, ha="right", fontsize=8)
    left.set_ylabel("accuracy")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower right", ncols=2, fontsize=8)
    figure.suptitle("Held-out accuracy of the selector")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
