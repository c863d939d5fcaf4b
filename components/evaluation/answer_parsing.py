"""Parsing of the option that an answer names."""

from __future__ import annotations

import re
from collections.abc import Sequence

Options = Sequence[tuple[str, str]]
"""(label, text) of each option, see Question."""

_MARKUP = re.compile(
    r"\\(?:text|textbf|textit|mathrm|mathbf)(?=\s*\{)|\\(?=[()\[\]])|(?<!\w)[*_`$]+|[*_`$]+(?!\w)"
)
_STATEMENT = re.compile(
    r"(?<![^\W_])(?:answer|(?:correct|right|best)\s+(?:option|choice))(?:\s+to\s+th(?:e|is)\s+question)?"
    r"(?P<verb>\s+(?:is|(?:would|must|should|will)\s+be)(?![^\W_]))?(?P<colon>\s*[:：=])?"
    r"|(?P<boxed>\\boxed\s*\{)",
    re.IGNORECASE,
)
_LINE = re.compile(r"\s*(.*)")
_LABEL = re.compile(
    r"""[\s"'“‘{]*(?P<word>(?i:(?:the\s+)?(?:option|choice|letter)\s+))?(?P<open>[(\["'“‘]\s*)?"""
    r"""(?P<label>[A-Z])(?![^\W_]|['’-]\w)(?P<close>\s*[)\]])?"""
)
_LABEL_END = re.compile(r"""\s*(?:$|["'”’.,;:!?/|&+}(]|[-–—]\s|(?:because|since|as)\b)""")
_FURTHER_LABEL = re.compile(
    r"""[\s)\].,;:"'”’}]*"""
    r"""(?:(?:\b(?:and/or|or|and|nor)\b|[/|&+])[\s(\["'“‘]*(?:(?i:option|choice|letter)\s+)?[(\["'“‘]?"""
    r"""|[,;]\s*\(?(?=[A-Z]\)?\s*(?:$|[^\w\s]|(?:or|and)\b)))[A-Z](?![^\W_]|['’-]\w)"""
)
_SEPARATOR = re.compile(r"\s*(?:[.:]\s+)?(?:[-–—]\s+)?")
_NO_OPTION = re.compile(r"\s*(?:not|neither|either|both|none|unclear|unknown)\b", re.IGNORECASE)


def parse_answer(text: str, options: Options) -> str | None:
    """Parse the label of the option that an answer, any text, names; None if it names none, or more than one.

    1. The last statement decides: "Answer: B", "**Answer:** (B)", "the correct answer is B)", "the
       best option would be B", "\\boxed{B}", or an option's text in place of the label. A label is
       a capital letter, alone or followed by punctuation, a bracket, because, since, as, or the
       text of its option: "the answer is A dog", "B cells" and "C-reactive protein" name no label,
       unless an option has that text. A statement names no option if it has another letter, two
       labels ("A or B"), a label with the text of another option, or, after a colon or in a box,
       anything else. "The answer is" followed by other words is not a statement ("this answer is
       supported by ..."), except for not, both, either and similar words.
    2. Without a statement, a text of one line may be a label, alone or with the text of its option:
       "B", "(B)", "B) a stand".
    3. Otherwise the last line may be the text of one option, with or without its label, if no
       earlier line is one, since a list of options is no answer.

    Case matters for labels only; markdown, quotes and closing punctuation are ignored. The text of
    an option must be complete, and must belong to one option only.
    """
    text = _MARKUP.sub("", text)
    options = [(label, _MARKUP.sub("", option)) for label, option in options]
    for statement in reversed(list(_STATEMENT.finditer(text))):
        explicit = statement["colon"] or statement["boxed"]
        if not explicit and not statement["verb"]:
            continue
        match = _LINE.match(text, statement.end())
        line = match[1] if match else ""
        value = line.split("}")[0].strip("{ ") if statement["boxed"] else line
        label = _stated_label(value, options)
        if label is not None or explicit:
            return label or None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    labels = [_line_label(line, options) for line in lines]
    if len(lines) == 1 and labels[0]:
        return labels[0]
    by_text = [_label_of_text(line, options) for line in lines]
    if any(labels[:-1]) or any(by_text[:-1]):
        return None
    return by_text[-1]


def _stated_label(value: str, options: Options) -> str | None:
    """The label that a statement names: '' for none or several, None if it is no statement."""
    texts = dict(options)
    match = _LABEL.match(value)
    if match and not _normalize(value[match.end() :]):
        return match["label"] if match["label"] in texts else ""
    if label := _label_of_text(value, options):
        return label
    if match is None:
        return "" if _NO_OPTION.match(value) else None
    label = match["label"]
    rest = value[match.end() :]
    after = _SEPARATOR.sub("", rest, count=1)
    option_text = texts.get(label, "").strip().rstrip(".,;:!?")
    has_option_text = _starts_with_option(after, option_text)
    if _FURTHER_LABEL.match(after[len(option_text) :] if has_option_text else rest):
        return ""
    if not (has_option_text or match["word"] or match["open"] or match["close"] or _LABEL_END.match(rest)):
        return None
    return label if label in texts and _label_of_text(after, options) in (None, label) else ""


def _starts_with_option(words: str, option_text: str) -> bool:
    """Whether words begin with the complete text of an option."""
    if not option_text or words[: len(option_text)].casefold() != option_text.casefold():
        return False
    rest = words[len(option_text) :]
    return bool(_LABEL_END.match(rest) or _FURTHER_LABEL.match(rest))


def _line_label(line: str, options: Options) -> str | None:
    """The label of a line that is a label, alone or with the text of its option."""
    texts = dict(options)
    match = _LABEL.match(line)
    if match is None or match["label"] not in texts:
        return None
    rest = _normalize(_SEPARATOR.sub("", line[match.end() :], count=1))
    return match["label"] if rest in ("", _normalize(texts[match["label"]])) else None


def _label_of_text(line: str, options: Options) -> str | None:
    """The label of the only option whose text is the line."""
    words = _normalize(line)
    labels = [label for label, option in options if words and _normalize(option) == words]
    return labels[0] if len(labels) == 1 else None


def _normalize(text: str) -> str:
    """A text without case, outer quotes and closing punctuation, and with single spaces."""
    return " ".join(text.casefold().split()).lstrip("\"'“‘ ").rstrip(".,;:!?\"'”’ ")
