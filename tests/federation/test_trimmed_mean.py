"""The coordinate-wise trimmed mean, on adapters of one tensor with three values."""

import pytest
import torch

from components.config.federation import AGGREGATORS
from components.federation.aggregators import Contributions, TrimmedMean
from components.federation.protocol import Update
from components.models.store import AdapterStore

SERVER = {"a": torch.zeros(3)}


def contributions(store: AdapterStore, rows: list[list[float]]) -> Contributions:
    """One client per row of values; all have the same number of training pairs."""
    updates = []
    for n, row in enumerate(rows):
        adapter = store.put({"a": torch.tensor(row)})
        updates.append(Update(job="a job", client=f"client-{n}", adapter=adapter, rows=4))
    return Contributions(store, updates, [1 / len(rows)] * len(rows), len(rows))


def test_the_largest_and_smallest_value_of_each_coordinate_are_removed(store):
    rows = [[1.0, 10.0, -5.0], [2.0, 20.0, 0.0], [3.0, 60.0, 5.0], [100.0, -70.0, 4.0]]
    combined, metrics = TrimmedMean(share=0.25).combine(SERVER, contributions(store, rows))
    assert combined["a"].tolist() == [2.5, 15.0, 2.0]
    assert metrics == {"removed_per_side": 1.0}


def test_the_order_of_the_clients_does_not_matter(store):
    rows = [[1.0, 10.0, -5.0], [2.0, 20.0, 0.1], [3.3, 60.0, 5.0], [100.0, -70.0, 4.7], [0.1, 0.2, 0.3]]
    forwards, _ = TrimmedMean(share=0.2).combine(SERVER, contributions(store, rows))
    backwards, _ = TrimmedMean(share=0.2).combine(SERVER, contributions(store, rows[::-1]))
    assert torch.equal(forwards["a"], backwards["a"])


def test_a_minority_of_attackers_cannot_leave_the_range_of_the_honest_values(store):
    honest = [[0.1, -0.2, 0.3], [0.2, -0.1, 0.1], [0.3, 0.0, 0.2]]
    attackers = [[1e6, -1e6, 1e6], [-1e6, 1e6, 1e6]]
    combined, _ = TrimmedMean(share=0.4).combine(SERVER, contributions(store, honest + attackers))
    values = torch.tensor(honest)
    assert (combined["a"] >= values.min(dim=0).values).all()
    assert (combined["a"] <= values.max(dim=0).values).all()


@pytest.mark.parametrize(("clients", "removed"), [(1, 0), (2, 0), (3, 1), (4, 1), (10, 1), (11, 2)])
def test_the_share_is_rounded_up_and_a_value_remains(clients, removed):
    assert TrimmedMean(share=0.1).removed_per_side(clients) == removed


def test_a_recipe_names_it():
    section = AGGREGATORS.load("trimmed")(kind="trimmed")
    assert isinstance(section, TrimmedMean)
