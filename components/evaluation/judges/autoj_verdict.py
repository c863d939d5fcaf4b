"""The verdict of an Auto-J judgment."""

from __future__ import annotations

import re

from components.evaluation.winrate import Verdict

_MARK = re.compile(r"final\s+decision\s+is(?![^\W_])", re.IGNORECASE)
_NAME = r"(?:response[\W_]*(?P<{0}>[12])|(?P<{0}_tie>tie|tied))(?![^\W_]|[.,]\d)"
_DECISION = re.compile(
    r"(?:[\W_]*\b(?:that|it|they|is|are|a|an|the)\b)*[\W_]*" + _NAME.format("decision"), re.IGNORECASE
)
_ALTERNATIVE = re.compile(
    r"(?P<gap>(?:[^\w.!?;]|_)*)"
    r"(?:(?P<conjunction>and/or|or|and|nor|vs|versus)(?:[^\w!?;]|_)*(?:an?(?:[^\w!?;]|_)+)?)?"
    + _NAME.format("alternative")
    + r"|\s*(?P<separator>[/|&,]|or\b|and\b)\s*[12](?![^\W_])",
    re.IGNORECASE,
)
_CLAUSE_END = re.compile(r"(?:[^\w.!?;\n]|_)*(?:[.!?;\n]|$)")


def parse_autoj(text: str) -> Verdict:
    """Parse the verdict of a judgment: the name after the last "final decision is", in any case.

    Markup, quotes, punctuation, line breaks and words such as "that it is a" may stand between. The
    verdict is unparsable if there is no name, another name ("Response 10"), or a choice of names
    ("Response 1 / Response 2 / Tie", "Response 1 or 2", "Response 1, Response 2"). As in the
    authors' code, reasons that follow the name are ignored, even if they mention the other
    response. A further name after a comma, a bracket or a line break is part of a choice only if no
    more words follow it in its line or sentence; after "or", "/" or "and" alone it always is.

    Args:
        text: any text; no text raises an error.
    """
    marks = list(_MARK.finditer(text))
    match = _DECISION.match(text, marks[-1].end()) if marks else None
    if match is None or _offers_choice(text, match.end()):
        return Verdict.UNPARSABLE
    if match["decision_tie"]:
        return Verdict.TIE
    return Verdict.FIRST if match["decision"] == "1" else Verdict.SECOND


def _offers_choice(text: str, end: int) -> bool:
    """Whether further names after a decision make it a choice of names."""
    alternative = _ALTERNATIVE.match(text, end)
    while alternative is not None:
        if _is_joined(alternative) or _CLAUSE_END.match(text, alternative.end()):
            return True
        alternative = _ALTERNATIVE.match(text, alternative.end())
    return False


def _is_joined(alternative: re.Match[str]) -> bool:
    """Whether a further name is joined to the one before it, whatever follows."""
    if alternative["separator"]:
        return alternative["separator"] != ","
    gap = set(alternative["gap"])
    conjunction = (alternative["conjunction"] or "").lower()
    if conjunction == "and":
        # After one of these characters "and" begins a new clause.
        return not gap & set(",:(\n\r-\u2013\u2014")
    return conjunction != "" or bool(gap & set("/|&"))
