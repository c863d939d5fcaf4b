"""When two texts of a data set are the same: a key for each of the two questions that are asked.

`same_text` says which prompts must not be on both sides of a split, an overlap or a hold-out, and takes
any doubt for yes. `one_prompt` says which texts are one prompt, with its own answers, rows and counts:
code that differs in indentation, or genotypes that differ in case, are prompts of their own in one split.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

from components.config.name_checks import composed, is_hidden

VARIATION_SELECTORS = (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))
"""Marks that choose among the glyphs of a character, such as a symbol in color."""
TAGS = range(0xE0020, 0xE0080)
"""Marks that spell which flag a symbol is."""
RAISED = ("<super>", "<sub>", "<fraction>", "<circle>")
"""Decompositions after which a text has another meaning: x\u00b2 is not x2."""
CACHED = 2**16
"""Texts whose key is kept, since several steps of a preparation ask for it."""
EDGE = "\ue000"
"""A character for private use, written around what such a character decomposes into."""


class _Visible(dict[int, int | str | None]):
    """For str.translate: None for code points that nobody sees, but for white space; EDGE around others."""

    def __missing__(self, code: int) -> int | str | None:
        character = chr(code)
        hidden = (is_hidden(character) and not character.isspace()) or code in VARIATION_SELECTORS
        value: int | str | None = None if hidden and code not in TAGS else code
        if unicodedata.decomposition(character).startswith(RAISED):
            value = f"{EDGE}{character}{EDGE}"
        return self.setdefault(code, value)


_VISIBLE = _Visible()


@lru_cache(CACHED)
def same_text(text: str) -> str:
    """A key that is equal for texts that differ only in case, white space and code points.

    It is Unicode's caseless compatibility form (NFKC, full case folding, NFKC again; Unicode 3.13, D146),
    without characters that nobody sees and with single spaces. Raised, lowered and circled characters and
    fractions stay apart from others. Its version is versions.SAME_TEXT.
    """
    text = text.translate(_VISIBLE).casefold()
    if not text.isascii():
        folded = unicodedata.normalize("NFKC", text).casefold()
        text = unicodedata.normalize("NFKC", folded)
    return " ".join(text.split())


def one_prompt(text: str) -> str:
    """A key that is equal for texts that differ only in composed accents (NFC) and outer white space."""
    return composed(text).strip()
