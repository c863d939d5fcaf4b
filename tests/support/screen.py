"""What a terminal shows after a program has written to it."""

import re

PARTS = re.compile(r"\x1b\[\??([0-9;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


def screen(written: str) -> list[str]:
    """The lines on a wide terminal, after carriage returns, cursor up, and erased lines."""
    rows = [""]
    row = column = 0
    for number, control, ending, text in PARTS.findall(written):
        if control == "A":
            row = max(0, row - int(number or 1))
        elif control == "K":
            rows[row] = ""
        elif ending == "\r":
            column = 0
        elif ending == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif text:
            line = rows[row].ljust(column)
            rows[row] = line[:column] + text + line[column + len(text) :]
            column += len(text)
    return [line.rstrip() for line in rows]
