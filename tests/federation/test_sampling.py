from collections import Counter

import pytest

from components.federation.sampling import sample_clients

NAMES = [f"client-{i:02d}" for i in range(10)]


def test_a_cohort_has_the_size_asked_for_no_client_twice_and_is_sorted():
    for round in range(50):
        cohort = sample_clients(NAMES, 4, 0, round)
        assert len(set(cohort)) == 4 and cohort == sorted(cohort) and set(cohort) <= set(NAMES)


def test_a_cohort_is_a_function_of_seed_and_round_and_of_nothing_else():
    sample_clients(NAMES, 4, 0, 1)
    assert sample_clients(NAMES, 4, 0, 7) == sample_clients(NAMES[::-1], 4, 0, 7)
    cohorts = {tuple(sample_clients(NAMES, 4, seed, round)) for seed in range(3) for round in range(20)}
    assert len(cohorts) > 40
    assert any(sample_clients(NAMES, 4, 0, r) != sample_clients(NAMES, 4, 0, r, "warm-up") for r in range(5))


def test_every_client_is_sampled_about_as_often():
    counts = Counter(name for round in range(2000) for name in sample_clients(NAMES, 4, 0, round))
    assert all(abs(counts[name] / 2000 - 0.4) < 0.05 for name in NAMES)


def test_all_clients_can_take_part_and_more_than_all_cannot():
    assert sample_clients(NAMES, 10, 3, 1) == NAMES
    with pytest.raises(ValueError, match="cannot sample 11 of 10 clients without replacement"):
        sample_clients(NAMES, 11, 3, 1)
