"""A selector that stays on a device while it is trained and scored (FedBiscuit section 4).

The choice is the pair of logits of ' A' and ' B' at the answer slot of a comparison
(components/models/selector.py). Only that position and those two rows of the language-model head
are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self, cast

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from components.concurrency import concurrent_parts, run_concurrently
from components.config import Recipe, SelectorConfig
from components.data.templates import load as load_template
from components.models.adapters import AdapterSlot, attach_lora
from components.models.backbone import load_backbone, load_tokenizer
from components.models.checkpointing import enable_checkpointing
from components.models.head import apply_lm_head, check_lm_head, require_finite
from components.models.last_layer import states_at, states_at_one_position, supports_one_position
from components.models.selector import Comparison, encode_comparison, find_choice_tokens
from components.models.tokens import leading_ids, sort_distinct

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BatchShare(NamedTuple):
    """Every count-th batch, of one of several processes that compute a share each."""

    number: int
    of: int


WHOLE = BatchShare(0, 1)


class Selector:
    """A resident backbone with an adapter slot; load an adapter before training or scoring."""

    def __init__(self, config: SelectorConfig, device: str) -> None:
        self.config = config
        self.device = device
        self.tokenizer = load_tokenizer(config.backbone)
        self.template = load_template(config.template, "selector")
        self.choices = find_choice_tokens(self.tokenizer, self.template.pieces[-1])
        backbone = load_backbone(config.backbone, device)
        check_lm_head(backbone, config.backbone.name)
        self.one_position = supports_one_position(backbone)  # so the last layer is computed at the slot alone
        self.model = attach_lora(backbone, config.lora)
        if config.backbone.gradient_checkpointing:
            enable_checkpointing(self.model, config.backbone.name, whole_last_layer=not self.one_position)
        self.slot = AdapterSlot(self.model)
        self.prefix: tuple[int, ...] = ()  # ids of examples that each comparison follows

    @classmethod
    def of(cls, recipe: Recipe, device: str) -> Self:
        """The selector of a recipe."""
        return cls(recipe.selector, device)

    def encode(self, comparison: Comparison) -> list[int]:
        """Token ids of one comparison, see `encode_comparison`, after the ids of the prefix."""
        ids = encode_comparison(
            self.tokenizer, self.template, comparison, self.config.max_length, self.config.max_prompt_tokens
        )
        if not self.prefix:
            return ids
        start = len(leading_ids(self.tokenizer))
        return [*ids[:start], *self.prefix, *ids[start:]]

    def collate(self, rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of token ids padded on the right [N, L], and the position of each row's last token [N]."""
        tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
        ids = pad_sequence(tensors, batch_first=True, padding_value=cast(int, self.tokenizer.pad_token_id))
        return ids.to(self.device), torch.tensor([len(row) - 1 for row in rows], device=self.device)

    def choice_logits(self, input_ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Logits of ' A' and ' B' after the last token of each row, [N, 2] fp32."""
        base = cast("PreTrainedModel", self.model.get_base_model())
        return choice_logits(base, input_ids, last, self.choices, self.one_position)

    def logits(self, comparisons: Sequence[Comparison], share: BatchShare = WHOLE) -> np.ndarray:
        """Logits of ' A' and ' B' for N comparisons, for the adapter in the slot; [N, 2] fp32.

        With a share of the batches, the logits of the others are 0, so that shares can be added.
        """
        rows, positions = sort_distinct([tuple(self.encode(each)) for each in comparisons], length=len)
        logits = np.zeros((len(rows), 2), dtype=np.float32)
        parts = concurrent_parts(torch.device(self.device))
        size = max(1, 2 * self.config.score_batch_size // parts)
        self.model.eval()

        def compute(start: int) -> None:
            chunk = slice(start, start + size)
            with torch.inference_mode():
                logits[chunk] = self.choice_logits(*self.collate(rows[chunk])).cpu().numpy()

        batches = range(0, len(rows), size)[share.number :: share.of]
        run_concurrently([partial(compute, start) for start in batches], at_once=parts)
        require_finite(logits, f"the selector on '{self.config.backbone.name}'")
        return logits[positions]

    def margins(self, comparisons: Sequence[Comparison], share: BatchShare = WHOLE) -> np.ndarray:
        """Log-odds that the first completion is better, for the adapter in the slot; [N] float64.

        With orders 'both' it is the mean over a comparison and its swapped copy, which cancels a
        preference for a position. With 'single' it is that of the comparison alone, as in the
        paper. The first completion is chosen where it is above 0. With a share of the batches, the margins
        of all shares have this sum, to the last bit.
        """
        if self.config.orders == "single":
            return self.margins_as_shown(comparisons, share)
        mean: np.ndarray = self.margins_by_order(comparisons, share).mean(axis=0)
        return mean

    def margins_as_shown(self, comparisons: Sequence[Comparison], share: BatchShare = WHOLE) -> np.ndarray:
        """Log-odds of ' A' against ' B' for each comparison in its own order; [N] float64."""
        logits = self.logits(comparisons, share).astype("float64")
        odds: np.ndarray = logits[:, 0] - logits[:, 1]
        return odds

    def margins_by_order(self, comparisons: Sequence[Comparison], share: BatchShare = WHOLE) -> np.ndarray:
        """Log-odds that the first completion is better, shown as A and as B; [2, N] float64."""
        swapped = [comparison.swapped() for comparison in comparisons]
        shown_as_a, shown_as_b = np.split(self.margins_as_shown([*comparisons, *swapped], share), 2)
        return np.stack([shown_as_a, -shown_as_b])


def choice_logits(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    last: torch.Tensor,
    choices: tuple[int, int],
    one_position: bool = False,
) -> torch.Tensor:
    """Two logits per row, computed from one position and two rows of the head; [N, 2] fp32.

    With one_position the last layer is computed at that position alone; the model must support it.

    Args:
        input_ids: [N, L], padded on the right, see `states_at`.
        last: [N], position of the last real token.
        choices: vocabulary ids of the two answers.
    """
    states = states_at_one_position if one_position else states_at
    return apply_lm_head(model, states(model, input_ids, last), choices)
