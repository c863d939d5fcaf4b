"""Undoing the tokenisation of ACLSum's sentences ("models ( LMs ) reach 45 % ," -> "models (LMs) reach 45%,").

Its summaries were typed and its sentences come out of a tokeniser, so spacing alone would tell which of two texts is
the expert's summary. Both go through here.
"""

from __future__ import annotations

import re

_CLOSING = {",", ".", ";", ":", "?", "!", "%", ")", "]", "}", "...", "…", "'s", "'re", "'ve", "'ll", "'d", "'m", "n't", "’s", "n’t", "⟩"}
_OPENING = {"(", "[", "{", "$", "⟨"}


def detokenize(text: str) -> str:
    """Natural spacing around punctuation, brackets, quotes, slashes, clitics and ranges; one space between words.

    A text that is spaced naturally already comes back unchanged, but for runs of white space.
    """
    tokens = text.replace("``", '"').replace("''", '"').split()
    out = ""
    glue = True                     # the next token follows without a space
    quotes = {'"': 0, "'": 0}       # quotes that are open
    for i, token in enumerate(tokens):
        before, after = tokens[i - 1] if i else "", tokens[i + 1] if i + 1 < len(tokens) else ""
        left, right = glue, False
        if token in _CLOSING:
            left = True
        elif token in _OPENING:
            right = True
        elif token in quotes:
            opens = not quotes[token] and token in tokens[i + 1:] and (token == '"' or not before.endswith("s"))
            left, right = (glue, True) if opens else (True, False)
            quotes[token] = int(opens)
        elif (token == "/" and before and after) or (token in {"-", "–"} and before[-1:].isdigit() and after[:1].isdigit()):
            left = right = True
        elif token.endswith("/") and len(token) > 1:
            right = True
        elif re.match(r"-[A-Za-z]", token) and before:
            token = "- " + token[1:]        # a dash that lost its right-hand space
        elif token == "1" and before == "F":
            left = True                     # F 1, from a subscript
        out += token if left else " " + token
        glue = right
    return re.sub(r"\bcan not\b", "cannot", out.strip())


def is_sentence(text: str) -> bool:
    """Whether a line holds a word; stray footnote marks ("1", "*") do not."""
    return re.search(r"[^\W\d_]", text) is not None
