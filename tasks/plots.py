"""The plots of dvc.yaml as images; the page of `dvc plots show` needs the internet for the others."""

from __future__ import annotations

import csv
from pathlib import Path

from components.charts import MAX_NAMES

DEFAULT_FONT = "DejaVu Sans"
"""A font that Matplotlib brings with it."""


def write_plots(report: Path) -> None:
    """Write rounds.png, dpo.png and accuracy.png, beside the tables that they show."""
    columns = _read_columns(report / "rounds.csv")
    losses = {name: columns[name] for name in ("loss_first", "loss_last")}
    _draw_lines(report / "rounds.png", columns["round"], losses, ("round", "mean loss of the clients"))
    columns = _read_columns(report / "dpo.csv")
    _draw_lines(report / "dpo.png", columns["step"], {"loss": columns["loss"]}, ("step", "loss of DPO"))
    columns = _read_columns(report / "accuracy.csv")
    _draw_bars(report / "accuracy.png", columns["client"], columns["after"], "held-out accuracy")


def _read_columns(path: Path) -> dict[str, list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    return {name: [row[place] for row in rows] for place, name in enumerate(header)}


def _draw_lines(path: Path, x: list[str], lines: dict[str, list[str]], titles: tuple[str, str]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.add_subplot(xlabel=titles[0], ylabel=titles[1])
    for name, values in lines.items():
        axes.plot(list(map(float, x)), list(map(float, values)), marker=".", label=name)
    axes.legend()
    figure.savefig(path)


def _draw_bars(path: Path, names: list[str], values: list[str], title: str) -> None:
    from matplotlib.figure import Figure

    shown = names if len(names) <= MAX_NAMES else []
    figure = Figure(figsize=(6.4, 4.8 + 0.2 * len(shown)), layout="constrained")
    axes = figure.add_subplot(xlabel=title, ylabel="" if shown else "clients")
    axes.barh(range(len(names)), list(map(float, values)))
    labels, families = _drawable(shown)
    # A name from data may have a "$", which would begin a formula.
    axes.set_yticks(range(len(shown)), labels, parse_math=False, fontfamily=families)
    axes.invert_yaxis()
    figure.savefig(path)


def _drawable(names: list[str]) -> tuple[list[str], list[str]]:
    """The names with codes in place of characters that no installed font has, and the fonts of the others."""
    from matplotlib.font_manager import fontManager, get_font

    missing = {character for name in names for character in name}
    families: list[str] = []
    for font in sorted(fontManager.ttflist, key=lambda font: font.name != DEFAULT_FONT):
        if not missing:
            break
        if found := missing & set(map(chr, get_font(font.fname).get_charmap())):
            families.append(font.name)
            missing -= found
    codes = {ord(one): one.encode("ascii", "backslashreplace").decode() for one in missing}
    return [name.translate(codes) for name in names], families or [DEFAULT_FONT]
