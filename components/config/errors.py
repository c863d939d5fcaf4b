"""Errors whose messages are written for the user, and the sentence for an unknown name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from components.config.name_checks import code_point, is_hidden

MAX_LINES = 100
"""Of a message, which may have one for each error of a file."""
MAX_LINE = 2000
"""Characters of a line of a message."""


class UserError(Exception):
    """An error that its message explains. It is shown to the user without a stack trace.

    A message repeats names and values of the user's files. So characters that nobody sees are shown as
    U+XXXX, and a message of more than MAX_LINES lines, or a line of more than MAX_LINE characters, is
    shortened in its middle.
    """

    def __init__(self, message: object = "") -> None:
        lines = _readable(str(message)).split("\n")
        if len(lines) > MAX_LINES:
            lines[MAX_LINES - 2 : -1] = [f"... {len(lines) - MAX_LINES + 1} more lines ..."]
        super().__init__("\n".join(map(_within_line, lines)))


class RecipeError(UserError, ValueError):
    """A recipe or an override that cannot be run."""


class ExpectedSectionError(ValueError):
    """A value that should be a section. It is not repeated in the message, because it may be a secret."""


def _readable(text: str) -> str:
    return "".join(code_point(one) if is_hidden(one) and one != "\n" else one for one in text)


def _within_line(line: str) -> str:
    """A line with at most MAX_LINE characters: its beginning says where, and its end what to do."""
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 505]} ... {line[-500:]}"


def unknown_name(key: str, name: str, known_names: Iterable[str]) -> str:
    """The sentence for a name that is not registered, with the registered names and the nearest."""
    names = sorted(known_names)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
    return f"{key} {name!r} is not known; there are: {', '.join(names) or 'none'}.{hint}"


def is_kind(text: str) -> bool:
    """Whether a text can be the name of a kind. Other text is not repeated in errors; it may be a secret."""
    return re.fullmatch(r"[A-Za-z0-9_-]+", text) is not None
