"""Token ids of texts, for selectors and policies alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Text = TypeVar("Text", bound=tuple[Any, ...])


def leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that a tokenizer puts before a text, e.g. BOS; empty if it adds none.

    They are read from an encoded text. transformers drops `add_bos_token` where there is a
    tokenizer.json, whose post-processor adds the token nevertheless.
    """
    return surrounding_ids(tokenizer)[0]


def surrounding_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before a text, see `leading_ids`, and those after it."""
    text = "a"
    plain = tokenizer.encode(text, add_special_tokens=False)
    complete: list[int] = tokenizer.encode(text)
    start = next((n for n in range(len(complete)) if complete[n : n + len(plain)] == plain), 0)
    return complete[:start], complete[start + len(plain) :]


CUT = "\ufdd0"
"""Stands in a text between parts that are encoded by themselves, so that no token spans them (`Marks.cut`).

It is one of Unicode's noncharacters, which are for internal use and stand in no text.
"""

HALF = "\ufffd"
"""What a tokenizer decodes a part of a character to."""


class Marks:
    """Added tokens of a tokenizer that give a sequence its structure, and are none within an owner's text.

    Whether a text has one is what the tokenizer says: by its ids, also where its normalizer makes the token,
    as NFKC does of letters of full width.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: Collection[int]) -> None:
        """Those of `ids` that are added tokens of more than one letter; others cannot be told from text."""
        added = tokenizer.added_tokens_decoder
        self.tokenizer = tokenizer
        self.names = {i: added[i].content for i in ids if i in added and len(added[i].content.strip()) > 1}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = None
        if any(added[i].normalized for i in self.names):
            self._normalizer = getattr(backend, "normalizer", None)
        written = {form for name in self.names.values() for form in (name, self._normalized(name).strip())}
        longest_first = sorted(filter(None, written), key=lambda name: (-len(name), name))
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def _normalized(self, text: str) -> str:
        return text if self._normalizer is None else cast("str", self._normalizer.normalize_str(text))

    def find(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        """The tokens in a text, and the places where they begin and end."""
        if not self._pattern.search(text) and (
            self._normalizer is None or not self._pattern.search(self._normalized(text))
        ):
            return []
        if not self.tokenizer.is_fast:
            return [(match[0], match.span()) for match in self._pattern.finditer(text)]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        places = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [
            (self.names[token], (start, end))
            for token, (start, end) in places
            if token in self.names and len(text[start:end].strip()) > 1  # a letter may be one when normalized
        ]

    def cut(self, text: str, with_: str = CUT) -> str:
        """A text in whose tokens CUT, or another text, follows the first letter."""
        while True:
            letters = [end - len(text[start:end].lstrip()) + 1 for _, (start, end) in self.find(text)]
            uncut = [letter for letter in letters if not text.startswith(with_, letter)]
            if not uncut:  # one that is cut is still a token to a normalizer that drops what cuts it
                return text
            for letter in reversed(uncut):
                text = text[:letter] + with_ + text[letter:]


class TextMarks(NamedTuple):
    """What is no token in texts of each kind: an answer may hold the marks of thoughts."""

    prompt: Marks
    answer: Marks


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text without special tokens around it; what CUT divides is encoded by itself."""
    first, *others = text.split(CUT)
    ids: list[int] = tokenizer.encode(first, add_special_tokens=False)
    for part in others:
        ids += encode_part(tokenizer, part)
    return ids


def decode_cut(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], whole: str) -> str:
    """The text of some ids of a whole text, without the halves of characters at its ends.

    A character has at most three tokens that are a part of it alone. A decoder may write a whole run of bytes
    as U+FFFD where one at its end is a half.
    """
    text = cast("str", tokenizer.decode(list(ids)))
    if HALF not in text or HALF in whole:
        return text
    for start, end in sorted(product(range(4), range(4)), key=sum):
        part = cast("str", tokenizer.decode(list(ids[start : len(ids) - end])))
        if HALF not in part:
            return part
    return text.strip(HALF)


def decode_unfinished(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of a completion that was cut, without special tokens and half a character at its end."""
    whole = text = cast("str", tokenizer.decode(list(ids), skip_special_tokens=True))
    for end in range(1, 4):
        if not text.endswith(HALF):
            return text
        text = cast("str", tokenizer.decode(list(ids[:-end]), skip_special_tokens=True))
    return whole if text.endswith(HALF) else text


def encode_continuation(tokenizer: PreTrainedTokenizerBase, text: str, continuation: str) -> list[int]:
    """Token ids of a continuation as they are in the joined text, after the ids of the text.

    The ids of the text and those returned are the ids of the joined text, wherever the tokenizer
    has a boundary between the two. Where a token would span it, e.g. one for 'lovely' in 'lov' and
    'ely', the ids of the text stay, as a policy generates from them; the continuation's are then
    those after a line break, before which SentencePiece puts no space. White space between the two
    belongs to the continuation.
    """
    for before in (text, "\n"):
        ids = encode_text(tokenizer, before)
        joined = encode_text(tokenizer, before + continuation)
        if joined[: len(ids)] == ids:
            return joined[len(ids) :]
    return encode_text(tokenizer, continuation)


def encode_part(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that is a part of a sequence, encoded by itself.

    The space that the tokenizers of Llama 2 and others put before every text is left out.
    """
    if _adds_space(tokenizer):  # no token spans a line break and a letter, or a colon and white space
        return encode_continuation(tokenizer, ":" if text[:1].isspace() else "\n", text)
    return encode_text(tokenizer, text)


@lru_cache(maxsize=8)
def _adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    alone = tokenizer.encode("a", add_special_tokens=False)
    return bool(alone != encode_continuation(tokenizer, "\n", "a"))


def encode_beginning(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of the beginning of a sequence: `leading_ids` and the text.

    A token that the tokenizer would put after the text, such as EOS, is left out.
    """
    return [*leading_ids(tokenizer), *encode_text(tokenizer, text)]


def sort_distinct(texts: Sequence[Text], length: Callable[[Text], int]) -> tuple[list[Text], list[int]]:
    """The distinct ones of N texts by their lengths, and the position of each text among them, [N].

    Texts of similar length share a batch, so that little of it is padding. The batches follow from the
    distinct texts, so that the last bits of a score do not depend on the order of the texts.
    """
    distinct = sorted(set(texts), key=lambda text: (length(text), text))
    positions = {text: position for position, text in enumerate(distinct)}
    return distinct, [positions[text] for text in texts]
