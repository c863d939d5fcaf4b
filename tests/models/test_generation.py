"""A continuous batch generates what each completion is by itself, on every family of models."""

import random
import threading
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from components.models.continuous_batch import (
    CompletionRequest,
    ContinuousBatch,
    choose_tokens,
    generate_batches,
    supports_continuous_batch,
)
from components.models.generation import generate_completions, split_requests
from components.models.key_values import SPARE_COLUMNS
from components.models.samples import GenerationSettings
from tests.support.long_tier import with_examples
from tests.support.random_models import EXAMPLES, FAMILIES, build_random
from tests.support.recording import record_calls

OTHERS = {"gpt2": {}, "gpt_neox": {}, "phi3": {"num_key_value_heads": 4}, "olmo2": {}}
STOP_IDS = [3, 5, 30, 31]
ENCODED = [[7, 8], [9, 10, 11, 12, 13], [14], [15, 16, 17], [18, 19, 20, 21, 22, 23, 24], [25, 26, 27]]


@pytest.fixture(scope="module", params=with_examples([*FAMILIES, *OTHERS], EXAMPLES))
def model(request):
    return build_random(request.param, **OTHERS.get(request.param, {}))


@pytest.fixture(scope="module")
def llama():
    return build_random("llama")


def new_requests(encoded, settings):
    """The requests of prompts, in the order of the prompts."""
    return [
        CompletionRequest(prompt, number, torch.Generator().manual_seed(100 * prompt + number))
        for prompt in range(len(encoded))
        for number in range(settings.count)
    ]


def run(model, encoded, settings):
    """Ids of each request by a continuous batch, and the requests in the order in which they ended."""
    requests = new_requests(encoded, settings)
    batches = ContinuousBatch(model, encoded, requests, settings, STOP_IDS, 0).run()
    ended = list(chain.from_iterable(batches))
    return [request.ids for request in requests], ended


def run_alone(model, encoded, settings):
    """Ids of each request, whose tokens are chosen one by one from the logits of the whole sequence."""
    requests = new_requests(encoded, settings)
    for request in requests:
        while len(request.ids) < settings.max_new_tokens and not set(request.ids) & set(STOP_IDS):
            with torch.no_grad():
                ids = torch.tensor([encoded[request.prompt] + request.ids])
                logits = model(input_ids=ids, use_cache=False).logits
            request.ids += choose_tokens(logits[:, -1], settings.temperature, [request.noise])
    return [request.ids for request in requests]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_each_completion_is_the_one_that_its_prompt_has_alone(model, temperature):
    assert supports_continuous_batch(model)
    alone = None
    for batch_size in (1, 4, 64):
        settings = GenerationSettings(batch_size, max_new_tokens=9, temperature=temperature, count=2)
        alone = alone or run_alone(model, ENCODED, settings)
        ids, _ = run(model, ENCODED, settings)
        assert ids == alone, batch_size
    if temperature:
        assert min(map(len, alone)) < 9, "some rows end early"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_batch_of_transformers_gives_the_same_completions(llama, temperature):
    settings = GenerationSettings(4, max_new_tokens=9, temperature=temperature, count=2)
    requests = new_requests(ENCODED, settings)
    batches = generate_batches(llama, ENCODED, requests, settings, STOP_IDS, 0)
    assert sum(map(len, batches)) == 12
    expected = run_alone(llama, ENCODED, settings)
    for request, ids in zip(requests, expected, strict=True):
        assert request.ids[: len(ids)] == ids


@pytest.mark.long
def test_rows_that_outlast_the_columns_move_to_the_front(llama):
    """Rows that enter late would otherwise need more columns than there are."""
    count = 3 * SPARE_COLUMNS
    encoded = [[7 + n % 20] * (1 + n % 5) for n in range(count)]
    settings = GenerationSettings(3, max_new_tokens=40, temperature=1.0)
    ids, _ = run(llama, encoded, settings)
    assert sum(map(len, ids)) > 2 * (5 + 40 + SPARE_COLUMNS)
    assert ids == run_alone(llama, encoded, settings)


def test_a_request_takes_the_row_of_one_that_has_ended(llama, monkeypatch):
    settings = GenerationSettings(2, max_new_tokens=6, temperature=0.8)
    columns = record_calls(monkeypatch, ContinuousBatch, "_forward", lambda self, ids, *_: ids.numel())
    ids, ended = run(llama, ENCODED, settings)
    assert sorted(request.prompt for request in ended) == list(range(6))
    steps = sum(len(row) - 1 for row in ids)
    decoded = sum(n for n in columns if n <= 2)
    assert steps <= decoded <= steps + settings.max_new_tokens, "rows stay free at the end alone"


