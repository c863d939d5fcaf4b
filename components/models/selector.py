"""The binary selector (FedBiscuit section 4): one forward pass says which of two completions is better.

The prompt and both completions are put into a template that ends at the answer slot; the choice is the pair of
logits of ' A' and ' B' there. Only that position and those two rows of the language-model head are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from components.config import Explained, SelectorConfig
from components.data.templates import Template
from components.data.templates import load as load_template
from components.models.adapters import AdapterSlot, add_slot, attach
from components.models.backbone import load_backbone, load_tokenizer
from components.models.head import check_head, head_logits

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from components.models.adapters import Adapter


class SelectorError(Explained, ValueError):
    """A text or a tokenizer that a selector cannot work with."""


@dataclass(frozen=True)
class Comparison:
    """One question to a selector: of two completions of a prompt, which is better?"""

    prompt: str
    first: str
    second: str


def choice_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """The ids of ' A' and ' B', with the space that follows the answer slot, in training and in evaluation alike.

    Raises:
        SelectorError: one of them is not a single token of this tokenizer.
    """
    ids = []
    for answer in (" A", " B"):
        tokens = tokenizer.encode(answer, add_special_tokens=False)
        if len(tokens) != 1:
            raise SelectorError(f"the tokenizer of '{tokenizer.name_or_path}' splits {answer!r} into {len(tokens)} tokens {tokens}: a selector needs one; use another backbone.")
        ids.append(tokens[0])
    return ids[0], ids[1]


def encode_comparison(
    tokenizer: PreTrainedTokenizerBase, template: Template, comparison: Comparison, max_length: int, max_prompt_tokens: int | None
) -> list[int]:
    """Token ids of a filled template, cut to fit without losing what the choice depends on.

    Each piece of the template and each text is tokenised by itself, so that swapping the two completions swaps their
    tokens and nothing else. What is too long is cut from the prompt's end; only if the completions alone do not fit
    are their ends cut, evenly. The template, the heads of the completions and the answer slot always stay.

    Args:
        tokenizer: the backbone's.
        template: with fields prompt, response_a, response_b.
        comparison: the texts.
        max_length: longest result (tokens).
        max_prompt_tokens: longest prompt (tokens), or None.

    Raises:
        SelectorError: the template alone leaves no room for 8 tokens of each completion.
    """
    texts = {"prompt": comparison.prompt, "response_a": comparison.first, "response_b": comparison.second}
    fields = {name: tokenizer.encode(text.strip(), add_special_tokens=False) for name, text in texts.items()}
    literals = {piece: tokenizer.encode(piece, add_special_tokens=False) for piece in template.pieces[::2]}
    bos = [tokenizer.bos_token_id] if getattr(tokenizer, "add_bos_token", False) and tokenizer.bos_token_id is not None else []
    room = max_length - len(bos) - sum(len(literals[piece]) for piece in template.pieces[::2])
    if room < 16:
        raise SelectorError(f"the template '{template.name}' takes {max_length - room} of max_length {max_length} tokens: raise selector.max_length.")
    lengths = sorted((len(fields["response_a"]), len(fields["response_b"])))
    longest = lengths[1] if sum(lengths) <= room else max(room - lengths[0], room // 2)
    for name in ("response_a", "response_b"):
        fields[name] = fields[name][:longest]
    room -= len(fields["response_a"]) + len(fields["response_b"])
    fields["prompt"] = fields["prompt"][: room if max_prompt_tokens is None else min(room, max_prompt_tokens)]
    parts = [fields[piece] if i % 2 else literals[piece] for i, piece in enumerate(template.pieces)]
    return bos + [token for part in parts for token in part]


class Selector:
    """A resident backbone with an adapter slot, used as a selector.

    Attributes:
        slot: the adapter slot; load an adapter before training or scoring.
        model: the PEFT-wrapped backbone.
    """

    def __init__(self, config: SelectorConfig, device: str) -> None:
        self.config = config
        self.device = device
        self.tokenizer = load_tokenizer(config.backbone)
        self.template = load_template(config.template, "selector")
        self.choices = choice_tokens(self.tokenizer)
        backbone = load_backbone(config.backbone, device)
        check_head(backbone, config.backbone.name)
        self.model = attach(backbone, config.lora)
        self.slot = AdapterSlot(self.model)
        self._ensemble: list[AdapterSlot] = []

    def encode(self, comparison: Comparison) -> list[int]:
        """Token ids of one comparison, see encode_comparison."""
        return encode_comparison(self.tokenizer, self.template, comparison, self.config.max_length, self.config.max_prompt_tokens)

    def batch(self, rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Pad rows of ids on the right.

        Returns:
            input_ids [N, L] and the position of each row's last real token [N].
        """
        import torch

        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self.tokenizer.pad_token_id, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.as_tensor(row)
        return ids.to(self.device), torch.tensor([len(row) - 1 for row in rows], device=self.device)

    def choice_logits(self, input_ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Logits of ' A' and ' B' after the last token of each row, in fp32.

        Args:
            input_ids: [N, L], padded on the right (a causal model never looks there, so no mask is needed).
            last: [N], index of the last real token.

        Returns:
            [N, 2].
        """
        return choice_logits(self.model.get_base_model(), input_ids, last, self.choices)

    def logits(self, comparisons: Sequence[Comparison]) -> np.ndarray:
        """Logits of ' A' and ' B' for comparisons in the order given, for the adapter in the slot; [N, 2] fp32."""
        import torch

        rows = [self.encode(c) for c in comparisons]
        order = sorted(range(len(rows)), key=lambda i: (len(rows[i]), i))
        result = np.zeros((len(rows), 2), dtype=np.float32)
        size = 2 * self.config.score_batch_size
        self.model.eval()
        with torch.inference_mode():
            for start in range(0, len(order), size):
                chunk = order[start : start + size]
                result[chunk] = self.choice_logits(*self.batch([rows[i] for i in chunk])).cpu().numpy()
        return result

    def ensemble_logits(self, comparisons: Sequence[Comparison], adapters: Sequence[Adapter]) -> np.ndarray:
        """Logits of ' A' and ' B' under several adapters; [U, N, 2] fp32.

        A batch holds each of its rows once for every adapter, so the backbone's weights are gone through once for all
        of them. The slot that is trained is left as it is.
        """
        import torch

        while len(self._ensemble) < len(adapters):
            self._ensemble.append(add_slot(self.model, self.config.lora, f"member-{len(self._ensemble)}"))
        for slot, adapter in zip(self._ensemble[: len(adapters)], adapters, strict=True):
            slot.load(adapter)
        rows = [self.encode(c) for c in comparisons]
        order = sorted(range(len(rows)), key=lambda i: (len(rows[i]), i))
        result = np.zeros((len(adapters), len(rows), 2), dtype=np.float32)
        size = max(1, 2 * self.config.score_batch_size // len(adapters))
        self.model.eval()
        with torch.inference_mode():
            for start in range(0, len(order), size):
                chunk = order[start : start + size]
                ids, last = self.batch([rows[i] for i in chunk])
                names = [f"member-{u}" for u in range(len(adapters)) for _ in chunk]
                with self.model.base_model._enable_peft_forward_hooks(adapter_names=names):  # what PeftModel.forward(adapter_names=...) does, around the two-row head
                    logits = self.choice_logits(ids.repeat(len(adapters), 1), last.repeat(len(adapters)))
                result[:, chunk] = logits.cpu().numpy().reshape(len(adapters), len(chunk), 2)
        return result

    def margins(self, comparisons: Sequence[Comparison]) -> np.ndarray:
        """Log-odds that the first completion is better, for the adapter in the slot.

        With orders 'both' it is the mean over the given order and the swapped one, which cancels a preference for a
        position; with 'single' it is the given order's alone, as in the paper.

        Returns:
            [N] float64; the first completion is chosen where it is above 0.
        """
        given, swapped = self.margins_by_order(comparisons)
        return given if swapped is None else (given + swapped) / 2

    def margins_by_order(self, comparisons: Sequence[Comparison]) -> tuple[np.ndarray, np.ndarray | None]:
        """Log-odds that the first completion is better, shown as A, and shown as B (None with orders 'single')."""
        swapped = [Comparison(c.prompt, c.second, c.first) for c in comparisons] if self.config.orders == "both" else []
        logits = self.logits([*comparisons, *swapped]).astype("float64")
        odds = logits[:, 0] - logits[:, 1]
        return odds[: len(comparisons)], -odds[len(comparisons) :] if swapped else None


def choice_logits(model: PreTrainedModel, input_ids: torch.Tensor, last: torch.Tensor, choices: tuple[int, int]) -> torch.Tensor:
    """Two logits per row from one position and two rows of the head; equal to the same entries of the full logits.

    Args:
        model: a causal language model of transformers.
        input_ids: [N, L], padded on the right.
        last: [N], index of the last real token.
        choices: vocabulary ids of the two answers.

    Returns:
        [N, 2] fp32.
    """
    import torch

    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    at_slot = hidden[torch.arange(len(last), device=hidden.device), last]
    return head_logits(model, at_slot, choices)


def majority_vote(choices: np.ndarray) -> np.ndarray:
    """The label that most selectors give (FedBiscuit section 5.1).

    Args:
        choices: [U, N] of 0 and 1, one row a selector; U is odd.

    Returns:
        [N] of 0 and 1.

    Raises:
        ValueError: U is even, or a choice is neither 0 nor 1.
    """
    choices = np.asarray(choices)
    if choices.ndim != 2 or choices.shape[0] % 2 == 0:
        raise ValueError(f"choices have shape {choices.shape}, expected [U, N] with an odd number U of selectors, or votes tie")
    if not np.isin(choices, (0, 1)).all():
        raise ValueError("choices must be 0 (the first completion) or 1 (the second)")
    return (choices.sum(axis=0) > choices.shape[0] // 2).astype(int)
