"""Sums, means and distances on adapters of one or two tensors, with hand-computed results."""

import itertools
import math
import weakref
from copy import deepcopy

import pytest
import torch

from components.federation.aggregation import distance, norm, residual_update, weighted_average, weighted_sum
from components.models.store import AdapterError


def adapter(*a: float, b: tuple[float, ...] = (0.0,)) -> dict[str, torch.Tensor]:
    return {"a": torch.tensor(a, dtype=torch.float32), "b": torch.tensor(b)}


def has_values(result: dict[str, torch.Tensor], a: list[float]) -> bool:
    return torch.allclose(result["a"], torch.tensor(a, dtype=torch.float32), atol=1e-7)


# --- means


@pytest.mark.parametrize("weights", [(1.0, 3.0), (0.1, 0.3)])
def test_a_weighted_average_is_sum_w_a_over_sum_w(weights):
    first, second = weights
    average = weighted_average([(adapter(1, 2, 3), first), (adapter(4, 0, -1), second)])
    assert has_values(average, [3.25, 0.5, 0.0])


def test_a_weighted_sum_is_not_normalized_and_comes_with_the_sum_of_the_weights():
    total, weight_sum = weighted_sum([(adapter(1, 2, 3), 0.5), (adapter(4, 0, -1), 2.0)])
    assert has_values(total, [8.5, 1.0, -0.5])
    assert weight_sum == 2.5


def test_a_and_b_are_averaged_apart_which_is_not_the_average_of_their_products():
    """FedAvg of LoRA in FedBiscuit section 5.2 is mean(B) mean(A)."""
    clients = [
        {"lora_A": torch.tensor([[1.0, 0.0]]), "lora_B": torch.tensor([[1.0], [0.0]])},
        {"lora_A": torch.tensor([[0.0, 1.0]]), "lora_B": torch.tensor([[0.0], [1.0]])},
    ]
    mean = weighted_average((client, 1.0) for client in clients)
    product_of_means = mean["lora_B"] @ mean["lora_A"]
    mean_of_products = sum(client["lora_B"] @ client["lora_A"] for client in clients) / 2
    assert torch.allclose(product_of_means, torch.full((2, 2), 0.25))
    assert torch.allclose(mean_of_products, torch.eye(2) / 2)


# --- the residual update


def test_equation_6_leaves_the_rest_of_the_weight_to_the_server():
    """(1 - 0.1 - 0.3) [1, 1, 1] + 0.1 [2, 0, 1] + 0.3 [5, 1, -1]"""
    members = [(adapter(2, 0, 1), 0.1), (adapter(5, 1, -1), 0.3)]
    assert has_values(residual_update(*weighted_sum(members), adapter(1, 1, 1)), [2.3, 0.9, 0.4])


def test_equation_6_moves_a_cluster_by_its_members_share():
    """The published code used its last client's model as the server's: 0.80 in place of 0.034."""
    assert has_values(
        residual_update(*weighted_sum([(adapter(1, 1, 1), 0.034)]), adapter(0, 0, 0)), [0.034] * 3
    )


def test_equation_6_with_the_whole_weight_is_the_average():
    members = [(adapter(1, 2, 3), 0.25), (adapter(5, 2, -1), 0.75)]
    assert has_values(residual_update(*weighted_sum(members), adapter(9, 9, 9)), [4, 2, 0])


def test_equation_6_with_more_than_the_whole_weight_is_refused():
    total, weight_sum = weighted_sum([(adapter(1, 2, 3), 0.6), (adapter(1, 2, 3), 0.6)])
    with pytest.raises(AdapterError, match=r"sum to 1\.2, more than one"):
        residual_update(total, weight_sum, adapter(0, 0, 0))


# --- how sums are computed


def test_inputs_are_not_changed():
    inputs = [adapter(1, 2, 3), adapter(4, 5, 6)]
    copies = deepcopy(inputs)
    weighted_average((values, 2.0) for values in inputs)
    residual_update(*weighted_sum([(inputs[1], 0.5), (inputs[0], 0.25)]), inputs[0])
    for values, expected in zip(inputs, copies, strict=True):
        for name, tensor in values.items():
            assert torch.equal(tensor, expected[name])


