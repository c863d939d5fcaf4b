"""What a binary selector reads (FedBiscuit section 4): a prompt and two completions of it.

They are filled into a template that ends at the answer slot, where the selector chooses between
' A' and ' B'; components/models/selector_model.py computes the choice. The votes of several
selectors are counted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from components.config import UserError
from components.data.templates import Template
from components.models.chat_template import marks_of
from components.models.tokens import encode_continuation, encode_part, leading_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_COMPLETION_TOKENS = 8  # of each completion, for which a template must leave room


@dataclass(frozen=True)
class Comparison:
    """A question to a selector: which of two completions of a prompt is better?"""

    prompt: str
    first: str
    second: str

    def swapped(self) -> Comparison:
        """The same with the completions in the other order."""
        return Comparison(self.prompt, self.second, self.first)


def find_choice_tokens(tokenizer: PreTrainedTokenizerBase, slot: str = ":") -> tuple[int, int]:
    """Ids of ' A' and ' B', with the space that follows the answer slot."""
    ids = []
    for answer in (" A", " B"):
        tokens = encode_continuation(tokenizer, slot, answer)
        if len(tokens) != 1:
            raise UserError(
                f"the tokenizer of '{tokenizer.name_or_path}' splits {answer!r} into {len(tokens)} tokens "
                f"{tokens}, but a selector needs a single token: use another backbone."
            )
        ids.append(tokens[0])
    return ids[0], ids[1]


def encode_comparison(
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    comparison: Comparison,
    max_length: int,
    max_prompt_tokens: int | None,
) -> list[int]:
    """Token ids of a filled template, truncated without losing what the choice depends on.

    Each piece of the template and each text is tokenized separately, so swapping the two
    completions swaps their tokens and nothing else. A prompt of more than max_prompt_tokens is truncated. If
    the result is longer than max_length, the prompt is truncated first, at its end. Only if the completions
    alone do not fit, the end of the longer one is truncated, and then both, evenly. The template, the
    beginnings of the completions and the answer slot always stay.
    """
    texts = {
        "prompt": template.show_prompt(comparison.prompt.strip()),
        "response_a": comparison.first,
        "response_b": comparison.second,
    }
    of_prompt, of_answer = marks_of(tokenizer)
    marks = {"prompt": of_prompt, "response_a": of_answer, "response_b": of_answer}
    fields = {name: encode_part(tokenizer, marks[name].cut(text.strip())) for name, text in texts.items()}
    leading, literals = _fixed_ids(tokenizer, template)
    room = check_room(tokenizer, template, max_length)
    shorter, longer = sorted((len(fields["response_a"]), len(fields["response_b"])))
    limit = longer if shorter + longer <= room else max(room - shorter, room // 2)
    for name in ("response_a", "response_b"):
        fields[name] = fields[name][:limit]
    room -= len(fields["response_a"]) + len(fields["response_b"])
    fields["prompt"] = fields["prompt"][: room if max_prompt_tokens is None else min(room, max_prompt_tokens)]
    ids = list(leading)
    for position, piece in enumerate(template.pieces):
        ids += fields[piece] if position % 2 else literals[piece]
    return ids


def check_room(tokenizer: PreTrainedTokenizerBase, template: Template, max_length: int) -> int:
    """Tokens that a template leaves for the texts of a comparison; refuses one that leaves too few."""
    leading, literals = _fixed_ids(tokenizer, template)
    room = max_length - len(leading) - sum(len(literals[piece]) for piece in template.pieces[::2])
    if room < 2 * MIN_COMPLETION_TOKENS:
        raise UserError(
            f"the template '{template.name}' needs {max_length - room} tokens besides the texts, but "
            f"max_length is {max_length}: raise selector.max_length."
        )
    return room


def template_ids(tokenizer: PreTrainedTokenizerBase, template: Template) -> set[int]:
    """The ids that every comparison in a template has."""
    leading, literals = _fixed_ids(tokenizer, template)
    return {*leading, *(token for ids in literals.values() for token in ids)}


@lru_cache(maxsize=8)
def _fixed_ids(
    tokenizer: PreTrainedTokenizerBase, template: Template
) -> tuple[list[int], dict[str, list[int]]]:
    """The ids that all comparisons of a template share: leading ones, and those of its own text."""
    first, *others = template.pieces[::2]
    literals = {piece: encode_part(tokenizer, piece) for piece in others}
    return leading_ids(tokenizer), literals | {first: tokenizer.encode(first, add_special_tokens=False)}


def majority_vote(choices: np.ndarray) -> np.ndarray:
    """The label that most selectors choose, [N] of 0 and 1 (FedBiscuit section 5.1).

    The choices are [U, N] of 0 and 1, one row per selector; U is odd.
    """
    choices = np.asarray(choices)
    if choices.ndim != 2 or choices.shape[0] % 2 == 0:
        raise ValueError(
            f"choices have shape {choices.shape}, expected [U, N] with an odd number U of selectors, "
            "so that votes cannot tie"
        )
    if not np.isin(choices, (0, 1)).all():
        raise ValueError("choices must be 0 (the first completion) or 1 (the second)")
    labels: np.ndarray = (choices.sum(axis=0) > choices.shape[0] // 2).astype(int)
    return labels
