"""Completions generated in a continuous batch, or by transformers.

A completion that ends leaves its row of the batch to the next one, so the model never computes a row
that has ended while others wait. The completions of a prompt share one pass over it. All rows end at
the same column of the cache of keys and values, and each has its own first column, so the mask of a
step is that of a batch that is padded on the left.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import PeftModel
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessorList
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from components.models.key_values import RowCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from components.models.samples import GenerationSettings


@dataclass
class CompletionRequest:
    """A completion that is asked for, and its tokens so far."""

    prompt: int  # position of its prompt
    number: int  # among the completions of the prompt
    noise: torch.Generator  # on the model's device
    ids: list[int] = field(default_factory=list)  # so far


def choose_tokens(logits: torch.Tensor, temperature: float, noise: Sequence[torch.Generator]) -> list[int]:
    """The next token of each row of logits [N, V]: a sample of softmax(logits / temperature).

    It is the arg max of logits / temperature - log(-log(u)), where u is uniform in [0, 1) and drawn by the
    row's noise, a generator on the device of the logits. At temperature 0 it is that of the logits.
    """
    if not temperature:
        return cast("list[int]", logits.argmax(dim=-1).tolist())
    uniform = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    for row, generator in zip(uniform, noise, strict=True):
        row.uniform_(generator=generator)
    gumbel = uniform.log_().neg_().log_().neg_()
    return cast("list[int]", gumbel.add_(logits.float(), alpha=1 / temperature).argmax(dim=-1).tolist())


def supports_continuous_batch(model: PreTrainedModel | PeftModel) -> bool:
    """Whether a model's past is keys and values of positions that the caller can name.

    It is not where layers have a recurrent state, or where positions follow from the columns.
    """
    base = _base_model(model)
    layers = DynamicCache(config=base.config).layers
    return "position_ids" in inspect.signature(base.forward).parameters and all(
        type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers
    )


def _base_model(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The model that PEFT wraps; its layers have the adapter."""
    return cast("PreTrainedModel", model.get_base_model()) if isinstance(model, PeftModel) else model


@dataclass
class _Prompt:
    """A prompt whose pass is done."""

    key_values: list[tuple[torch.Tensor, torch.Tensor]]  # of its layers
    logits: torch.Tensor  # [V], after its last token


