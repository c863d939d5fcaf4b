"""Scores of thoughts, parsed from an evaluator's answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Score(NamedTuple):
    """A score of a thought."""

    value: float | None  # from 1 to 10; None if no score could be parsed
    attempts: int  # number of requests for it


_MARKUP = re.compile(r"\\boxed(?![^\W_])|[*_`$#{}\\]")
_SCALE = r"(?:(?:on\s+a\s+scale\s+)?(?:from\s+|of\s+)?1\s*(?:[-–—]|to)\s*10|out\s+of\s+10)(?!\d)"
_LABEL = (
    r"(?P<label>(?:(?:the|my|final|overall)\s+){0,2}(?:score|rating)\b\s*"
    rf"(?:\(\s*{_SCALE}\s*\)|\[\s*{_SCALE}\s*\]|{_SCALE})?"
    r"\s*(?:[:=]|is\b:?|[-–—](?=\s))?\s*)?"
)
_SCORE = re.compile(
    rf"""[\s"'“‘(\[]*{_LABEL}["'“‘(\[]?\s*(?P<score>10|[1-9])(?!\d|[.,]\d)"""
    rf"""(?P<scale>\s*(?:(?:/|(?:out\s+)?of\b)\s*10(?!\d)|\(\s*(?:{_SCALE}|/\s*10)\s*\)))?[)\]"'”’]*""",
    re.IGNORECASE,
)
_LINE_END = re.compile(r"""\s*[.!]?[\s)\]"'”’]*$""")
_REASON = re.compile(r"""\s*(?:[,;]\s|(?:because|since|as)\b|\([^()]*\)[.!]?\s*$)""", re.IGNORECASE)
_SENTENCE = re.compile(r"[.!:]\s|\s+[-–—]\s")
_NUMBER = re.compile(r"\d+")
_THINK_START = "<think>"
_THINK_END = "</think>"


def parse_score(text: str, finished: bool = True) -> int | None:
    """Parse the score of an evaluator's answer, a whole number from 1 to 10; None if there is none.

    Text up to the last </think> is ignored, and an answer whose <think> is not closed has no score.

    1. If the answer ended by itself, its last line that is not blank is parsed. It begins with the
       number, or with "Score", "The rating is", "Final score (1-10):" and the like before it. "/10"
       or "out of 10" may follow, and then the line ends or gives a reason: after a comma or a
       semicolon, because, since, as, or in brackets. A label or a scale shows that the number is a
       score, so that a reason may then also follow a full stop, a colon or a dash.
    2. If the answer was cut off (not `finished`), its end is unknown, and reasoning cannot be told
       from a score. Then its first line is parsed, which must be the score alone, as of a model that
       writes "8" and continues up to the limit. It is not parsed if it is a bare 1 at the end of the
       answer, which may be the beginning of a 10, or if a later line is another score alone.

    "8", "Score: 8", "**8/10**", "Score (1-10): 8" and "8 out of 10 because ..." are 8. Not parsed
    are numbers elsewhere, with a sign, with decimals or on another scale; ranges, and lines with a
    second, different number ("7 or 8", "8-9"); numbers of a list ("2. Next, ..."); and words.

    """
    answer = text[text.rfind(_THINK_END) + len(_THINK_END) :] if _THINK_END in text else text
    answer = _MARKUP.sub(" ", answer)
    lines = [line for line in answer.splitlines() if line.strip()]
    if not lines or _THINK_START in answer:
        return None
    if finished:
        return _parse_line(lines[-1], (_LINE_END, _REASON), (_LINE_END, _REASON, _SENTENCE))
    scores = [_parse_line(line, (_LINE_END,), (_LINE_END,)) for line in lines]
    if any(score not in (None, scores[0]) for score in scores[1:]):
        return None
    may_be_ten = scores[0] == 1 and len(lines) == 1 and answer.rstrip(" ").endswith("1")
    return None if may_be_ten else scores[0]


def _parse_line(
    line: str, ends: Sequence[re.Pattern[str]], ends_if_named: Sequence[re.Pattern[str]]
) -> int | None:
    """Parse the score of a line without markup, after which one of the patterns must follow.

    A score that has a label or a scale may end by those of `ends_if_named`.
    """
    # With single spaces the patterns take time in proportion to the line.
    line = " ".join(line.split())
    match = _SCORE.match(line)
    if match is None or any(number != match["score"] for number in _NUMBER.findall(line, match.end())):
        return None
    allowed = ends_if_named if match["label"] or match["scale"] else ends
    return int(match["score"]) if any(end.match(line, match.end()) for end in allowed) else None
