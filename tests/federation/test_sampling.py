"""Sampling of clients: uniform, without replacement, a function of seed and round."""

from collections import Counter

import pytest

from components.federation.sampling import sample_clients

NAMES = [f"client-{i:02d}" for i in range(10)]


def test_a_sample_has_the_requested_size_without_repetition_and_is_sorted():
    for round in range(50):
        sample = sample_clients(NAMES, 4, 0, round)
        assert len(set(sample)) == 4
        assert sample == sorted(sample)
        assert set(sample) <= set(NAMES)


def test_a_sample_is_a_function_of_seed_and_round_and_not_of_the_order_of_the_names():
    first = sample_clients(NAMES, 4, 0, 7)
    sample_clients(NAMES, 4, 0, 1)
    assert sample_clients(NAMES[::-1], 4, 0, 7) == first


def test_samples_differ_between_seeds_and_rounds():
    samples = set()
    for seed in range(3):
        samples |= {tuple(sample_clients(NAMES, 4, seed, round)) for round in range(20)}
    assert len(samples) > 40


def test_all_clients_are_sampled_about_equally_often():
    counts = Counter()
    for round in range(2000):
        counts.update(sample_clients(NAMES, 4, 0, round))
    for name in NAMES:
        assert abs(counts[name] / 2000 - 0.4) < 0.05


def test_all_clients_can_be_sampled():
    assert sample_clients(NAMES, 10, 3, 1) == NAMES


def test_more_clients_than_participate_cannot_be_sampled():
    with pytest.raises(ValueError, match="cannot sample 11 of 10 clients without replacement"):
        sample_clients(NAMES, 11, 3, 1)