class ContinuousBatch:
    """A batch whose rows are refilled."""

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        encoded: Sequence[list[int]],
        requests: Sequence[CompletionRequest],
        settings: GenerationSettings,
        stop_ids: Sequence[int],
        pad: int,
    ) -> None:
        """A batch of a model that `supports_continuous_batch`, which requests enter in their order."""
        # The request in each row, None for a row that is free.
        self.requests: list[CompletionRequest | None] = [None] * min(settings.batch_size, len(requests))
        self._model = _base_model(model)
        self._encoded = encoded
        self._waiting = list(requests)
        self._settings = settings
        self._stop_ids = frozenset(stop_ids)
        self._pad = pad
        longest = max((len(encoded[request.prompt]) for request in requests), default=0)
        layers: int = self._model.config.get_text_config().num_hidden_layers
        self._cache = RowCache(layers, len(self.requests), longest, settings.max_new_tokens)
        self._prompts: dict[int, _Prompt] = {}
        has_option = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._last_position = {"logits_to_keep": 1} if has_option else {}

    def run(self) -> Iterator[list[CompletionRequest]]:
        """Generate all completions, and yield those that have ended as soon as they have."""
        with torch.inference_mode():
            while self._waiting or any(self.requests):
                ended = self._admit() if self._waiting and None in self.requests else self._step()
                if ended:
                    yield ended

    def _admit(self) -> list[CompletionRequest]:
        """Fill the free rows, and choose the first token of each request that enters."""
        free = [row for row, request in enumerate(self.requests) if request is None]
        entering = self._waiting[: len(free)]
        self._waiting = self._waiting[len(free) :]
        self._prefill(sorted({request.prompt for request in entering} - self._prompts.keys()))
        rows = free[: len(entering)]
        for row, request in zip(rows, entering, strict=True):
            self.requests[row] = request
            self._cache.enter(row, self._prompts[request.prompt].key_values)
        ended = self._append(
            rows, torch.stack([self._prompts[request.prompt].logits for request in entering])
        )
        waiting = {request.prompt for request in self._waiting}
        self._prompts = {prompt: done for prompt, done in self._prompts.items() if prompt in waiting}
        return ended

    def _prefill(self, prompts: Sequence[int]) -> None:
        """Compute the keys and values of prompts, and the logits after them."""
        if not prompts:
            return
        ids, mask = _pad_left([self._encoded[prompt] for prompt in prompts], self._pad)
        past = DynamicCache()  # without the configuration, layers with a sliding window keep all positions
        logits = self._forward(ids, mask, (mask.cumsum(1) - 1).clamp_(min=0), past)
        layers: list[Any] = list(past.layers)
        for n, prompt in enumerate(prompts):
            length = len(self._encoded[prompt])
            key_values = [(layer.keys[n, :, -length:], layer.values[n, :, -length:]) for layer in layers]
            self._prompts[prompt] = _Prompt(key_values, logits[n])

    def _step(self) -> list[CompletionRequest]:
        """Choose the next token of each row; free rows, once they are half of all, are dropped before."""
        rows = [row for row, request in enumerate(self.requests) if request is not None]
        if 2 * len(rows) <= len(self.requests):
            self._cache.select(rows)
            self.requests = [self.requests[row] for row in rows]
            rows = list(range(len(rows)))
        mask, positions = self._cache.open_column(rows)
        ids = torch.full((len(self.requests), 1), self._pad)
        for row in rows:
            ids[row] = cast(CompletionRequest, self.requests[row]).ids[-1]
        logits = self._forward(ids, mask, positions, self._cache)
        return self._append(rows, logits[rows])

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, past: Any
    ) -> torch.Tensor:
        """Logits after the last column, [N, V]; the keys and values of the columns are added to the past."""
        device = self._model.device
        output = self._model(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            position_ids=positions.to(device),
            past_key_values=past,
            use_cache=True,
            **self._last_position,
        )
        return cast("torch.Tensor", output.logits[:, -1])

    def _append(self, rows: Sequence[int], logits: torch.Tensor) -> list[CompletionRequest]:
        """Choose the next token of some rows, and free those that end."""
        requests = [cast(CompletionRequest, self.requests[row]) for row in rows]
        tokens = choose_tokens(logits, self._settings.temperature, [request.noise for request in requests])
        ended = []
        for row, request, token in zip(rows, requests, tokens, strict=True):
            request.ids.append(token)
            if token in self._stop_ids or len(request.ids) == self._settings.max_new_tokens:
                self.requests[row] = None
                ended.append(request)
        return ended


def generate_batches(
    model: PreTrainedModel | PeftModel,
    encoded: Sequence[list[int]],
    requests: Sequence[CompletionRequest],
    settings: GenerationSettings,
    stop_ids: list[int],
    pad: int,
) -> Iterator[list[CompletionRequest]]:
    """Generate by transformers' `generate`, in batches, where a model has no `supports_continuous_batch`."""
    generating: Any = model
    for start in range(0, len(requests), settings.batch_size):
        batch = list(requests[start : start + settings.batch_size])
        ids, mask = _pad_left([encoded[request.prompt] for request in batch], pad)
        with torch.inference_mode():
            sequences: torch.Tensor = generating.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=settings.max_new_tokens,
                eos_token_id=stop_ids,
                pad_token_id=pad,
                do_sample=False,
                logits_processor=LogitsProcessorList([_token_chooser(batch, settings.temperature)]),
            )
        for request, tokens in zip(batch, sequences[:, ids.shape[1] :].tolist(), strict=True):
            request.ids.extend(tokens)
        yield batch


def _pad_left(rows: Sequence[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of N rows and the mask of their tokens, [N, L] each."""
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    masks = [torch.ones_like(row) for row in ids]
    return (
        pad_sequence(ids, batch_first=True, padding_value=pad, padding_side="left"),
        pad_sequence(masks, batch_first=True, padding_side="left"),
    )


def _token_chooser(
    requests: Sequence[CompletionRequest], temperature: float
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A logits processor whose result is largest at the token of `choose_tokens`."""

    def choose(input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        chosen = choose_tokens(logits, temperature, [request.noise for request in requests])
        tokens = torch.as_tensor(chosen, device=logits.device)
        return torch.full_like(logits, -torch.inf).scatter_(1, tokens[:, None], 0.0)

    return choose
