"""Dialogues as texts with the markers of HH-RLHF (Bai et al. 2022), and their turns.

A turn begins with 'Human:' or 'Assistant:', at the start of the text or after an empty line.
"""

from __future__ import annotations

import re
from typing import Literal, TypedDict

_MARKER = re.compile(r"(?:\A|\n\n)[ \t]*(Human|Assistant):")


class Turn(TypedDict):
    """A turn of a dialogue, as chat templates take it."""

    role: Literal["user", "assistant"]
    content: str


def dialogue_turns(text: str) -> list[Turn]:
    """The turns of a dialogue, the user's first.

    Turns of one speaker in a row are joined by an empty line, and empty turns are left out. A text
    without markers is one turn of the user.

    The text may have lost its start. What precedes the first marker is the end of the other
    speaker's turn. Where that is the assistant's, it is left out, and so are turns of the assistant
    before the user's first, which chat templates refuse.

    Args:
        text: of the dialogue, up to where the assistant answers.
    """
    beginning, *parts = _MARKER.split(text)
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
