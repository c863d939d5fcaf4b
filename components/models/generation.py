"""Generation of completions in a continuous batch.

A batch has slots. A completion that ends leaves its slot to the next one, so the model never computes
a row that has ended while others wait. The completions of a prompt share one pass over it. All rows
end at the same column of the cache of keys and values, and each has its own first column, so the
mask of a step is that of a batch that is padded on the left. On a CPU, two half batches run
concurrently, with half of the threads each.

A token is sampled by the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014, A* Sampling). The noise
of a completion is a function of a seed, its prompt's position and its own number, so samples do
not depend on the batch that they are computed in, unless two tokens are equal up to rounding
errors. Requests with seeds of their own share a batch: the seed and the position of each prompt are
then given by its `SampleKey`. The generator of the noise is no one else's, so neither clients that
run side by side nor a model that is built at the same time change it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from components.concurrency import concurrent_parts, run_concurrently
from components.models.merging import merged_adapter
from components.seeding import derive

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GenerationProgress = Callable[[int, int], None]
"""Called with (completions done, completions in total)."""


class SampleKey(NamedTuple):
    """What the noise of a prompt's completions is a function of, besides their number.

    Attributes:
        seed: of the request that the prompt belongs to.
        position: of the prompt in that request.
    """

    seed: int
    position: int


@dataclass(frozen=True)
class Completion:
    """A generated completion.

    Attributes:
        ids: generated tokens, including the end-of-sequence token if it was reached.
        text: decoded without special tokens, stripped. Judges and rewards read it; training takes
            the ids, which begin with the space or line break that the model wrote.
        finished: whether it ended by itself rather than at the length limit.
    """

    ids: tuple[int, ...]
    text: str
    finished: bool


@dataclass(frozen=True)
class GenerationSettings:
    """How completions are generated.

    Attributes:
        batch_size: sequences generated at once.
        max_new_tokens: longest completion (tokens).
        temperature: sampling temperature; 0 is greedy search.
        count: completions per prompt.
    """

    batch_size: int
    max_new_tokens: int
    temperature: float = 0.0
    count: int = 1


@dataclass
class Row:
    """A completion that is being generated.

    Attributes:
        prompt: position of its prompt.
        number: its number among the completions of the prompt.
        noise: generator of its noise, on the model's device.
        ids: tokens so far.
    """

    prompt: int
    number: int
    noise: torch.Generator
    ids: list[int] = field(default_factory=list)


def generate_completions(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    encoded: Sequence[list[int]],
    settings: GenerationSettings,
    seed: int | Sequence[SampleKey],
    progress: GenerationProgress | None = None,
) -> list[list[Completion]]:
    """Generate completions of prompts that are token ids already.

    Args:
        model: a causal language model.
        tokenizer: the model's tokenizer, with a padding token.
        encoded: token ids of each prompt.
        settings: batch size, length, temperature and number of completions.
        seed: samples are a function of it and of the positions of the prompts; or the key of each
            prompt, so that samples do not depend on the prompts beside it.
        progress: called once for every batch_size completions that have ended, and at the end.

    Returns:
        `settings.count` completions for each prompt, in the order of the prompts.
    """
    stop_ids = find_stop_ids(model, tokenizer)
    pad = cast(int, tokenizer.pad_token_id)
    keys = [SampleKey(seed, n) for n in range(len(encoded))] if isinstance(seed, int) else seed
    # Rows of similar length are neighbors, so that little of a batch is padding.
    order = sorted(product(range(len(encoded)), range(settings.count)), key=lambda row: len(encoded[row[0]]))
    rows = [Row(prompt, number, _noise(model, keys[prompt], number)) for prompt, number in order]
    result: dict[tuple[int, int], Completion] = {}
    report_at = _thresholds(len(rows), settings.batch_size)
    lock = Lock()

    def collect(batch: Iterator[list[Row]]) -> None:
        for ended in batch:
            with lock:
                for row in ended:
                    result[row.prompt, row.number] = _to_completion(tokenizer, row.ids, stop_ids)
                    if progress is not None and len(result) in report_at:
                        progress(len(result), len(rows))

    with merged_adapter(model):
        if supports_slots(model):
            parts = split_rows(rows, concurrent_parts(model.device))
            settings = replace(settings, batch_size=-(-settings.batch_size // len(parts)))
            batches = [ContinuousBatch(model, encoded, part, settings, stop_ids, pad).run() for part in parts]
        else:
            batches = [generate_batches(model, encoded, rows, settings, stop_ids, pad)]
        run_concurrently([partial(collect, batch) for batch in batches])
    return [[result[i, k] for k in range(settings.count)] for i in range(len(encoded))]


def _thresholds(total: int, step: int) -> set[int]:
    """Numbers of completions at which progress is reported: every `step`, and the last."""
    return {*range(step, total, step), total}


def split_rows(rows: Sequence[Row], count: int) -> list[list[Row]]:
    """Deal rows to at most so many parts, prompt by prompt, so that prompts are computed once."""
    ranks: dict[int, int] = {}
    for row in rows:
        ranks.setdefault(row.prompt, len(ranks))
    parts = [[row for row in rows if ranks[row.prompt] % count == k] for k in range(count)]
    return [part for part in parts if part] or [[]]


def _noise(model: PreTrainedModel | PeftModel, key: SampleKey, number: int) -> torch.Generator:
    import torch

    return torch.Generator(model.device).manual_seed(derive(key.seed, "generate", key.position, number))


def choose_tokens(logits: torch.Tensor, temperature: float, noise: Sequence[torch.Generator]) -> list[int]:
    """The next token of each row: a sample of softmax(logits / temperature).

    It is the arg max of logits / temperature - log(-log(u)), where u is uniform in [0, 1).

    Args:
        logits: [N, V].
        temperature: 0 chooses the largest logit, and draws nothing.
        noise: generators of the N rows' noise, on the device of the logits.

    Returns:
        N token ids.
    """
    import torch

    if not temperature:
        return cast("list[int]", logits.argmax(dim=-1).tolist())
    uniform = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    for row, generator in zip(uniform, noise, strict=True):
        row.uniform_(generator=generator)
    gumbel = uniform.log_().neg_().log_().neg_()
    return cast("list[int]", gumbel.add_(logits.float(), alpha=1 / temperature).argmax(dim=-1).tolist())


def supports_slots(model: PreTrainedModel | PeftModel) -> bool:
    """Whether a model's past is keys and values of positions that the caller can name.

    It is not where layers have a recurrent state, or where positions follow from the columns.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    base = _base_model(model)
    layers = DynamicCache(config=base.config).layers
    return "position_ids" in inspect.signature(base.forward).parameters and all(
        type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers
    )


