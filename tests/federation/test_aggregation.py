"""Aggregation, worked by hand on adapters of one or two tensors of size 3."""

import itertools
import math
import weakref

import pytest
import torch

from components.federation.aggregation import distance, norm, residual_update, weighted_average, weighted_sum
from components.models.adapters import AdapterError


def adapter(*a: float, b: tuple[float, ...] = (0.0,)) -> dict[str, torch.Tensor]:
    return {"a": torch.tensor(a, dtype=torch.float32), "b": torch.tensor(b)}


def same(result: dict, a: list[float]) -> bool:
    return torch.allclose(result["a"], torch.tensor(a, dtype=torch.float32), atol=1e-7)


def test_a_weighted_average_is_sum_w_a_over_sum_w():
    assert same(weighted_average([(adapter(1, 2, 3), 1.0), (adapter(4, 0, -1), 3.0)]), [3.25, 0.5, 0.0])
    assert same(weighted_average([(adapter(1, 2, 3), 0.1), (adapter(4, 0, -1), 0.3)]), [3.25, 0.5, 0.0])
    assert same(weighted_average([(adapter(1, 2, 3), 7.0)]), [1, 2, 3])


def test_a_weighted_sum_is_not_normalised_and_gives_the_mass_beside_it():
    total, mass = weighted_sum([(adapter(1, 2, 3), 0.5), (adapter(4, 0, -1), 2.0)])
    assert same(total, [8.5, 1.0, -0.5]) and mass == 2.5


def test_equation_6_keeps_what_the_members_do_not_weigh():
    """(1 - 0.1 - 0.3) [1, 1, 1] + 0.1 [2, 0, 1] + 0.3 [5, 1, -1]"""
    assert same(residual_update(adapter(1, 1, 1), [(adapter(2, 0, 1), 0.1), (adapter(5, 1, -1), 0.3)]), [2.3, 0.9, 0.4])


def test_equation_6_moves_a_cluster_by_the_members_share_and_not_by_that_of_the_last_client():
    """The reference aggregated into the model that its last client had trained: 0.80 where 0.034 was meant."""
    server, trained = adapter(0, 0, 0), adapter(1, 1, 1)
    assert same(residual_update(server, [(trained, 0.034)]), [0.034] * 3)
    assert same(server, [0, 0, 0]) and same(trained, [1, 1, 1])


def test_equation_6_without_members_gives_a_copy_of_the_server():
    server = adapter(1, 2, 3)
    result = residual_update(server, [])
    assert same(result, [1, 2, 3]) and result["a"].data_ptr() != server["a"].data_ptr()


def test_equation_6_with_all_the_weight_is_the_average_and_with_more_is_refused():
    members = [(adapter(1, 2, 3), 0.25), (adapter(5, 2, -1), 0.75)]
    assert same(residual_update(adapter(9, 9, 9), members), [4, 2, 0])
    with pytest.raises(AdapterError, match="sum to 1.2, more than one"):
        residual_update(adapter(0, 0, 0), [(adapter(1, 2, 3), 0.6), (adapter(1, 2, 3), 0.6)])


def test_inputs_are_not_changed():
    given = [adapter(1, 2, 3), adapter(4, 5, 6)]
    kept = [{n: t.clone() for n, t in one.items()} for one in given]
    weighted_average((one, 2.0) for one in given)
    residual_update(given[0], [(given[1], 0.5), (given[0], 0.25)])
    assert all(torch.equal(one[n], old[n]) for one, old in zip(given, kept, strict=True) for n in one)


def test_the_order_matters_in_no_more_than_the_last_bits():
    numbers = torch.Generator().manual_seed(0)
    members = [({"a": torch.randn(500, generator=numbers)}, w) for w in (0.1, 0.2, 0.3, 0.15)]
    results = [weighted_average(order)["a"] for order in itertools.permutations(members)]
    updates = [residual_update({"a": torch.ones(500)}, order)["a"] for order in itertools.permutations(members)]
    assert all(torch.allclose(results[0], r, atol=1e-6) for r in results)
    assert all(torch.allclose(updates[0], r, atol=1e-6) for r in updates)
    assert not all(torch.equal(results[0], r) for r in results), "if no order made a difference, a fixed one would not be needed"


def test_adapters_are_held_one_at_a_time():
    """A cohort of thousands must not lie in memory: when one is read, the last but one is gone."""
    seen = []

    def stream():
        for i in range(5):
            assert all(old() is None for old in seen[:-1])
            one = adapter(i, i, i)
            seen.append(weakref.ref(one["a"]))
            yield one, 1.0
            del one

    assert same(weighted_average(stream()), [2.0] * 3)