def test_the_completions_of_a_prompt_share_one_pass_over_it(llama, monkeypatch):
    prefilled = record_calls(monkeypatch, ContinuousBatch, "_prefill", lambda self, prompts: list(prompts))
    run(llama, ENCODED, GenerationSettings(3, max_new_tokens=4, temperature=1.0, count=5))
    assert list(chain.from_iterable(prefilled)) == list(range(6))


def test_rows_of_one_token_end_without_a_step_and_no_prompts_give_no_rows(llama):
    settings = GenerationSettings(2, max_new_tokens=1)
    ids, _ = run(llama, ENCODED, settings)
    assert ids == run_alone(llama, ENCODED, settings)
    assert run(llama, [], GenerationSettings(2, max_new_tokens=3)) == ([], [])


# --- two batches at a time


def test_every_prompt_is_in_one_part_with_all_its_completions():
    requests = new_requests(ENCODED[:5], GenerationSettings(4, max_new_tokens=1, count=3))
    parts = split_requests(requests, 2)
    assert [{request.prompt for request in part} for part in parts] == [{0, 2, 4}, {1, 3}]
    assert sorted(map(id, parts[0] + parts[1])) == sorted(map(id, requests))
    assert split_requests(requests[:3], 2) == [requests[:3]]
    assert split_requests([], 2) == [[]]


def test_two_batches_with_a_thread_each_give_the_completions_of_one(llama, two_threads, monkeypatch):
    tokenizer = SimpleNamespace(
        pad_token_id=0, eos_token_id=STOP_IDS[0], decode=lambda ids, skip_special_tokens: str(ids)
    )
    settings = GenerationSettings(3, max_new_tokens=9, temperature=0.8, count=2)
    steps = record_calls(
        monkeypatch,
        ContinuousBatch,
        "_step",
        lambda self: (threading.get_ident(), torch.get_num_threads(), len(self.requests)),
    )
    concurrent = generate_completions(llama, tokenizer, ENCODED, settings, seed=1)
    assert torch.get_num_threads() == 2
    assert len({thread for thread, _, _ in steps}) == 2
    assert {threads for _, threads, _ in steps} == {1}
    assert max(rows for _, _, rows in steps) == 2
    torch.set_num_threads(1)
    assert generate_completions(llama, tokenizer, ENCODED, settings, seed=1) == concurrent
    assert steps[-1][0] == threading.get_ident()


def test_random_batches_give_the_completions_of_single_rows(llama):
    numbers = random.Random(0)
    for _ in range(10):
        encoded = [[numbers.randrange(6, 40) for _ in range(numbers.randint(1, 9))] for _ in range(7)]
        settings = GenerationSettings(
            batch_size=numbers.randint(1, 8),
            max_new_tokens=numbers.randint(1, 12),
            temperature=numbers.choice([0.0, 0.5, 1.5]),
            count=numbers.randint(1, 3),
        )
        assert run(llama, encoded, settings)[0] == run_alone(llama, encoded, settings)


@pytest.mark.parametrize("family", ["mamba", "bloom"])
def test_other_pasts_are_not_supported(family):
    config = AutoConfig.for_model(family, vocab_size=40, hidden_size=16, num_hidden_layers=2)
    with torch.device("meta"):
        assert not supports_continuous_batch(AutoModelForCausalLM.from_config(config))


# --- the choice of a token


def test_a_token_without_probability_is_never_chosen_and_temperature_0_draws_nothing():
    noise = [torch.Generator().manual_seed(n) for n in range(100)]
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    assert choose_tokens(logits.repeat(100, 1), 1.0, noise) == [1] * 100
    noise = torch.Generator().manual_seed(0)
    state = noise.get_state()
    assert choose_tokens(torch.tensor([[0.1, 3.0, 2.0]]), 0.0, [noise]) == [1]
    assert torch.equal(noise.get_state(), state)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_tokens_are_chosen_with_the_probabilities_of_the_softmax_at_a_temperature(temperature):
    logits = torch.tensor([0.0, 2.0, 4.0])
    count = 4000
    noise = [torch.Generator().manual_seed(n) for n in range(count)]
    tokens = torch.tensor(choose_tokens(logits.repeat(count, 1), temperature, noise))
    expected = (logits / temperature).softmax(0)
    standard_errors = (expected * (1 - expected) / count).sqrt()
    assert ((torch.bincount(tokens, minlength=3) / count - expected).abs() < 4 * standard_errors).all()


def test_equal_prompts_of_a_request_have_noise_of_their_own(llama):
    tokenizer = SimpleNamespace(
        pad_token_id=0, eos_token_id=STOP_IDS[0], decode=lambda ids, skip_special_tokens: str(ids)
    )
    settings = GenerationSettings(4, max_new_tokens=9, temperature=2.0, count=2)
    samples = generate_completions(llama, tokenizer, [ENCODED[0]] * 3, settings, seed=1)
    assert len({sample.text for of_prompt in samples for sample in of_prompt}) == 6
