"""A picture of a partition (FedBiscuit figure 3): the pairs of each client, stacked by domain.

Of many clients some are shown, from the largest to the smallest at even distances, and above them all sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

CLIENTS, DOMAINS = 40, 20
REST = "all others"


def selected(counts: Mapping[str, Mapping[str, int]], most: int = CLIENTS) -> list[str]:
    """The clients that a picture shows, by size: all of them, or so many at even distances, the largest and the smallest among them."""
    ranked = sorted(counts, key=lambda client: (-sum(counts[client].values()), client))
    if len(ranked) <= most:
        return ranked
    return [ranked[round(i * (len(ranked) - 1) / (most - 1))] for i in range(most)]


def partition_picture(counts: Mapping[str, Mapping[str, int]], path: Path) -> None:
    """Draw who owns what, as a PNG.

    Args:
        counts: pairs of each client by domain. Beyond 20 domains the smaller ones share a colour.
        path: of the PNG.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    clients = selected(counts)
    domains = _domains(counts)
    colours = dict(zip(domains, colormaps["tab20"].colors if len(domains) > 10 else colormaps["tab10"].colors, strict=False))
    colours |= {REST: (0.6, 0.6, 0.6)}
    partial = len(clients) < len(counts)
    figure = Figure(figsize=(max(7.0, 4.0 + 0.24 * len(clients)), 6.6 if partial else 5.0), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    if partial:
        above, axes = figure.subplots(2, 1, height_ratios=[1, 3.4])
        sizes = sorted((sum(by_domain.values()) for by_domain in counts.values()), reverse=True)
        above.fill_between(range(len(sizes)), sizes, step="mid", color="#a0aec0")
        above.set_xlim(-0.5, len(sizes) - 0.5)
        above.set_ylim(bottom=0)
        above.set_title(f"pairs of all {len(counts)} clients, by size", fontsize=9)
        above.tick_params(labelsize=8)
        above.spines[["top", "right"]].set_visible(False)
    else:
        axes = figure.subplots()

    base = [0] * len(clients)
    for domain in domains:
        heights = [sum(n for d, n in counts[client].items() if d == domain or (domain == REST and d not in colours)) for client in clients]
        axes.bar(range(len(clients)), heights, bottom=base, width=0.86, color=colours[domain], label=_short(domain, 38))
        base = [low + height for low, height in zip(base, heights, strict=True)]
    axes.set_xticks(range(len(clients)), [_short(client, 16) for client in clients], rotation=90, fontsize=7)
    axes.set_xlim(-0.7, len(clients) - 0.3)
    axes.set_ylabel("pairs", fontsize=9)
    axes.set_title(f"{len(clients)} of them, from the largest to the smallest, by domain" if partial else f"pairs of {len(clients)} clients by domain", fontsize=9)
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, frameon=False)     # in the order of the stack
    figure.savefig(path, format="png", metadata={"Software": None})


def _domains(counts: Mapping[str, Mapping[str, int]]) -> Sequence[str]:
    """The domains that have a colour of their own, the largest first."""
    totals: Counter[str] = Counter()
    for by_domain in counts.values():
        totals.update(by_domain)
    ranked = sorted(totals, key=lambda domain: (-totals[domain], domain))
    return ranked if len(ranked) <= DOMAINS else [*ranked[:DOMAINS - 1], REST]


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most - 1] + "…"
