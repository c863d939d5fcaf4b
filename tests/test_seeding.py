"""Seeds as functions of their purpose, and generators that leave global ones as they are."""

import numpy as np
import pytest
import torch

from components.seeding import derive, generator, seeded


def test_a_derived_seed_is_the_same_in_every_process():
    """A fixed value: a run that is resumed on another day draws the same numbers."""
    assert derive(0, "sample", 3) == 5041318349904775329


def test_seed_purpose_round_and_type_each_change_the_seed():
    seeds = {
        derive(0),
        derive(1),
        derive(0, "a"),
        derive(0, "b"),
        derive(0, "a", 1),
        derive(0, "a", "1"),
        derive(0, "a", 2),
        derive(0, "a1"),
        derive(0, 1, "a"),
    }
    assert len(seeds) == 9


def test_derived_seeds_do_not_collide_fill_63_bits_and_torch_accepts_them():
    assert derive(0, "a", "b") != derive(0, "ab")
    seeds = [derive(i, "x") for i in range(2000)]
    assert len(set(seeds)) == 2000
    assert min(seeds) >= 0
    assert 2**62 < max(seeds) < 2**63
    torch.Generator().manual_seed(max(seeds))


def test_two_generators_of_one_purpose_draw_the_same_numbers_and_leave_the_global_one():
    first = generator(1, "sample", 2).integers(0, 2**40, 8)
    second = generator(1, "sample", 2).integers(0, 2**40, 8)
    other = generator(1, "sample", 3).integers(0, 2**40, 8)
    assert (first == second).all()
    assert (first != other).any()
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    generator(1, "sample", 2).integers(0, 2**40, 8)
    assert (np.random.get_state()[1] == before).all()


def test_a_seeded_device_draws_the_same_numbers_and_restores_its_state_even_after_an_error():
    with seeded("cpu", 7):
        first = torch.rand(3)
    with seeded("cpu", 7):
        assert torch.equal(torch.rand(3), first)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with seeded("cpu", 7):
        torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with pytest.raises(KeyError), seeded("cpu", 7):
        raise KeyError
    assert torch.equal(torch.rand(3), expected)
