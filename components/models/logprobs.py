"""Log-probabilities of completions under a causal language model.

Only the positions of completions go through the language-model head, in chunks, and completions of
one prompt share one forward pass over it. The results equal those of the full logits of each
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from components.config.modules import Pooling
from components.models.head import apply_lm_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TokenRow = tuple[list[int], ...]
"""Token ids of a prompt, and of one or more completions of it; none of them is empty."""
HEAD_CHUNK = 1024  # positions in the head at once; 1024 x 50,000 fp32 logits take 200 MB


@dataclass(frozen=True)
class CompletionTokens:
    """The tokens of M completions, padded on the right to T."""

    logprobs: torch.Tensor  # [M, T], of each token after the tokens before it; 0 at padding
    entropies: torch.Tensor  # [M, T], of the distribution that the token was chosen from (nats)
    states: torch.Tensor  # [M, T, H], last hidden state that predicts the token, input of a value head
    mask: torch.Tensor  # [M, T] bool, true at tokens and false at padding


def completion_logprobs(model: PreTrainedModel, rows: Sequence[TokenRow], pad_token_id: int) -> torch.Tensor:
    """Summed log-probability of each completion of N rows of C completions after its prompt (nats).

    The completions of a prompt follow it in one sequence. Each has the positions that continue the
    prompt, and attends to the prompt and itself only, so the prompt is computed once for all of
    them. If a model's attention does not accept this mask (see `supports_shared_prompts`), each
    completion has a sequence of its own. Rows are padded on the right, where a causal model never
    attends. The result is [N, C] fp32, with gradients if the model has them.
    """
    hidden, packed = _compute_states(model, rows, pad_token_id)
    return _summed_logprobs(model, hidden[packed.rows, packed.before], packed).reshape(len(rows), -1)


def completion_features(
    model: PreTrainedModel, rows: Sequence[TokenRow], pad_token_id: int, pooling: Pooling = "response"
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `completion_logprobs`, and the mean last hidden states that a reward head reads, [N, C, H] fp32.

    The pooling 'response' averages over the tokens of a completion, 'sequence' over those of its prompt too.
    """
    hidden, packed = _compute_states(model, rows, pad_token_id)
    before = hidden[packed.rows, packed.before]
    parts = torch.split(hidden[packed.rows, packed.at].float(), packed.lengths)
    if pooling == "sequence":
        prompts = [hidden[row, :length] for row, length in packed.prompts]
        parts = tuple(torch.cat([own.float(), part]) for own, part in zip(prompts, parts, strict=True))
    features = torch.stack([part.mean(0) for part in parts])
    logprobs = _summed_logprobs(model, before, packed).reshape(len(rows), -1)
    return logprobs, features.reshape(*logprobs.shape, -1)


def completion_tokens(
    model: PreTrainedModel, rows: Sequence[TokenRow], pad_token_id: int, temperature: float = 1.0
) -> CompletionTokens:
    """The tokens of M = N C completions, row after row, with gradients if the model has them.

    The logits are divided by the temperature, as by a sampler at this temperature.
    """
    hidden, packed = _compute_states(model, rows, pad_token_id)
    before = hidden[packed.rows, packed.before]
    logprobs, entropies = _token_values(model, before, packed, temperature, entropies=True)

    def pad(values: torch.Tensor) -> torch.Tensor:
        return pad_sequence(list(torch.split(values, packed.lengths)), batch_first=True)

    return CompletionTokens(
        logprobs=pad(logprobs),
        entropies=pad(entropies),
        states=pad(before.float()),
        mask=pad(torch.ones_like(logprobs, dtype=torch.bool)),
    )


def supports_shared_prompts(model: PreTrainedModel, width: int) -> bool:
    """Whether sequences of this width can hold several completions of one prompt.

    This needs an attention that accepts a mask per pair of positions, no layers other than
    attention, and no attention window narrower than the sequence.
    """
    config = model.config
    if getattr(model, "_is_stateful", False):  # a recurrence runs over the completions in turn
        return False
    if getattr(config, "alibi", False):  # distances are counted along the sequence
        return False
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_window = "sliding_attention" in kinds or not hasattr(config, "layer_types")
    window = getattr(config, "sliding_window", None) if has_window else None
    return (
        config._attn_implementation == "sdpa"
        and kinds <= {"full_attention", "sliding_attention"}
        and (window is None or width <= window)
    )