def test_the_order_changes_the_last_bits_and_no_more():
    """If no order changed anything, a fixed one would not be needed."""
    numbers = torch.Generator().manual_seed(0)
    members = [({"a": torch.randn(500, generator=numbers)}, weight) for weight in (0.1, 0.2, 0.3, 0.15)]
    orders = list(itertools.permutations(members))
    averages = [weighted_average(order)["a"] for order in orders]
    updates = [residual_update(*weighted_sum(order), {"a": torch.ones(500)})["a"] for order in orders]
    assert all(torch.allclose(averages[0], average, atol=1e-6) for average in averages)
    assert all(torch.allclose(updates[0], update, atol=1e-6) for update in updates)
    assert not all(torch.equal(averages[0], average) for average in averages)


def test_one_adapter_is_in_memory_at_a_time():
    """Adapters of thousands of clients would not fit: when one is read, earlier ones are released."""
    references = []

    def read_adapters():
        for i in range(5):
            assert all(reference() is None for reference in references[:-1])
            values = adapter(i, i, i)
            references.append(weakref.ref(values["a"]))
            yield values, 1.0
            del values

    assert has_values(weighted_average(read_adapters()), [2.0] * 3)


def test_half_precision_is_summed_in_fp32():
    """In bf16 each of the small values would be rounded away."""
    members = [({"a": torch.ones(3, dtype=torch.bfloat16)}, 1.0)]
    members += [({"a": torch.full((3,), 2**-8, dtype=torch.bfloat16)}, 1.0) for _ in range(8)]
    total, _ = weighted_sum(members)
    assert has_values(total, [1 + 8 / 256] * 3)


def test_results_are_fp32():
    half = {"a": torch.ones(3, dtype=torch.bfloat16)}
    results = [
        weighted_sum([(half, 1.0)])[0],
        weighted_average([(half, 1.0)]),
        residual_update(*weighted_sum([(half, 0.5)]), half),
    ]
    assert {result["a"].dtype for result in results} == {torch.float32}


def test_a_step_of_1e_5_survives_aggregation():
    """In bf16, 1 + 1e-5 is 1."""
    server = {"a": torch.ones(3)}
    moved = residual_update({"a": torch.full((3,), 1 + 1e-5)}, 1.0, server)
    assert distance(moved, server) == pytest.approx(math.sqrt(3) * 1e-5, rel=0.02)


# --- refusals

DAMAGED = {
    "nan": (lambda: adapter(1, math.nan, 2), "'a' has 1 values that are NaN or infinite"),
    "infinite": (lambda: adapter(math.inf, -math.inf, 2), "'a' has 2 values that are NaN or infinite"),
    "shape": (lambda: adapter(1, 2), r"'a' has shape \(2,\), expected \(3,\)"),
    "missing": (lambda: {"a": torch.ones(3)}, "'b' is missing"),
    "additional": (lambda: adapter(1, 2, 3) | {"c": torch.ones(1)}, "'c' is not part of the adapter"),
}
FUNCTIONS = {
    "average": weighted_average,
    "sum": weighted_sum,
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("make", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_adapter_is_refused_by_its_position_and_tensor(function, make, message):
    with pytest.raises(AdapterError, match=f"adapter 1: tensor {message}"):
        FUNCTIONS[function]([(adapter(1, 2, 3), 0.1), (make(), 0.1)])


def test_a_damaged_first_adapter_is_refused():
    with pytest.raises(AdapterError, match="adapter 0: tensor 'a' has 1 values that are NaN"):
        weighted_average([(adapter(1, math.nan, 2), 1.0)])


@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf])
def test_a_weight_that_is_negative_or_not_finite_is_refused(weight):
    with pytest.raises(AdapterError, match="adapter 1: weight"):
        weighted_average([(adapter(1, 2, 3), 1.0), (adapter(1, 2, 3), weight)])


def test_no_adapters_and_no_weight_cannot_be_averaged():
    with pytest.raises(AdapterError, match="no adapter"):
        weighted_average([])
    with pytest.raises(AdapterError, match="sum to zero"):
        weighted_average([(adapter(1, 2, 3), 0.0)])


# --- distances


def test_distance_and_norm_are_over_all_tensors():
    assert norm(adapter(2, 3, 6, b=(24.0,))) == 25.0
    assert distance(adapter(1, 0, 0, b=(3.0,)), adapter(1, 0, 4, b=(0.0,))) == 5.0