def _base_model(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The model that PEFT wraps; its layers have the adapter."""
    from peft import PeftModel

    return cast("PreTrainedModel", model.get_base_model()) if isinstance(model, PeftModel) else model


@dataclass
class _Prompt:
    """A prompt whose pass is done: the keys and values of its layers, and the logits after it, [V]."""

    key_values: list[tuple[torch.Tensor, torch.Tensor]]
    logits: torch.Tensor


class ContinuousBatch:
    """Rows in the slots of a batch.

    Attributes:
        rows: the row in each slot, None for a slot that is free.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        encoded: Sequence[list[int]],
        rows: Sequence[Row],
        settings: GenerationSettings,
        stop_ids: Sequence[int],
        pad: int,
    ) -> None:
        """A batch in which all slots are free.

        Args:
            model: see `supports_slots`.
            encoded: token ids of each prompt.
            rows: all rows, in the order in which they enter the batch.
            settings: size, length and temperature.
            stop_ids: tokens that end a row.
            pad: token of free slots.
        """
        from components.models.key_values import SlotCache

        self.rows: list[Row | None] = [None] * min(settings.batch_size, len(rows))
        self._model = _base_model(model)
        self._encoded = encoded
        self._waiting = list(rows)
        self._settings = settings
        self._stop_ids = frozenset(stop_ids)
        self._pad = pad
        longest = max((len(encoded[row.prompt]) for row in rows), default=0)
        layers: int = self._model.config.get_text_config().num_hidden_layers
        self._cache = SlotCache(layers, len(self.rows), longest, settings.max_new_tokens)
        self._prompts: dict[int, _Prompt] = {}
        self._last_position = (
            {"logits_to_keep": 1}
            if "logits_to_keep" in inspect.signature(self._model.forward).parameters
            else {}
        )

    def run(self) -> Iterator[list[Row]]:
        """Generate all rows; yields those that have ended, as soon as they have."""
        import torch

        with torch.inference_mode():
            while self._waiting or any(self.rows):
                if self._waiting and None in self.rows:
                    ended = self._admit()
                else:
                    self._shrink()
                    ended = self._step()
                if ended:
                    yield ended

    def _admit(self) -> list[Row]:
        """Fill the free slots, and choose the first token of each row that enters."""
        import torch

        free = [slot for slot, row in enumerate(self.rows) if row is None]
        entering = self._waiting[: len(free)]
        self._waiting = self._waiting[len(free) :]
        self._prefill(sorted({row.prompt for row in entering} - self._prompts.keys()))
        slots = free[: len(entering)]
        for slot, row in zip(slots, entering, strict=True):
            self.rows[slot] = row
            self._cache.enter(slot, self._prompts[row.prompt].key_values)
        ended = self._append(slots, torch.stack([self._prompts[row.prompt].logits for row in entering]))
        waiting = {row.prompt for row in self._waiting}
        self._prompts = {prompt: done for prompt, done in self._prompts.items() if prompt in waiting}
        return ended

    def _prefill(self, prompts: Sequence[int]) -> None:
        """Compute the keys and values of prompts, and the logits after them."""
        import torch
        from transformers.cache_utils import DynamicCache

        if not prompts:
            return
        width = max(len(self._encoded[prompt]) for prompt in prompts)
        ids = torch.full((len(prompts), width), self._pad)
        mask = torch.zeros_like(ids)
        for n, prompt in enumerate(prompts):  # padded on the left
            tokens = self._encoded[prompt]
            ids[n, width - len(tokens) :] = torch.as_tensor(tokens)
            mask[n, width - len(tokens) :] = 1
        past = DynamicCache()  # without the configuration, layers with a sliding window keep all positions
        logits = self._forward(ids, mask, (mask.cumsum(1) - 1).clamp_(min=0), past)
        layers: list[Any] = list(past.layers)
        for n, prompt in enumerate(prompts):
            length = len(self._encoded[prompt])
            key_values = [(layer.keys[n, :, -length:], layer.values[n, :, -length:]) for layer in layers]
            self._prompts[prompt] = _Prompt(key_values, logits[n])

    def _step(self) -> list[Row]:
        """Compute and choose the next token of each row."""
        import torch

        slots = [slot for slot, row in enumerate(self.rows) if row is not None]
        mask, positions = self._cache.open_column(slots)
        ids = torch.full((len(self.rows), 1), self._pad)
        for slot in slots:
            ids[slot] = cast(Row, self.rows[slot]).ids[-1]
        logits = self._forward(ids, mask, positions, self._cache)
        return self._append(slots, logits[slots])

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

    def _append(self, slots: Sequence[int], logits: torch.Tensor) -> list[Row]:
        """Choose the next token of the rows in slots, and free the slots of those that end."""
        rows = [cast(Row, self.rows[slot]) for slot in slots]
        tokens = choose_tokens(logits, self._settings.temperature, [row.noise for row in rows])
        ended = []
        for slot, row, token in zip(slots, rows, tokens, strict=True):
            row.ids.append(token)
            if token in self._stop_ids or len(row.ids) == self._settings.max_new_tokens:
                self.rows[slot] = None
                ended.append(row)
        return ended

    def _shrink(self) -> None:
        """Drop the free slots once half of the slots are free and no row is waiting for them."""
        slots = [slot for slot, row in enumerate(self.rows) if row is not None]
        if 2 * len(slots) <= len(self.rows):
            self._cache.select(slots)
            self.rows = [self.rows[slot] for slot in slots]


