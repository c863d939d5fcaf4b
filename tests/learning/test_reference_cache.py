"""The cache of the reference's log-probabilities: its values, and when they are computed."""

import numpy as np
import pytest
import torch

from components.learning.pair_scores import pair_logprobs
from components.learning.reference_cache import ReferenceCache, reference_batches
from components.models.resident import ResidentPolicy
from tests.support.pairs import PAIRS


@pytest.fixture
def passes(monkeypatch):
    """Numbers of rows of the batches whose log-probabilities are computed."""
    sizes = []
    compute = ResidentPolicy.logprobs

    def record(self, rows):
        sizes.append(len(rows))
        return compute(self, rows)

    monkeypatch.setattr(ResidentPolicy, "logprobs", record)
    return sizes


@pytest.fixture
def rows(resident):
    return [resident.encode(*pair.texts) for pair in PAIRS]


def test_cached_log_probabilities_are_those_of_the_backbone_without_the_adapter(resident, rows):
    expected = pair_logprobs(resident, PAIRS, 1, reference=True)
    assert np.array_equal(ReferenceCache().completion_logprobs(resident, rows, 1), expected)
    assert np.allclose(ReferenceCache().completion_logprobs(resident, rows, 3), expected, atol=1e-4)
    assert not np.allclose(expected, pair_logprobs(resident, PAIRS, 1), atol=1e-2)


def test_cached_token_log_probabilities_add_up_to_those_of_the_completions(resident, rows):
    cache = ReferenceCache()
    tokens = cache.token_logprobs(resident, rows, 2, range(len(rows)))
    logprobs = cache.completion_logprobs(resident, rows, 2)
    for row, values, sums in zip(rows, tokens, logprobs, strict=True):
        assert [len(part) for part in values] == [len(completion) for completion in row[1:]]
        assert [float(part.sum()) for part in values] == pytest.approx(sums.tolist(), abs=1e-3)


def test_each_batch_is_computed_once(resident, rows, passes):
    cache = ReferenceCache()
    first = cache.completion_logprobs(resident, rows[:5], 2)
    assert sorted(passes) == [1, 2, 2]
    assert np.array_equal(cache.completion_logprobs(resident, rows[:5], 2), first)
    assert len(passes) == 3


def test_batches_are_neighbors_in_the_order_of_lengths_whatever_the_order_of_the_rows(rows):
    def batches(order):
        return [[order[n] for n in batch] for batch in reference_batches(order, 2, None)]

    assert batches(rows) == batches(rows[::-1])
    widths = [sum(map(len, row)) for batch in batches(rows) for row in batch]
    assert widths == sorted(widths)


def test_a_batch_of_which_less_than_half_is_needed_is_computed_row_by_row(rows):
    rows = rows[:4]
    order = [n for batch in reference_batches(rows, 4, None) for n in batch]
    assert list(reference_batches(rows, 4, {order[2]})) == [[order[2]]]
    assert list(reference_batches(rows, 4, {order[0], order[3]})) == [order]
    assert list(reference_batches(rows, 4, set())) == []


def test_rows_that_are_not_needed_have_no_values(resident, rows):
    cache = ReferenceCache()
    logprobs = cache.completion_logprobs(resident, rows, len(rows), used={0, 2, 3, 4})
    assert np.flatnonzero(np.isnan(logprobs).all(axis=1)).tolist() == [
        n for n in range(len(rows)) if n not in (0, 2, 3, 4)
    ]
    tokens = cache.token_logprobs(resident, rows, len(rows), {0, 2, 3, 4})
    assert [n for n, values in enumerate(tokens) if values] == [0, 2, 3, 4]


def test_another_number_of_threads_has_values_of_its_own(resident, rows, passes, monkeypatch):
    cache = ReferenceCache()
    cache.completion_logprobs(resident, rows[:1], 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    cache.completion_logprobs(resident, rows[:1], 2)
    assert passes == [1, 1]
