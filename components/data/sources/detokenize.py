"""Undoes the tokenization of ACLSum: "models ( LMs ) reach" becomes "models (LMs) reach".

Its summaries were typed and its sentences are tokenized, so spacing alone would tell which of two
texts is the expert's summary. Both are detokenized.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_CLOSING = {
    *(",", ".", ";", ":", "?", "!", "%", ")", "]", "}", "...", "…", "⟩"),
    *("'s", "'re", "'ve", "'ll", "'d", "'m", "n't", "’s", "n’t"),
}
_OPENING = {"(", "[", "{", "$", "⟨"}
_QUOTES = {'"', "'"}


def detokenize(text: str) -> str:
    """Restore natural spacing around punctuation, brackets, quotes, slashes, clitics and ranges.

    A text with natural spacing is unchanged, except that runs of white space become one space.
    """
    tokens = text.replace("``", '"').replace("''", '"').split()
    output = ""
    glued = True  # no space before the next token
    open_quotes: set[str] = set()
    for i, token in enumerate(tokens):
        if token in _QUOTES:
            glue_left, glue_right = _quote_spacing(tokens, i, glued, open_quotes)
        else:
            glue_left, glue_right = _spacing(tokens, i, glued)
        if i and re.match(r"-[A-Za-z]", token) and not token.endswith("/"):
            token = "- " + token[1:]  # a dash without its right-hand space
        output += token if glue_left else " " + token
        glued = glue_right
    return re.sub(r"\bcan not\b", "cannot", output.strip())


def _quote_spacing(tokens: Sequence[str], i: int, glued: bool, open_quotes: set[str]) -> tuple[bool, bool]:
    """Whether a quote is glued to the tokens on its left and right; updates the open quotes."""
    quote = tokens[i]
    possessive = quote == "'" and i > 0 and tokens[i - 1].endswith("s")
    if quote not in open_quotes and quote in tokens[i + 1 :] and not possessive:
        open_quotes.add(quote)
        return glued, True
    open_quotes.discard(quote)
    return True, False


def _spacing(tokens: Sequence[str], i: int, glued: bool) -> tuple[bool, bool]:
    """Whether a token is glued to the tokens on its left and right."""
    token = tokens[i]
    before = tokens[i - 1] if i else ""
    after = tokens[i + 1] if i + 1 < len(tokens) else ""
    if token in _CLOSING:
        return True, False
    if token in _OPENING:
        return glued, True
    is_range = token in {"-", "–"} and before[-1:].isdigit() and after[:1].isdigit()
    if is_range or (token == "/" and before and after):
        return True, True
    if token.endswith("/") and len(token) > 1:
        return glued, True
    subscript = token == "1" and before == "F"  # the F1 score
    return glued or subscript, False


def is_sentence(text: str) -> bool:
    """Whether a line has a word; stray footnote marks ("1", "*") have none."""
    return re.search(r"[^\W\d_]", text) is not None
