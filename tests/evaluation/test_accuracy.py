"""Accuracy per client: each client counts once, and an ensemble votes."""

import numpy as np
import pytest

from components.evaluation import accuracy
from components.evaluation.accuracy import client_accuracy


class Slot:
    def load(self, adapter):
        self.adapter = adapter


class Scripted:
    """A selector whose adapter says which pairs it gets right."""

    def __init__(self):
        self.slot = Slot()


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    monkeypatch.setattr(accuracy, "score_pairs", lambda selector, pairs: np.array([1.0 if p["pair_id"] in selector.slot.adapter else -1.0 for p in pairs]))


PAIRS = [{"client_id": c, "domain": d, "pair_id": i} for i, (c, d) in enumerate([("ada", "common"), ("ada", "own"), ("ada", "own"), ("ada", "own"), ("bea", "common")])]


def test_each_client_counts_once_in_the_mean_and_each_pair_in_its_domain():
    measured = client_accuracy(Scripted(), [{0, 4}], PAIRS)
    assert measured["clients"] == {"ada": 0.25, "bea": 1.0} and measured["mean"] == 0.625
    assert (measured["worst"], measured["best"], measured["pairs"]) == (0.25, 1.0, 5)
    assert measured["domains"] == {"common": 1.0, "own": 0.0}


def test_an_ensemble_is_right_where_most_of_its_selectors_are():
    measured = client_accuracy(Scripted(), [{0, 1}, {1, 2}, {2, 1, 4}], PAIRS)
    assert measured["clients"] == {"ada": 0.5, "bea": 0.0}


def test_an_even_ensemble_is_refused():
    with pytest.raises(ValueError, match="odd number"):
        client_accuracy(Scripted(), [{0}, {1}], PAIRS)


def test_a_tie_is_wrong(monkeypatch):
    monkeypatch.setattr(accuracy, "score_pairs", lambda selector, pairs: np.zeros(len(pairs)))
    assert client_accuracy(Scripted(), [set()], PAIRS)["mean"] == 0.0


def test_a_real_selectors_accuracy_is_that_of_its_margins(tiny_selector, random_adapter, prepared, monkeypatch):
    from components.data.records import read_rows
    from components.learning.selector import score_pairs

    monkeypatch.undo()
    pairs = read_rows(prepared / "pairs.parquet", split="test").to_list()
    measured = client_accuracy(tiny_selector, [random_adapter(1)], pairs)
    tiny_selector.slot.load(random_adapter(1))
    right = score_pairs(tiny_selector, pairs) > 0
    for name, value in measured["clients"].items():
        assert value == np.mean([r for r, p in zip(right, pairs, strict=True) if p["client_id"] == name])
