"""Dialogues as texts with the markers of HH-RLHF (Bai et al. 2022), and their turns.

A turn begins with 'Human:' or 'Assistant:' at the start of the text or after an empty line, as in
HH-RLHF. In dialogues that have no empty lines there, it begins with a marker at the start of a line.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Literal, TypedDict

SPEAKERS = ("Human:", "Assistant:")
MARKERS = re.compile(r"\b(?:Human|Assistant):")
AFTER_EMPTY_LINE = re.compile(r"(?:\A\s*|\n[ \t]*\r?\n[ \t]*)(Human|Assistant):")
AT_LINE_START = re.compile(r"(?:\A\s*|\n[ \t]*)(Human|Assistant):")


class Turn(TypedDict):
    """A turn of a dialogue, as chat templates take it."""

    role: Literal["user", "assistant"]
    content: str


def turn_marker(text: str) -> re.Pattern[str]:
    """What begins the turns of a whole dialogue: a marker after an empty line, or at any line's start.

    The latter only where the first gives no dialogue and the second one does: the text begins with a
    marker, the speakers alternate, and the last turn is the user's. Other markers are quotations.
    """
    if AFTER_EMPTY_LINE.search(text, 1) and _is_dialogue(AFTER_EMPTY_LINE, text):
        return AFTER_EMPTY_LINE
    return AT_LINE_START if _is_dialogue(AT_LINE_START, text) else AFTER_EMPTY_LINE


def _is_dialogue(marker: re.Pattern[str], text: str) -> bool:
    beginning, *parts = marker.split(text.strip())
    speakers = parts[::2]
    alternate = all(one != other for one, other in pairwise(speakers))
    ends_with_user = bool(parts) and (speakers[-1] == "Human" or not parts[-1].strip())
    return not beginning and alternate and ends_with_user


def dialogue_turns(text: str, marker: re.Pattern[str] | None = None) -> list[Turn]:
    """The turns of a dialogue, the user's first.

    Turns of one speaker in a row are joined by an empty line, and empty turns are left out. A text
    without markers is one turn of the user.

    The text may have lost its start. What precedes the first marker is the end of the other
    speaker's turn. Where that is the assistant's, it is left out, and so are turns of the assistant
    before the user's first, which chat templates refuse.

    Args:
        text: of the dialogue, up to where the assistant answers.
        marker: what begins a turn, see `turn_marker`; None: as in this text. A text that has lost its
            start needs that of the whole one.
    """
    beginning, *parts = (marker or turn_marker(text)).split(text)
    if not parts:
        return [Turn(role="user", content=text.strip())]
    speakers = ["Human" if parts[0] == "Assistant" else "Assistant", *parts[::2]]
    turns: list[Turn] = []
    for speaker, part in zip(speakers, [beginning, *parts[1::2]], strict=True):
        role: Literal["user", "assistant"] = "user" if speaker == "Human" else "assistant"
        content = part.strip()
        if not content or (not turns and role == "assistant"):
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += f"\n\n{content}"
        else:
            turns.append(Turn(role=role, content=content))
    return turns or [Turn(role="user", content="")]


def has_repeated_speaker(text: str) -> bool:
    """Whether two turns in a row are of one speaker, as where a quotation looks like a turn."""
    _, *parts = turn_marker(text).split(text)
    return any(one == other for one, other in pairwise(parts[::2]))


def is_unread_dialogue(text: str) -> bool:
    """Whether a text is one turn, although markers are in it."""
    turns = dialogue_turns(text)
    return len(turns) == 1 and MARKERS.search(turns[0]["content"]) is not None
