"""A report as one HTML file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from components.evaluation.plotting import Image
from components.reporting.claims import verdict_class
from components.reporting.tables import Table

STYLE = """
body {
  font-family: sans-serif; margin: 2em auto; padding: 0 1em; max-width: 100em; line-height: 1.4; color: #222
}
li, p { max-width: 75em }
.wide { overflow-x: auto }
h2 { margin-top: 2em }
table { border-collapse: collapse; font-size: .85em; font-variant-numeric: tabular-nums }
td, th { border: 1px solid #ccc; padding: .3em .6em; text-align: left; vertical-align: top }
th { background: #f2f2f2 }
td:first-child { font-weight: bold; min-width: 9em }
tr:nth-child(even) td { background: #fafafa }
img { max-width: 100% }
.caption { color: #555 }
.short { white-space: nowrap }
.holds { color: #176b2c }
.undecided { color: #8a6100 }
.fails { color: #a11 }
"""
SHORT_CELL = 20
"""Characters up to which a cell is not wrapped."""


def to_html(title: str, parts: Sequence[Table | Image], notes: Sequence[str]) -> str:
    """The report as one HTML file, plots included."""
    body = [f"<h1>{escape(title)}</h1>", "<ul>", *(f"<li>{escape(note)}</li>" for note in notes), "</ul>"]
    for part in parts:
        body.append(f"<h2>{escape(part.title)}</h2>")
        if part.caption:
            body.append(f'<p class="caption">{escape(part.caption)}</p>')
        body.append(_table(part) if isinstance(part, Table) else _image(part))
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _table(table: Table) -> str:
    rows = [_row("th", table.header), *(_row("td", row) for row in table.rows)]
    return f'<div class="wide"><table>{"".join(rows)}</table></div>'


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(_cell(tag, text) for text in cells) + "</tr>"


def _cell(tag: str, text: str) -> str:
    short = "short" if tag == "td" and len(text) <= SHORT_CELL else ""
    kind = verdict_class(text) or short
    attribute = f" class={kind}" if kind else ""
    return f"<{tag}{attribute}>{escape(text)}</{tag}>"


def _image(image: Image) -> str:
    data = base64.b64encode(image.path.read_bytes()).decode()
    return f'<p><img alt="{escape(image.title)}" src="data:image/png;base64,{data}"></p>'
