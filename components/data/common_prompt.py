"""The prompt of two texts without one: their common beginning, as TRL's implicit prompt.

Of two dialogues (HH-RLHF, see `dialogues`) it is the dialogue before the assistant's last turn that both
have. Of other texts it ends before the last white space of the common beginning, and the completions begin
there, so that prompt and completion together are the text. TRL cuts at the first character that differs,
which may be within a word or within an answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile
from typing import Any
from unicodedata import category

from components.data.dialogues import AFTER_EMPTY_LINE, AT_LINE_START, SPEAKERS
from components.data.raw import column_names
from components.data.records import DataError

UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u9fff\uff00-\uff65\U00020000-\U0003ffff]"
)
"""A character of Thai, Lao, Burmese, Khmer, Chinese or Japanese, which have no white space between words."""
JOINED = re.compile("\u200d.|.[\u200c\u200d]|[\U0001f1e6-\U0001f1ff]{2}", re.DOTALL)
"""Two characters of one sign: at a joiner, or the letters of a flag."""
LEAVE_OUT = "complete such rows, or leave them out (data.drop_invalid)"


def with_common_prompt(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A row of a table that has no column of prompts, with the common beginning of its texts as the prompt.

    Lists of messages stay as they are, since `conversations` reads their common beginning.

    Raises:
        DataError: its texts cannot be divided so.
    """
    if not {"chosen", "rejected"} <= set(row):
        return row  # what is missing is reported
    if not (isinstance(row["chosen"], str) and isinstance(row["rejected"], str)):
        return {"prompt": "", **row}
    for column in ("chosen", "rejected"):
        if not row[column].strip():
            raise DataError(f"{where}: column '{column}' is empty: {LEAVE_OUT}")
    try:
        prompt, chosen, rejected = split_common_prompt(row["chosen"], row["rejected"])
    except ValueError as error:
        raise DataError(f"{where}: {error}: {LEAVE_OUT}") from None
    if not prompt.strip():
        raise DataError(
            f"{where}: column 'prompt' is missing, and chosen and rejected have no common beginning in its"
            f" place; there are: {column_names(row)}; 'data.columns={{prompt: ...}}' renames"
        )
    return {**row, "prompt": prompt, "chosen": chosen, "rejected": rejected}


def split_common_prompt(chosen: str, rejected: str) -> tuple[str, str, str]:
    """The common beginning of two texts, empty where there is none, and what remains of each.

    Raises:
        ValueError: nothing remains, or an earlier turn than the last one differs.
    """
    marker = _dialogue_marker(chosen, rejected)
    if marker is not None:
        prompt, *answers = _before_answers(marker, chosen, rejected)
    else:
        end = _gap(chosen, rejected)
        prompt, *answers = chosen[:end], chosen[end:], rejected[end:]
    if not all(answer.strip() for answer in answers):
        raise ValueError("chosen or rejected has nothing after their common beginning, which is the prompt")
    return prompt, answers[0], answers[1]


def _dialogue_marker(*texts: str) -> re.Pattern[str] | None:
    """What begins the turns of texts that are all dialogues; None for other texts."""
    begin = all(text.lstrip().startswith(SPEAKERS) for text in texts)
    for marker in (AFTER_EMPTY_LINE, *([AT_LINE_START] if begin else [])):
        if all("Assistant" in marker.findall(text) for text in texts):
            return marker
    return None


def _before_answers(marker: re.Pattern[str], chosen: str, rejected: str) -> tuple[str, str, str]:
    common = marker.finditer(chosen, 0, _common_length(chosen, rejected))
    marks = [mark for mark in common if mark[1] == "Assistant"]
    if not marks or any(marker.search(text, marks[-1].end()) for text in (chosen, rejected)):
        raise ValueError("chosen and rejected, which are dialogues, differ before the assistant's last turn")
    start, end = marks[-1].span()
    return chosen[:start].strip(), chosen[end:].strip(), rejected[end:].strip()


def _gap(chosen: str, rejected: str) -> int:
    """Where the prompt ends: before white space, or where there is none at the edge of a word; 0: nowhere."""
    start = len(chosen) - len(chosen.lstrip())
    ends = range(_common_length(chosen, rejected), start, -1)
    for end in ends:
        following = chosen[end : end + 1], rejected[end : end + 1]
        if all(map(str.isspace, following)):
            return len(chosen[:end].rstrip())
        if UNSPACED.match(chosen[end - 1]) and not any(map(_is_mark, following)):
            return end
    for end in ends:
        following = chosen[end : end + 1], rejected[end : end + 1]
        is_inside = _is_word(chosen[end - 1]) and any(map(_is_word, following))
        if not is_inside and not any(_is_joined(chosen[end - 1], character) for character in following):
            return end
    return 0


def _is_joined(character: str, following: str) -> bool:
    """Whether two characters are parts of one sign: with a mark or a modifier, a joiner, or of a flag."""
    is_modifier = following != "" and category(following) in ("Mn", "Mc", "Me", "Sk")
    return is_modifier or bool(JOINED.fullmatch(character + following))


def _common_length(chosen: str, rejected: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))


def _is_mark(character: str) -> bool:
    return character != "" and category(character).startswith("M")


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_" or _is_mark(character)
