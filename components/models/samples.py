"""What is asked of a generation of completions, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class SampleKey(NamedTuple):
    """What the noise of a prompt's completions is a function of, besides their number."""

    seed: int  # of the request that the prompt belongs to
    position: int  # of the prompt in that request


@dataclass(frozen=True)
class Completion:
    """A generated completion."""

    ids: tuple[int, ...]  # including the end-of-sequence token if it was reached
    # Decoded without special tokens, stripped. Judges and rewards read it; training takes the ids,
    # which begin with the space or line break that the model wrote.
    text: str
    finished: bool  # it ended by itself rather than at the length limit


class Reply(NamedTuple):
    """A text that a policy or an endpoint wrote, with the white space around it."""

    text: str
    finished: bool  # it ended by itself rather than at a limit


@dataclass(frozen=True)
class GenerationSettings:
    """How completions are generated."""

    batch_size: int  # sequences generated at once
    max_new_tokens: int
    temperature: float = 0.0  # 0 is greedy search
    count: int = 1  # completions per prompt
