"""Errors whose messages are written for the user, and the sentence for an unknown name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class UserError(Exception):
    """An error that its message explains. It is shown to the user without a stack trace."""


class RecipeError(UserError, ValueError):
    """A recipe or an override that cannot be run."""


class ExpectedSectionError(ValueError):
    """A value that should be a section. It is not repeated in the message, because it may be a secret."""


def unknown_name(key: str, name: str, known_names: Iterable[str]) -> str:
    """The sentence for a name that is not registered, with the registered names and the nearest."""
    names = sorted(known_names)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
    return f"{key} '{name}' is not known; there are: {', '.join(names) or 'none'}.{hint}"


def is_kind(text: str) -> bool:
    """Whether a text can be the name of a kind. Other text is not repeated in errors; it may be a secret."""
    return re.fullmatch(r"[A-Za-z0-9_-]+", text) is not None
