"""The binary selector (FedBiscuit section 4), which compares two completions in one forward pass.

The prompt and both completions are filled into a template that ends at the answer slot. The choice
is the pair of logits of ' A' and ' B' at the slot. Only that position and those two rows of the
language-model head are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, cast

import numpy as np

from components.concurrency import concurrent_parts, run_concurrently
from components.config import SelectorConfig, UserError
from components.data.templates import Template
from components.data.templates import load as load_template
from components.models.adapters import AdapterSlot, attach_lora
from components.models.backbone import load_backbone, load_tokenizer
from components.models.checkpointing import enable_checkpointing
from components.models.head import apply_lm_head, check_lm_head
from components.models.last_layer import states_at, states_at_one_position, supports_one_position
from components.models.tokens import encode_continuation, encode_part, leading_ids

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MIN_COMPLETION_TOKENS = 8
"""Tokens of each completion that a template must leave room for."""


class SelectorError(UserError, ValueError):
    """A text or a tokenizer that a selector cannot work with."""


@dataclass(frozen=True)
class Comparison:
    """A question to a selector: which of two completions of a prompt is better?"""

    prompt: str
    first: str
    second: str


def find_choice_tokens(tokenizer: PreTrainedTokenizerBase, slot: str = ":") -> tuple[int, int]:
    """Ids of ' A' and ' B', with the space that follows the answer slot.

    Args:
        tokenizer: the backbone's tokenizer.
        slot: the text that the answer follows.

    Raises:
        SelectorError: the tokenizer splits one of them into several tokens.
    """
    ids = []
    for answer in (" A", " B"):
        tokens = encode_continuation(tokenizer, slot, answer)
        if len(tokens) != 1:
            raise SelectorError(
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
    completions swaps their tokens and nothing else. The prompt is truncated first, at its end. Only
    if the completions alone do not fit, their ends are truncated, evenly. The template, the
    beginnings of the completions and the answer slot always stay.

    Args:
        tokenizer: the backbone's tokenizer.
        template: with the fields prompt, response_a and response_b.
        comparison: the texts.
        max_length: longest result (tokens).
        max_prompt_tokens: longest prompt (tokens), or None.

    Raises:
        SelectorError: the template alone leaves no room for MIN_COMPLETION_TOKENS of each
            completion.
        DataError: the template shows forum posts, and the prompt is none.
    """
    texts = {
        "prompt": template.show_prompt(comparison.prompt.strip()),
        "response_a": comparison.first,
        "response_b": comparison.second,
    }
    fields = {name: encode_part(tokenizer, text.strip()) for name, text in texts.items()}
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
    """Tokens that a template leaves for the texts of a comparison.

    Raises:
        SelectorError: they are fewer than MIN_COMPLETION_TOKENS for each completion.
    """
    leading, literals = _fixed_ids(tokenizer, template)
    room = max_length - len(leading) - sum(len(literals[piece]) for piece in template.pieces[::2])
    if room < 2 * MIN_COMPLETION_TOKENS:
        raise SelectorError(
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


class Selector:
    """A resident backbone with an adapter slot, used as a selector.

    Attributes:
        model: the PEFT-wrapped backbone.
        slot: the adapter slot; load an adapter before training or scoring.
        choices: vocabulary ids of ' A' and ' B'.
        one_position: whether the last layer is computed at the answer slot alone.
    """

    def __init__(self, config: SelectorConfig, device: str) -> None:
        """Load the backbone, and attach LoRA.

        Args:
            config: the section of the recipe.
            device: e.g. 'cpu' or 'cuda:0'.

        Raises:
            BackboneError: the backbone cannot be loaded, or not be checkpointed.
        """
        self.config = config
        self.device = device
        self.tokenizer = load_tokenizer(config.backbone)
        self.template = load_template(config.template, "selector")
        self.choices = find_choice_tokens(self.tokenizer, self.template.pieces[-1])
        backbone = load_backbone(config.backbone, device)
        check_lm_head(backbone, config.backbone.name)
        self.one_position = supports_one_position(backbone)
        self.model = attach_lora(backbone, config.lora)
        if config.backbone.gradient_checkpointing:
            enable_checkpointing(self.model, config.backbone.name, whole_last_layer=not self.one_position)
        self.slot = AdapterSlot(self.model)

    def encode(self, comparison: Comparison) -> list[int]:
        """Token ids of one comparison, see `encode_comparison`."""
        return encode_comparison(
            self.tokenizer, self.template, comparison, self.config.max_length, self.config.max_prompt_tokens
        )

    def collate(self, rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Pad N rows of token ids on the right, to the longest length L.

        Returns:
            input ids [N, L], and the position of the last real token of each row [N].
        """
        import torch

        ids = torch.full((len(rows), max(map(len, rows))), self.tokenizer.pad_token_id, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.as_tensor(row)
        return ids.to(self.device), torch.tensor([len(row) - 1 for row in rows], device=self.device)

    def choice_logits(self, input_ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Logits of ' A' and ' B' after the last token of each row, [N, 2] fp32."""
        base = cast("PreTrainedModel", self.model.get_base_model())
        return choice_logits(base, input_ids, last, self.choices, self.one_position)

    def training_logits(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits of ' A' and ' B' after each of N rows of token ids, for a training step; [N, 2] fp32."""
        return self.choice_logits(*self.collate(rows))

    def logits(self, comparisons: Sequence[Comparison]) -> np.ndarray:
        """Logits of ' A' and ' B' for N comparisons, for the adapter in the slot; [N, 2] fp32."""
        import torch

        rows, positions = self._distinct_rows(comparisons)
        logits = np.zeros((len(rows), 2), dtype=np.float32)
        parts = concurrent_parts(torch.device(self.device))
        size = max(1, 2 * self.config.score_batch_size // parts)
        self.model.eval()

        def compute(chunk: slice) -> None:
            with torch.inference_mode():
                logits[chunk] = self.choice_logits(*self.collate(rows[chunk])).cpu().numpy()

        run_concurrently([partial(compute, chunk) for chunk in _chunks(len(rows), size)], at_once=parts)
        scores: np.ndarray = logits[positions]
        return scores

    def _distinct_rows(self, comparisons: Sequence[Comparison]) -> tuple[list[tuple[int, ...]], np.ndarray]:
        """The distinct rows of token ids of N comparisons, and the position of each comparison's row, [N].

        They are sorted by their length, so that little of a batch is padding, and then by their
        content. The batches, and with them the last bits of a score, thus do not depend on the order of
        the comparisons.
        """
        rows = [tuple(self.encode(comparison)) for comparison in comparisons]
        distinct = sorted(set(rows), key=lambda row: (len(row), row))
        positions = {row: position for position, row in enumerate(distinct)}
        return distinct, np.array([positions[row] for row in rows], dtype=np.int64)

    def margins(self, comparisons: Sequence[Comparison]) -> np.ndarray:
        """Log-odds that the first completion is better, for the adapter in the slot.

        With orders 'both' it is the mean over a comparison and its swapped copy, which cancels a
        preference for a position. With 'single' it is that of the comparison alone, as in the
        paper.

        Returns:
            [N] float64; the first completion is chosen where it is above 0.
        """
        if self.config.orders == "single":
            return self.margins_as_shown(comparisons)
        mean: np.ndarray = self.margins_by_order(comparisons).mean(axis=0)
        return mean

    def margins_as_shown(self, comparisons: Sequence[Comparison]) -> np.ndarray:
        """Log-odds of ' A' against ' B' for each comparison in its own order; [N] float64."""
        logits = self.logits(comparisons).astype("float64")
        odds: np.ndarray = logits[:, 0] - logits[:, 1]
        return odds

    def margins_by_order(self, comparisons: Sequence[Comparison]) -> np.ndarray:
        """Log-odds that the first completion is better, shown as A and as B; [2, N] float64."""
        import numpy as np

        swapped = [Comparison(c.prompt, c.second, c.first) for c in comparisons]
        shown_as_a, shown_as_b = np.split(self.margins_as_shown([*comparisons, *swapped]), 2)
        return np.stack([shown_as_a, -shown_as_b])


def _chunks(rows: int, size: int) -> list[slice]:
    """Consecutive parts of this size, the last of which may be smaller."""
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def choice_logits(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    last: torch.Tensor,
    choices: tuple[int, int],
    one_position: bool = False,
) -> torch.Tensor:
    """Two logits per row, computed from one position and two rows of the head.

    Args:
        model: a causal language model of transformers.
        input_ids: [N, L], padded on the right. A causal model never attends to what follows a
            token, so no mask is needed.
        last: [N], position of the last real token.
        choices: vocabulary ids of the two answers.
        one_position: compute the last layer at that position too; the model must support it (see
            `supports_one_position`).

    Returns:
        [N, 2] fp32.
    """
    states = states_at_one_position if one_position else states_at
    return apply_lm_head(model, states(model, input_ids, last), choices)


def majority_vote(choices: np.ndarray) -> np.ndarray:
    """The label that most selectors choose (FedBiscuit section 5.1).

    Args:
        choices: [U, N] of 0 and 1, one row per selector; U is odd.

    Returns:
        [N] of 0 and 1.

    Raises:
        ValueError: U is even, or a choice is neither 0 nor 1.
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
