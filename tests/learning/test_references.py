"""The cache of the reference's log-probabilities: its values, and when they are computed."""

import numpy as np
import pytest
import torch

from components.learning.dpo import pair_logprobs
from components.learning.references import ReferenceCache
from components.models.resident import ResidentPolicy
from tests.support.adapters import random_tensors
from tests.support.pairs import PAIRS


@pytest.fixture
def resident(resident_policy):
    """The tiny policy with a random adapter in its slot."""
    resident_policy.slot.load(random_tensors(resident_policy.slot, seed=1, scale=0.2))
    return resident_policy


@pytest.fixture
def passes(monkeypatch):
    """Numbers of rows of the batches whose tokens are computed."""
    sizes = []
    compute_tokens = ResidentPolicy.tokens
    compute_logprobs = ResidentPolicy.logprobs

    def record_tokens(self, rows, **options):
        sizes.append(len(rows))
        return compute_tokens(self, rows, **options)

    def record_logprobs(self, rows):
        sizes.append(len(rows))
        return compute_logprobs(self, rows)

    monkeypatch.setattr(ResidentPolicy, "tokens", record_tokens)
    monkeypatch.setattr(ResidentPolicy, "logprobs", record_logprobs)
    return sizes


def test_cached_log_probabilities_are_those_of_the_backbone_without_the_adapter(resident):
    cache = ReferenceCache()
    expected = pair_logprobs(resident, PAIRS, 1, reference=True)
    logprobs = [cache.completion_logprobs(resident, resident.encode_pair(pair)) for pair in PAIRS]
    assert np.array_equal(logprobs, expected)
    assert not np.allclose(expected, pair_logprobs(resident, PAIRS, 1), atol=1e-2)


def test_cached_token_log_probabilities_add_up_to_those_of_the_completions(resident):
    cache = ReferenceCache()
    row = resident.encode_pair(PAIRS[2])
    tokens = cache.token_logprobs(resident, row)
    assert [len(values) for values in tokens] == [len(completion) for completion in row[1:]]
    sums = [float(values.sum()) for values in tokens]
    assert sums == pytest.approx(cache.completion_logprobs(resident, row).tolist(), abs=1e-3)


def test_a_row_is_computed_once_and_alone(resident, passes):
    cache = ReferenceCache()
    row = resident.encode_pair(PAIRS[0])
    first = cache.completion_logprobs(resident, row)
    assert cache.completion_logprobs(resident, row) is first
    first_tokens = cache.token_logprobs(resident, row)
    assert cache.token_logprobs(resident, row) is first_tokens
    assert passes == [1, 1]


def test_rows_that_differ_are_computed_separately(resident, passes):
    cache = ReferenceCache()
    for pair in PAIRS[:2]:
        cache.completion_logprobs(resident, resident.encode_pair(pair))
    assert passes == [1, 1]


def test_another_number_of_threads_has_values_of_its_own(resident, passes, monkeypatch):
    cache = ReferenceCache()
    row = resident.encode_pair(PAIRS[0])
    cache.completion_logprobs(resident, row)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    cache.completion_logprobs(resident, row)
    assert passes == [1, 1]
