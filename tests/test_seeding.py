import numpy as np

from components.seeding import derive, generator


def test_a_derived_seed_is_the_same_in_every_process():
    """A fixed value: a resumed run on another day draws the same numbers."""
    assert derive(0, "sample", 3) == 5041318349904775329


def test_seed_purpose_round_and_type_each_change_the_seed():
    seeds = {derive(0), derive(1), derive(0, "a"), derive(0, "b"), derive(0, "a", 1), derive(0, "a", "1"), derive(0, "a", 2), derive(0, "a1"), derive(0, 1, "a")}
    assert len(seeds) == 9


def test_joined_names_do_not_collide():
    assert derive(0, "a", "b") != derive(0, "ab")


def test_a_derived_seed_fits_in_63_bits_and_torch_takes_it():
    import torch

    seeds = [derive(i, "x") for i in range(2000)]
    assert len(set(seeds)) == 2000 and all(0 <= s < 2**63 for s in seeds)
    assert max(seeds) > 2**62
    torch.Generator().manual_seed(max(seeds))


def test_generators_of_one_purpose_agree_and_leave_the_global_one_alone():
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    first, second = (generator(1, "sample", 2).integers(0, 2**40, 8) for _ in range(2))
    assert (first == second).all() and (first != generator(1, "sample", 3).integers(0, 2**40, 8)).any()
    assert (np.random.get_state()[1] == before).all()


def test_seeding_a_device_is_undone_and_leaves_the_same_numbers_to_everybody_else():
    import torch

    from components.seeding import seeded

    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with seeded("cpu", 7):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with seeded("cpu", 7):
        assert torch.equal(torch.rand(3), first)
