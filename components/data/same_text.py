"""When two texts of a data set are the same text: one key for splits, held-out prompts and repeats."""

from __future__ import annotations

import unicodedata

from components.config.name_checks import is_hidden

VARIATION_SELECTORS = range(0xFE00, 0xFE10)
"""Marks that choose among the glyphs of a character, such as a symbol in color."""


class _Visible(dict[int, int | None]):
    """Code points for str.translate: None for those that nobody sees, but for white space."""

    def __missing__(self, code: int) -> int | None:
        character = chr(code)
        hidden = (is_hidden(character) and not character.isspace()) or code in VARIATION_SELECTORS
        return self.setdefault(code, None if hidden else code)


_VISIBLE = _Visible()


def same_text(text: str) -> str:
    """A key that is equal for texts that differ only in case, white space and code points.

    It is Unicode's caseless compatibility form (NFKC, full case folding, NFKC again; Unicode 3.13, D146),
    without characters that nobody sees and with single spaces. Its version is versions.SAME_TEXT.
    """
    if text.isascii():
        text = text.casefold()
    else:
        folded = unicodedata.normalize("NFKC", text.translate(_VISIBLE)).casefold()
        text = unicodedata.normalize("NFKC", folded)
    return " ".join(text.split())