def test_half_precision_comes_back_as_fp32_and_is_summed_in_it():
    members = [({"a": torch.ones(3, dtype=torch.bfloat16)}, 1.0)] + [({"a": torch.full((3,), 2**-8, dtype=torch.bfloat16)}, 1.0) for _ in range(8)]
    total, _ = weighted_sum(members)
    assert total["a"].dtype == torch.float32 and same(total, [1 + 8 / 256] * 3)   # in bf16 each of the small ones is rounded away
    assert weighted_average(members)["a"].dtype == torch.float32
    assert residual_update({"a": torch.ones(3, dtype=torch.bfloat16)}, [(members[0][0], 0.5)])["a"].dtype == torch.float32
    assert residual_update({"a": torch.ones(3, dtype=torch.bfloat16)}, [])["a"].dtype == torch.float32


def test_a_step_of_1e_5_survives_aggregation():
    """In bf16, 1 + 1e-5 is 1."""
    server = {"a": torch.ones(3)}
    moved = residual_update(server, [({"a": torch.full((3,), 1 + 1e-5)}, 1.0)])
    assert distance(moved, server) == pytest.approx(math.sqrt(3) * 1e-5, rel=0.02)


BAD = {
    "nan": (lambda: adapter(1, float("nan"), 2), "'a' has 1 values that are NaN or infinite"),
    "infinite": (lambda: adapter(float("inf"), -float("inf"), 2), "'a' has 2 values that are NaN or infinite"),
    "shape": (lambda: adapter(1, 2), r"'a' has shape \(2,\), expected \(3,\)"),
    "missing": (lambda: {"a": torch.ones(3)}, "'b' is missing"),
    "extra": (lambda: adapter(1, 2, 3) | {"c": torch.ones(1)}, "'c' is not part of the adapter")}


@pytest.mark.parametrize(("make", "sentence"), BAD.values(), ids=BAD)
def test_a_damaged_adapter_is_refused_by_its_place_and_its_tensor(make, sentence):
    for aggregate in (weighted_average, weighted_sum, lambda members: residual_update(adapter(0, 0, 0), members)):
        with pytest.raises(AdapterError, match=f"adapter 1: tensor {sentence}"):
            aggregate([(adapter(1, 2, 3), 0.1), (make(), 0.1)])


def test_a_damaged_adapter_is_refused_also_where_it_comes_first():
    with pytest.raises(AdapterError, match="adapter 0: tensor 'a' has 1 values that are NaN"):
        weighted_average([(adapter(1, float("nan"), 2), 1.0)])
    with pytest.raises(AdapterError, match="adapter 0: tensor 'b' is missing"):
        residual_update(adapter(0, 0, 0), [({"a": torch.ones(3)}, 0.1)])


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_a_weight_that_is_negative_or_not_finite_is_refused(weight):
    with pytest.raises(AdapterError, match="adapter 1: weight"):
        weighted_average([(adapter(1, 2, 3), 1.0), (adapter(1, 2, 3), weight)])


def test_nothing_and_no_weight_cannot_be_averaged():
    with pytest.raises(AdapterError, match="no adapter"):
        weighted_average([])
    with pytest.raises(AdapterError, match="sum to zero"):
        weighted_average([(adapter(1, 2, 3), 0.0)])


def test_a_and_b_are_averaged_apart_which_is_not_the_average_of_ba():
    """FedAvg on LoRA as FedBiscuit 5.2 means it: mean(B) mean(A), and not mean(B A)."""
    clients = [{"lora_A": torch.tensor([[1.0, 0.0]]), "lora_B": torch.tensor([[1.0], [0.0]])},
               {"lora_A": torch.tensor([[0.0, 1.0]]), "lora_B": torch.tensor([[0.0], [1.0]])}]
    mean = weighted_average((c, 1.0) for c in clients)
    product = mean["lora_B"] @ mean["lora_A"]
    mean_of_products = sum(c["lora_B"] @ c["lora_A"] for c in clients) / 2
    assert torch.allclose(product, torch.full((2, 2), 0.25))
    assert torch.allclose(mean_of_products, torch.eye(2) / 2)


def test_distance_and_norm_run_over_all_tensors():
    assert norm(adapter(2, 3, 6, b=(24.0,))) == 25.0
    assert distance(adapter(1, 0, 0, b=(3.0,)), adapter(1, 0, 4, b=(0.0,))) == 5.0
