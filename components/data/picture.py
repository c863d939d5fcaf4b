"""A picture of a partition: clients by domains, the area of a dot shows the number of pairs (FedBiscuit figure 3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

DOMAINS = 24
REST = "all others"


def partition_picture(counts: Mapping[str, Mapping[str, int]], path: Path) -> None:
    """Draw who owns what, as a PNG.

    Args:
        counts: pairs of each client (in the order of the axis) by domain. Beyond 24 domains the smaller ones share a row.
        path: of the PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    totals: Counter[str] = Counter()
    for by_domain in counts.values():
        totals.update(by_domain)
    ranked = sorted(totals, key=lambda d: (-totals[d], d))
    domains = ranked if len(ranked) <= DOMAINS else [*ranked[:DOMAINS - 1], REST]
    rows = {domain: domains.index(domain if domain in domains else REST) for domain in ranked}

    clients = list(counts)
    cells: Counter[tuple[int, int]] = Counter()
    for x, client in enumerate(clients):
        for domain, n in counts[client].items():
            cells[x, rows[domain]] += n
    cells = Counter({cell: n for cell, n in cells.items() if n})
    width = min(24.0, max(6.0, 3.0 + 0.32 * len(clients)))
    height = max(3.4, 2.4 + 0.32 * len(domains))
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    bars, dots = figure.subplots(2, 1, sharex=True, height_ratios=[1.2, max(1.0, 0.35 * len(domains))])

    room = 72 * min((width - 2.5) / max(len(clients), 1), 0.34)         # points that a dot may be wide
    top = max(cells.values(), default=1)
    dots.scatter([x for x, _ in cells], [y for _, y in cells], s=[(room * 1.15) ** 2 * n / top + 0.5 for n in cells.values()], color="#2b6cb0", alpha=0.75, linewidths=0)
    dots.set_yticks(range(len(domains)), [d if len(d) <= 34 else d[:33] + "…" for d in domains], fontsize=8)
    dots.set_ylim(len(domains) - 0.5, -0.5)
    dots.set_xlim(-0.8, len(clients) - 0.2)
    step = max(1, -(-len(clients) // 40))
    ticks = range(0, len(clients), step)
    dots.set_xticks(ticks, [clients[i] if len(clients[i]) <= 16 else clients[i][:15] + "…" for i in ticks], rotation=90, fontsize=7)
    dots.grid(axis="y", color="#dddddd", linewidth=0.5)
    dots.set_axisbelow(True)
    dots.set_xlabel(f"client ({len(clients)}); largest dot: {top} pairs", fontsize=9)
    bars.bar(range(len(clients)), [sum(counts[c].values()) for c in clients], color="#718096")
    bars.set_ylabel("pairs", fontsize=9)
    bars.tick_params(labelsize=8)
    for axes in (bars, dots):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", metadata={"Software": None})