@dataclass(frozen=True)
class _PackedRows:
    """N rows as sequences padded to L, and the places of their S completion tokens."""

    input_ids: torch.Tensor  # [N, L]
    position_ids: torch.Tensor  # [N, L]; those of each completion continue the prompt's
    segments: torch.Tensor  # [N, L], 0 for the prompt, 1, 2, ... for its completions, -1 for padding
    rows: torch.Tensor  # [S], row of each completion token
    before: torch.Tensor  # [S], position that predicts the token: the one before it, or the prompt's last
    at: torch.Tensor  # [S], position of the token
    lengths: list[int]  # tokens of each completion
    prompts: list[tuple[int, int]]  # row of each completion, and the number of tokens of its prompt


def _compute_states(
    model: PreTrainedModel, rows: Sequence[TokenRow], pad_token_id: int
) -> tuple[torch.Tensor, _PackedRows]:
    """Run the model's layers over rows, without its head; [N, L, H], and the places of their tokens."""
    shares_prompts = len(rows[0]) > 2
    width = max(sum(map(len, row)) for row in rows)
    if shares_prompts and not supports_shared_prompts(model, width):
        single: list[TokenRow] = []
        for prompt, *completions in rows:
            single += [(prompt, completion) for completion in completions]
        rows = single
        shares_prompts = False
    packed = _pack_rows(rows, pad_token_id, model.device)
    arguments = {}
    if shares_prompts:
        # A token attends to the prompt and to its own completion, up to itself; [N, L, L].
        segments, width = packed.segments, packed.segments.shape[1]
        causal = torch.ones(width, width, dtype=torch.bool, device=segments.device).tril()
        is_same = segments[:, None, :] == segments[:, :, None]
        mask = causal & ((segments[:, None, :] == 0) | is_same)
        arguments = {"attention_mask": mask[:, None], "position_ids": packed.position_ids}
    hidden = model.base_model(input_ids=packed.input_ids, use_cache=False, **arguments).last_hidden_state
    return hidden, packed


def _pack_rows(rows: Sequence[TokenRow], pad_token_id: int, device: torch.device) -> _PackedRows:
    position_ids: list[list[int]] = []
    segments: list[list[int]] = []
    places: list[tuple[int, int, int]] = []  # row, position that predicts a token, position of the token
    lengths = []
    prompts = []
    for i, (prompt, *completions) in enumerate(rows):
        start = len(prompt)
        position_ids.append([*range(start)])
        segments.append([0] * start)
        prompts += [(i, start)] * len(completions)
        for n, completion in enumerate(completions, start=1):
            begin = len(segments[i])
            position_ids[i] += range(start, start + len(completion))
            segments[i] += [n] * len(completion)
            places.append((i, start - 1, begin))
            places += [(i, position - 1, position) for position in range(begin + 1, len(segments[i]))]
            lengths.append(len(completion))
    index_rows, before, at = torch.tensor(places, device=device).T

    def pad(values: list[list[int]], padding: int) -> torch.Tensor:
        tensors = [torch.tensor(row) for row in values]
        return pad_sequence(tensors, batch_first=True, padding_value=padding).to(device)

    return _PackedRows(
        input_ids=pad([[*chain(*row)] for row in rows], pad_token_id),
        position_ids=pad(position_ids, 0),
        segments=pad(segments, -1),
        rows=index_rows,
        before=before,
        at=at,
        lengths=lengths,
        prompts=prompts,
    )


def _token_values(
    model: PreTrainedModel,
    before: torch.Tensor,
    packed: _PackedRows,
    temperature: float = 1.0,
    entropies: bool = False,
) -> list[torch.Tensor]:
    """Log-probabilities of the tokens, and on request the entropies of their distributions, [S] each.

    `before` are the states that predict the tokens, [S, H].

    They are computed in chunks, whose logits are not stored for the backward pass but computed again,
    unless one chunk contains all tokens.
    """

    def compute(hidden: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = apply_lm_head(model, hidden)
        if temperature != 1:
            logits = logits / temperature
        norm = logits.logsumexp(1)
        logprobs = logits.gather(1, token_ids[:, None])[:, 0] - norm
        return (logprobs, norm - (logits.softmax(1) * logits).sum(1)) if entropies else (logprobs,)

    tokens = packed.input_ids[packed.rows, packed.at]
    recomputes = len(tokens) > HEAD_CHUNK and torch.is_grad_enabled()
    call = partial(checkpoint, compute, use_reentrant=False) if recomputes else compute
    chunks = map(call, torch.split(before, HEAD_CHUNK), torch.split(tokens, HEAD_CHUNK))
    return [torch.cat(values) for values in zip(*chunks, strict=True)]


def _summed_logprobs(model: PreTrainedModel, before: torch.Tensor, packed: _PackedRows) -> torch.Tensor:
    """Log-probability of each completion, summed in a fixed order (index_add has none on CUDA)."""
    (logprobs,) = _token_values(model, before, packed)
    return torch.stack([part.sum() for part in torch.split(logprobs, packed.lengths)])
