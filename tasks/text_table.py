"""Tables of text for the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def table_lines(table: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines, with columns that are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]


def fit_columns(
    table: Sequence[Sequence[str]], width: int, shortened: Mapping[str, int], left_out: Sequence[str]
) -> list[list[str]]:
    """A table whose lines have at most this width, if the columns that must stay allow it.

    Args:
        table: a header and rows.
        width: characters of a line.
        shortened: by header, the least characters of columns whose cells are cut before columns are left out;
            what room remains goes to them, in this order.
        left_out: headers of columns that may be left out, the least important first.
    """
    columns = {column[0]: column for column in zip(*table, strict=True)}
    full = {name: max(map(len, column)) for name, column in columns.items()}
    widths = {name: min(size, shortened.get(name, size)) for name, size in full.items()}
    for name in left_out:
        if _line_width(widths) <= width:
            break
        del widths[name]
    for name in shortened:
        if name in widths:
            widths[name] += max(0, min(width - _line_width(widths), full[name] - widths[name]))
    rows = zip(*(columns[name] for name in widths), strict=True)
    return [[_cut(cell, size) for cell, size in zip(row, widths.values(), strict=True)] for row in rows]


def _line_width(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 3]}..."
