"""Generation of completions in a continuous batch (components/models/continuous_batch.py).

On a CPU, two half batches run concurrently, with half of the threads each.

A token is sampled by the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014, A* Sampling). The noise
of a completion is a function of a seed, its prompt's position and its own number, so samples do
not depend on the batch that they are computed in, unless two tokens are equal up to rounding
errors. Requests with seeds of their own share a batch: the seed and the position of each prompt are
then given by its `SampleKey`. The generator of the noise is no one else's, so neither clients that
run side by side nor a model that is built at the same time change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

from components.concurrency import concurrent_parts, run_concurrently
from components.config import BackboneConfig
from components.models.backbone import fetch_backbone
from components.models.samples import Completion, GenerationSettings, SampleKey
from components.models.tokens import decode_unfinished
from components.seeding import derive

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from components.models.continuous_batch import CompletionRequest

GenerationProgress = Callable[[int, int], None]  # called with (completions done, completions in total)


def generate_completions(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    encoded: Sequence[list[int]],
    settings: GenerationSettings,
    seed: int | Sequence[SampleKey],
    progress: GenerationProgress | None = None,
) -> list[list[Completion]]:
    """`settings.count` completions of each prompt, whose token ids are `encoded`.

    Args:
        seed: samples are a function of it and of the positions of the prompts; or the key of each
            prompt, so that samples do not depend on the prompts beside it.
        progress: called once for every batch_size completions that have ended, and at the end.
    """
    import torch

    from components.models.continuous_batch import (
        CompletionRequest,
        ContinuousBatch,
        generate_batches,
        supports_continuous_batch,
    )
    from components.models.merging import merged_adapter

    stop_ids = find_stop_ids(model.generation_config, tokenizer)
    pad = cast(int, tokenizer.pad_token_id)
    keys = [SampleKey(seed, n) for n in range(len(encoded))] if isinstance(seed, int) else seed
    # Prompts of similar length are neighbors, so that little of a batch is padding.
    order = sorted(
        product(range(len(encoded)), range(settings.count)), key=lambda pair: len(encoded[pair[0]])
    )
    requests = []
    for prompt, number in order:
        noise_seed = derive(keys[prompt].seed, "generate", keys[prompt].position, number)
        requests.append(
            CompletionRequest(prompt, number, torch.Generator(model.device).manual_seed(noise_seed))
        )
    result: dict[tuple[int, int], Completion] = {}
    report_at = {*range(settings.batch_size, len(requests), settings.batch_size), len(requests)}
    lock = Lock()

    def collect(batch: Iterator[list[CompletionRequest]]) -> None:
        for ended in batch:
            with lock:
                for request in ended:
                    result[request.prompt, request.number] = _to_completion(tokenizer, request.ids, stop_ids)
                    if progress is not None and len(result) in report_at:
                        progress(len(result), len(requests))

    with merged_adapter(model):
        if supports_continuous_batch(model):
            parts = split_requests(requests, concurrent_parts(model.device))
            settings = replace(settings, batch_size=-(-settings.batch_size // len(parts)))
            batches = [ContinuousBatch(model, encoded, part, settings, stop_ids, pad).run() for part in parts]
        else:
            batches = [generate_batches(model, encoded, requests, settings, stop_ids, pad)]
        run_concurrently([partial(collect, batch) for batch in batches])
    return [[result[i, k] for k in range(settings.count)] for i in range(len(encoded))]


def split_requests(requests: Sequence[CompletionRequest], count: int) -> list[list[CompletionRequest]]:
    """Divide requests into at most so many parts, prompt by prompt, so that prompts are computed once."""
    ranks: dict[int, int] = {}
    for request in requests:
        ranks.setdefault(request.prompt, len(ranks))
    parts = [[request for request in requests if ranks[request.prompt] % count == k] for k in range(count)]
    return [part for part in parts if part] or [[]]


def _to_completion(tokenizer: PreTrainedTokenizerBase, ids: list[int], stop_ids: list[int]) -> Completion:
    """The completion of generated tokens, which ends with its first stop token."""
    stop = next((n for n, token in enumerate(ids) if token in stop_ids), None)
    completion = ids if stop is None else ids[: stop + 1]
    # A token that ends a turn need not be a special token of the tokenizer.
    text = decode_completion(tokenizer, ids[:stop], finished=stop is not None)
    return Completion(tuple(completion), text.strip(), finished=stop is not None)


def decode_completion(tokenizer: PreTrainedTokenizerBase, ids: list[int], finished: bool) -> str:
    """The text of a completion without its end; one that was cut ends with a whole character."""
    if not finished:
        return decode_unfinished(tokenizer, ids)
    return cast(str, tokenizer.decode(ids, skip_special_tokens=True))


def find_stop_ids(
    generation_config: Any, tokenizer: PreTrainedTokenizerBase, end_of_turn: int | None = None
) -> list[int]:
    """Tokens that end a completion: those of the generation settings, EOS, and a chat template's."""
    configured = generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in [*ids, tokenizer.eos_token_id, end_of_turn] if i is not None})


def read_generation_settings(backbone: BackboneConfig) -> Any:
    """The generation settings of a backbone as transformers loads them, without its weights."""
    from transformers import AutoConfig, GenerationConfig

    source = fetch_backbone(backbone.location)
    revision = backbone.revision or "main"
    settings: Any = GenerationConfig
    try:
        return settings.from_pretrained(source, revision=revision)
    except OSError:  # the model has none
        return settings.from_model_config(AutoConfig.from_pretrained(source, revision=revision))
