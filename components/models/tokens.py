"""Token ids of texts, for selectors and policies alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

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
    start = next(n for n in range(len(complete)) if complete[n : n + len(plain)] == plain)
    return complete[:start], complete[start + len(plain) :]


def control_tokens(tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int] = ()) -> frozenset[str]:
    """The texts that a tokenizer reads as a token that begins or ends a text or a turn, or is not text.

    They are the tokens of its roles, such as BOS and EOS, the special ones that are in the text of its
    chat template, and those that end a completion (`find_stop_ids`), except those that texts have, such as a
    line break; ChatTemplate.written_tokens has those that the template puts together. Other special tokens of
    a vocabulary, such as `<filename>`, have no such meaning.
    """
    templates = tokenizer.chat_template or ""
    written = templates if isinstance(templates, str) else " ".join(templates.values())
    added = tokenizer.added_tokens_decoder
    special = {str(token) for token in added.values() if token.special}
    roles = set(map(str, tokenizer.all_special_tokens))
    stops = {str(added[token]) for token in stop_ids if token in added}
    return frozenset(filter(str.strip, {*roles, *stops, *(token for token in special if token in written)}))


def encode_continuation(tokenizer: PreTrainedTokenizerBase, text: str, continuation: str) -> list[int]:
    """Token ids of a continuation as they are in the joined text, after the ids of the text.

    The ids of the text and those returned are the ids of the joined text, wherever the tokenizer
    has a boundary between the two. Where a token would span it, e.g. one for 'lovely' in 'lov' and
    'ely', the ids of the text stay, as a policy generates from them; the continuation's are then
    those after a line break, before which SentencePiece puts no space. White space between the two
    belongs to the continuation.
    """
    for before in (text, "\n"):
        ids = tokenizer.encode(before, add_special_tokens=False)
        joined: list[int] = tokenizer.encode(before + continuation, add_special_tokens=False)
        if joined[: len(ids)] == ids:
            return joined[len(ids) :]
    return cast("list[int]", tokenizer.encode(continuation, add_special_tokens=False))


def encode_part(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that is a part of a sequence, encoded by itself.

    The space that the tokenizers of Llama 2 and others put before every text is left out.
    """
    if _adds_space(tokenizer):  # no token spans a line break and a letter, or a colon and white space
        return encode_continuation(tokenizer, ":" if text[:1].isspace() else "\n", text)
    return cast("list[int]", tokenizer.encode(text, add_special_tokens=False))


@lru_cache(maxsize=8)
def _adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    alone = tokenizer.encode("a", add_special_tokens=False)
    return bool(alone != encode_continuation(tokenizer, "\n", "a"))


def encode_beginning(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of the beginning of a sequence: `leading_ids` and the text.

    A token that the tokenizer would put after the text, such as EOS, is left out.
    """
    return [*leading_ids(tokenizer), *tokenizer.encode(text, add_special_tokens=False)]


def sort_distinct(texts: Sequence[Text], length: Callable[[Text], int]) -> tuple[list[Text], list[int]]:
    """The distinct ones of N texts by their lengths, and the position of each text among them, [N].

    Texts of similar length share a batch, so that little of it is padding. The batches follow from the
    distinct texts, so that the last bits of a score do not depend on the order of the texts.
    """
    distinct = sorted(set(texts), key=lambda text: (length(text), text))
    positions = {text: position for position, text in enumerate(distinct)}
    return distinct, [positions[text] for text in texts]
