"""Characters that nobody sees, in names and in messages."""

from __future__ import annotations

import unicodedata
from typing import Annotated

from pydantic import AfterValidator

MAX_NAME = 1000
"""Characters of the name of a client, a domain or the like."""
FILLERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0")
"""Letters and marks without a glyph."""
JOINERS = frozenset("\u200c\u200d")
"""They shape letters of Arabic and of the scripts of India, and join the parts of symbols."""
SHAPED = range(0x0600, 0x1900)
"""The blocks of these scripts."""


def is_hidden(character: str) -> bool:
    """Whether a character is a control, a format (zero-width, bidi), half a character or a filler."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") or character in FILLERS


def code_point(character: str) -> str:
    """A character as U+XXXX."""
    return f"U+{ord(character):04X}"


def check_visible(text: str) -> str:
    """Refuse a text that looks like another one because of characters that nobody sees; it may have lines.

    The ValueError has the rest of a sentence that begins with what the text is.
    """
    for position, character in enumerate(text):
        if not is_hidden(character) or character in "\n\t" or _is_spelling(text, position):
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
    if len(name) > MAX_NAME:
        raise ValueError(f"has {len(name):,} characters, but a name has at most {MAX_NAME:,}: shorten it")
    for character in "\n\t":
        if character in name:
            raise ValueError(
                f"holds {code_point(character)} at position {name.index(character)}, but a name is one line"
                " without tabs: remove it"
            )
    if name.strip() and name != name.strip():
        raise ValueError(f"is {name[:40]!r}, with white space around it: remove it")
    return composed(check_visible(name))


def _is_spelling(text: str, position: int) -> bool:
    """Whether a joiner is between two letters of a script that needs it, or two parts of a symbol."""
    neighbors = text[max(position - 1, 0) : position] + text[position + 1 : position + 2]
    joined = [ord(one) in SHAPED or unicodedata.category(one) in ("So", "Sk", "Mn") for one in neighbors]
    return text[position] in JOINERS and joined == [True, True]


PlainName = Annotated[str, AfterValidator(check_name)]
"""A name of one line, without characters that nobody sees, of at most MAX_NAME characters."""
