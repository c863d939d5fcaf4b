"""Characters that nobody sees, in names and in messages."""

from __future__ import annotations

import unicodedata
from typing import Annotated

from pydantic import AfterValidator

FILLERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0")
"""Letters and marks without a glyph."""
JOINERS = frozenset("\u200c\u200d")
"""They shape letters of Arabic and of the scripts of India, and join the parts of symbols."""


def is_hidden(character: str) -> bool:
    """Whether a character is a control, a format (zero-width, bidi), half a character or a filler."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") or character in FILLERS


def code_point(character: str) -> str:
    """A character as U+XXXX."""
    return f"U+{ord(character):04X}"


def check_visible(text: str, *, lines: str = "\n\t") -> str:
    """Refuse a text that looks like another one because of characters that nobody sees.

    It may have those of `lines`. The ValueError has the rest of a sentence that begins with what the text is.
    """
    for position, character in enumerate(text):
        if not is_hidden(character) or character in lines or character in JOINERS:
            continue
        kind = unicodedata.name(character, "a control character").lower()
        raise ValueError(
            f"holds {code_point(character)} ({kind}) at position {position}, which nobody sees: remove it"
        )
    return text


def composed(text: str) -> str:
    """A text in Unicode's composed form (NFC): an accent is a part of its letter, however it was typed."""
    return unicodedata.normalize("NFC", text)


def check_name(name: str) -> str:
    """The name of a client or the like in its composed form (NFC), by which names are compared.

    It is refused as check_visible does, and where it has lines, or white space around it.
    """
    if name.strip() and name != name.strip():
        raise ValueError("has white space around it: remove it")
    return composed(check_visible(name, lines=""))


PlainName = Annotated[str, AfterValidator(check_name)]
"""A name of one line, without characters that nobody sees."""
