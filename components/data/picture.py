"""A picture of a partition (FedBiscuit figure 3): how the pairs of each client are spread over the domains.

The bars below are shares, so that small clients can be read beside large ones; above them is the number of pairs. Of
many clients some are shown, by size at even distances, the largest and the smallest among them.
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
        counts: pairs of each client by domain. Beyond 20 domains the smaller ones are drawn as one.
        path: of the PNG.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    clients = selected(counts)
    sizes = [sum(counts[client].values()) for client in clients]
    domains = _domains(counts)
    figure = Figure(figsize=(max(7.0, 4.0 + 0.24 * len(clients)), 6.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 2.6])
    above.bar(range(len(clients)), sizes, width=0.86, color="#718096")
    above.set_ylabel("pairs", fontsize=9)
    above.set_title(f"{len(clients)} of {len(counts)} clients, from the largest to the smallest" if len(clients) < len(counts) else f"{len(clients)} clients", fontsize=9)

    palette = colormaps["tab20"].colors if len(domains) > 10 else colormaps["tab10"].colors
    base = [0.0] * len(clients)
    for i, domain in enumerate(domains):
        own = [counts[client].get(domain, 0) for client in clients]
        if domain == REST:
            own = [sum(n for d, n in counts[client].items() if d not in domains) for client in clients]
        shares = [n / size if size else 0.0 for n, size in zip(own, sizes, strict=True)]
        style = {"color": "white", "edgecolor": "#a0aec0", "hatch": "////", "linewidth": 0} if domain == REST else {"color": palette[i]}
        below.bar(range(len(clients)), shares, bottom=base, width=0.86, label=_short(domain, 38), **style)
        base = [low + share for low, share in zip(base, shares, strict=True)]
    below.set_xticks(range(len(clients)), [_short(client, 16) for client in clients], rotation=90, fontsize=7)
    below.set_xlim(-0.7, len(clients) - 0.3)
    below.set_ylim(0, 1)
    below.set_ylabel("share by domain", fontsize=9)
    for axes in (above, below):
        axes.tick_params(axis="y", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = below.get_legend_handles_labels()
    below.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, frameon=False)     # in the order of the stack
    figure.savefig(path, format="png", metadata={"Software": None})


def _domains(counts: Mapping[str, Mapping[str, int]]) -> Sequence[str]:
    """The domains that have a colour of their own, the largest first."""
    totals: Counter[str] = Counter()
    for by_domain in counts.values():
        totals.update(by_domain)
    ranked = sorted(totals, key=lambda domain: (-totals[domain], domain))
    return ranked if len(ranked) <= DOMAINS else [*ranked[:DOMAINS - 1], REST]


def _short(text: str, most: int) -> str:
    """A label: cut short, with dollars as they are (not as formulas), and with a first '_', for which matplotlib hides a label."""
    cut = text if len(text) <= most else text[:most - 1] + "…"
    return (" " if cut.startswith("_") else "") + cut.replace("$", r"\$")
