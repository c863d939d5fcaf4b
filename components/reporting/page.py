"""A report as sections of tables, charts and texts; rendered as HTML, markdown or text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

from components.names import markdown_text

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SHOWN_COLUMNS = 8
"""Columns of a table that are in view; the others are in a second table, which a reader opens."""
OPEN_ANSWERS = 3
"""Prompts of a section whose answers are in view; a reader opens the others."""
EMPTY = ("", "-")
"""Cells without content; a column of them is left out."""
NUMBER = re.compile(r"[-+]?\d[\d,/]*(\.\d+)?( ?%| s| MB)?( (±|→) [\d.,%]+)?( \[[^\]]*\])?")
"""Cells that are aligned to the right."""


@dataclass(frozen=True)
class Table:
    """A table."""

    title: str
    header: list[str]
    rows: list[list[str]]
    caption: str = ""  # what the numbers cover
    headings: str = ""  # what the headings mean; a page shows it, a terminal does not

    @classmethod
    def of(
        cls, title: str, rows: Sequence[Mapping[str, str]], caption: str = "", headings: str = ""
    ) -> Table:
        """A table of rows that have a cell for each heading."""
        header = list(rows[0]) if rows else [""]
        return cls(title, header, [[*row.values()] for row in rows], caption, headings)

    @classmethod
    def of_values(cls, title: str, values: Mapping[str, str], caption: str = "") -> Table:
        """A table of values by name."""
        return cls(title, ["", "value"], [[*row] for row in values.items()], caption)

    @property
    def notes(self) -> list[str]:
        """The paragraphs below the table."""
        return [text for text in (self.caption, self.headings) if text]

    def filled(self) -> Table:
        """The table without the columns in which no row has anything; the first one stays."""
        columns = [
            n for n in range(len(self.header)) if n == 0 or any(row[n] not in EMPTY for row in self.rows)
        ]
        rows = [[row[n] for n in columns] for row in self.rows]
        return replace(self, header=[self.header[n] for n in columns], rows=rows)

    def first(self, columns: int) -> Table:
        """The table with its first columns alone."""
        return replace(self, header=self.header[:columns], rows=[row[:columns] for row in self.rows])

    def split(self) -> list[Table]:
        """The columns in view; and where there are more, a second table with all of them."""
        if len(self.header) <= SHOWN_COLUMNS:
            return [self]
        return [self.first(SHOWN_COLUMNS), Table(f"All {len(self.header)} columns", self.header, self.rows)]


def filled(tables: Iterable[Table]) -> list[Table]:
    """The tables that have rows."""
    return [table for table in tables if table.rows]


@dataclass(frozen=True)
class Chart:
    """A chart, and what it shows."""

    figure: Figure
    caption: str = ""

    @property
    def title(self) -> str:
        """Its heading as plain text."""
        return unescape(self.figure.layout.title.text)


@dataclass(frozen=True)
class Answers:
    """The answers of policies to the same prompt, and verdicts on them."""

    prompt: str
    texts: dict[str, str]  # by policy
    verdicts: dict[str, str] = field(default_factory=dict)  # who wrote the better answer, by contest


@dataclass(frozen=True)
class Code:
    """A text in a fixed-width font, e.g. commands."""

    title: str  # empty without one
    text: str
    is_folded: bool = False  # whether a reader opens it


@dataclass(frozen=True)
class Notes:
    """Sentences, as a list."""

    lines: Sequence[str]


Part = Table | Chart | Answers | Code | Notes


@dataclass(frozen=True)
class PageSection:
    """A section of a report."""

    title: str
    lead: str  # a sentence that says what the section tells
    parts: Sequence[Part]

    @property
    def has_only_charts(self) -> bool:
        """Whether all parts are charts, which then stand side by side."""
        return all(isinstance(part, Chart) for part in self.parts)


@dataclass(frozen=True)
class Page:
    """A report."""

    title: str
    subtitle: str
    sections: Sequence[PageSection]  # those without parts are left out


def cell_class(text: str) -> str:
    """The class of a cell in the HTML: a claim's verdict, a number, or empty for other cells."""
    first = text.split(" ", 1)[0]
    if first in ("holds", "fails", "undecided"):
        return first
    return "number" if NUMBER.fullmatch(text) else ""


def to_html(page: Page) -> str:
    """The report as one HTML file, which needs no network: charts are drawn by plotly.js inside it."""
    from jinja2 import Environment, FileSystemLoader
    from plotly.offline import get_plotlyjs

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "cell_class": cell_class,
        "anchor": lambda title: re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-"),
        "kind": lambda part: type(part).__name__,
    }
    shown = [section for section in page.sections if section.parts]
    has_charts = any(isinstance(part, Chart) for section in shown for part in section.parts)
    template = environment.get_template("page.html.j2")
    return template.render(
        page=page,
        sections=shown,
        open_answers=OPEN_ANSWERS,
        plotly=get_plotlyjs() if has_charts else "",
    )


def to_markdown(page: Page) -> str:
    """The report as markdown, without charts."""
    blocks = [f"# {without_tags(page.title)}", without_tags(page.subtitle), sections_markdown(page.sections)]
    return "\n\n".join(blocks).rstrip() + "\n"


def sections_markdown(sections: Iterable[PageSection]) -> str:
    """Sections as markdown, without charts."""
    blocks: list[str] = []
    for section in sections:
        if section.parts:
            blocks += [f"## {section.title}", section.lead]
        for part in section.parts:
            paragraphs = _markdown(part)
            blocks += paragraphs if isinstance(part, Code) else map(without_tags, paragraphs)
    return "\n\n".join(blocks).rstrip() + "\n"


def _markdown(part: Part) -> list[str]:
    """The paragraphs of a part."""
    if isinstance(part, Table):
        return [f"### {markdown_text(part.title)}", markdown_table(part), *part.notes]
    if isinstance(part, Answers):
        texts = [f"- **{_one_line(policy)}**: {_one_line(text)}" for policy, text in part.texts.items()]
        verdicts = [f"- {contest}: {verdict}" for contest, verdict in part.verdicts.items()]
        return [f"> {_one_line(part.prompt)}", "\n".join(texts + verdicts)]
    if isinstance(part, Code):
        return [*([part.title] if part.title else []), fenced(part.text)]
    if isinstance(part, Notes):
        return ["\n".join(f"- {line}" for line in part.lines)]
    return []


def markdown_table(table: Table) -> str:
    """A table without its empty columns."""
    shown = table.filled()
    rows = [shown.header, ["---"] * len(shown.header), *shown.rows]
    return "\n".join("| " + " | ".join(markdown_text(_one_line(cell)) for cell in row) + " |" for row in rows)


def without_tags(text: str) -> str:
    """Markdown in which no HTML begins."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)


def fenced(text: str) -> str:
    """A text as a block of code, which no line of it ends."""
    longest = max(map(len, re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def text_table(table: Table) -> list[str]:
    """The lines of a table without its empty columns, for a terminal; its title heads the first column."""
    shown = table.filled()
    rows = [[table.title, *shown.header[1:]], *([f"  {row[0]}", *row[1:]] for row in shown.rows)]
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for name, *cells in rows:
        numbers = [cell.rjust(size) for cell, size in zip(cells, widths, strict=True)]
        lines.append("  ".join([name.ljust(first), *numbers]).rstrip())
    return lines
