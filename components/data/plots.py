"""Plot of a partition (FedBiscuit figure 3): the pairs of each client by domain.

The lower bars are shares, so that small clients can be compared with large ones; the upper bars are
numbers of pairs. Of many clients some are shown, at even distances by size, including the largest
and the smallest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_CLIENTS = 40
MAX_DOMAINS = 20
OTHERS = "all others"
OTHERS_STYLE = {"color": "white", "edgecolor": "#a0aec0", "hatch": "////", "linewidth": 0}
MAX_DOMAIN_CHARACTERS = 38
MAX_CLIENT_CHARACTERS = 16

Counts = Mapping[str, Mapping[str, int]]
"""Number of pairs by client and domain."""


def shown_clients(counts: Counts) -> list[str]:
    """The clients that a plot shows, by size: all of them, or MAX_CLIENTS of them at even distances."""
    ranked = sorted(counts, key=lambda client: (-sum(counts[client].values()), client))
    if len(ranked) <= MAX_CLIENTS:
        return ranked
    return [ranked[round(i * (len(ranked) - 1) / (MAX_CLIENTS - 1))] for i in range(MAX_CLIENTS)]


def plot_partition(counts: Counts, path: Path) -> None:
    """Plot the clients' pairs by domain.

    Args:
        counts: number of pairs by client and domain. Beyond 20 domains the smaller ones are
            combined.
        path: of the PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    clients = shown_clients(counts)
    figure = Figure(figsize=(max(7.0, 4.0 + 0.24 * len(clients)), 6.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 2.6])
    _plot_sizes(above, counts, clients)
    _plot_shares(below, counts, clients)
    for axes in (above, below):
        axes.tick_params(axis="y", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = below.get_legend_handles_labels()
    below.legend(
        handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, frameon=False
    )  # in the order of the stack
    figure.savefig(path, format="png", metadata={"Software": None})


def _plot_sizes(axes: Axes, counts: Counts, clients: Sequence[str]) -> None:
    sizes = [sum(counts[client].values()) for client in clients]
    title = f"{len(clients)} clients"
    if len(clients) < len(counts):
        title = f"{len(clients)} of {len(counts)} clients, from the largest to the smallest"
    axes.bar(range(len(clients)), sizes, width=0.86, color="#718096")
    axes.set_ylabel("pairs", fontsize=9)
    axes.set_title(title, fontsize=9)


def _plot_shares(axes: Axes, counts: Counts, clients: Sequence[str]) -> None:
    from matplotlib import colormaps

    domains = _shown_domains(counts)
    palette: Any = colormaps["tab20" if len(domains) > 10 else "tab10"]
    base = [0.0] * len(clients)
    for i, domain in enumerate(domains):
        shares = [_share(counts[client], domain, domains) for client in clients]
        style: dict[str, Any] = OTHERS_STYLE if domain == OTHERS else {"color": palette.colors[i]}
        label = _label(domain, MAX_DOMAIN_CHARACTERS)
        axes.bar(range(len(clients)), shares, bottom=base, width=0.86, label=label, **style)
        base = [low + share for low, share in zip(base, shares, strict=True)]
    names = [_label(client, MAX_CLIENT_CHARACTERS) for client in clients]
    axes.set_xticks(range(len(clients)), names, rotation=90, fontsize=7)
    axes.set_xlim(-0.7, len(clients) - 0.3)
    axes.set_ylim(0, 1)
    axes.set_ylabel("share by domain", fontsize=9)


def _share(by_domain: Mapping[str, int], domain: str, domains: Sequence[str]) -> float:
    """A domain's share of a client's pairs; the domain OTHERS is all that are not shown."""
    pairs = by_domain.get(domain, 0)
    if domain == OTHERS:
        pairs = sum(n for other, n in by_domain.items() if other not in domains)
    total = sum(by_domain.values())
    return pairs / total if total else 0.0


def _shown_domains(counts: Counts) -> Sequence[str]:
    """The domains with a color of their own, the largest first."""
    totals: Counter[str] = Counter()
    for by_domain in counts.values():
        totals.update(by_domain)
    ranked = sorted(totals, key=lambda domain: (-totals[domain], domain))
    return ranked if len(ranked) <= MAX_DOMAINS else [*ranked[: MAX_DOMAINS - 1], OTHERS]


def _label(text: str, limit: int) -> str:
    """A label: shortened, without formulas ($), and not hidden because of a first '_'."""
    short = text if len(text) <= limit else text[: limit - 1] + "…"
    return (" " if short.startswith("_") else "") + short.replace("$", r"\$")