def generate_batches(
    model: PreTrainedModel | PeftModel,
    encoded: Sequence[list[int]],
    rows: Sequence[Row],
    settings: GenerationSettings,
    stop_ids: list[int],
    pad: int,
) -> Iterator[list[Row]]:
    """Generate rows by transformers' `generate`, a batch after the other.

    It serves models that a continuous batch cannot serve. The arguments are those of
    `ContinuousBatch`.

    Yields:
        the rows of each batch.
    """
    import torch
    from transformers import LogitsProcessorList

    generating: Any = model
    for start in range(0, len(rows), settings.batch_size):
        batch = list(rows[start : start + settings.batch_size])
        width = max(len(encoded[row.prompt]) for row in batch)
        ids = torch.full((len(batch), width), pad)
        mask = torch.zeros_like(ids)
        for n, row in enumerate(batch):  # padded on the left
            ids[n, width - len(encoded[row.prompt]) :] = torch.as_tensor(encoded[row.prompt])
            mask[n, width - len(encoded[row.prompt]) :] = 1
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
        for row, tokens in zip(batch, sequences[:, width:].tolist(), strict=True):
            row.ids.extend(tokens)
        yield batch


def _token_chooser(
    rows: Sequence[Row], temperature: float
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A logits processor whose result is largest at the token of `choose_tokens`."""
    import torch

    def choose(input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        chosen = choose_tokens(logits, temperature, [row.noise for row in rows])
        tokens = torch.as_tensor(chosen, device=logits.device)
        return torch.full_like(logits, -torch.inf).scatter_(1, tokens[:, None], 0.0)

    return choose


def _to_completion(tokenizer: PreTrainedTokenizerBase, ids: list[int], stop_ids: list[int]) -> Completion:
    """The completion of a generated row, which ends with its first stop token."""
    stop = next((n for n, token in enumerate(ids) if token in stop_ids), None)
    completion = ids if stop is None else ids[: stop + 1]
    # A token that ends a turn need not be a special token of the tokenizer.
    text = cast(str, tokenizer.decode(ids[:stop], skip_special_tokens=True))
    return Completion(tuple(completion), text.strip(), finished=stop is not None)


def find_stop_ids(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, end_of_turn: int | None = None
) -> list[int]:
    """Tokens that end a completion: those of the generation settings, EOS, and a chat template's."""
    return stop_ids_of(model.generation_config, tokenizer, end_of_turn)


def stop_ids_of(
    generation_config: Any, tokenizer: PreTrainedTokenizerBase, end_of_turn: int | None = None
) -> list[int]:
    """As `find_stop_ids`, by the generation settings of a model that is not loaded."""
    configured = generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in [*ids, tokenizer.eos_token_id, end_of_turn] if i is not None})
