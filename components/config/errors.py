"""Errors whose messages are written for the user, and the sentence for an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from components.config.name_checks import code_point, is_hidden


class UserError(Exception):
    """An error that its message explains. It is shown to the user without a stack trace.

    A message repeats names and values of the user's files, of which characters that nobody sees are shown as
    U+XXXX.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(_readable(str(message)))


class RecipeError(UserError, ValueError):
    """A recipe or an override that cannot be run."""


class ExpectedSectionError(ValueError):
    """A value that should be a section. It is not repeated in the message, because it may be a secret."""


def _readable(text: str) -> str:
    return "".join(code_point(one) if is_hidden(one) and one != "\n" else one for one in text)


def unknown_name(key: str, name: str, known_names: Iterable[str]) -> str:
    """The sentence for a name that is not registered, with the registered names and the nearest."""
    names = sorted(known_names)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
    return f"{key} {name!r} is not known; there are: {', '.join(names) or 'none'}.{hint}"
