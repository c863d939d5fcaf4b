"""Labelling: one verdict a pair, joined by its id; nothing is lost without being counted."""

import random

import numpy as np
import pytest

from components.alignment.label import candidate_pairs, label_pairs, majority_vote
from components.models.policy import Completion


def written(*texts: str) -> list[Completion]:
    return [Completion(tuple(text.encode()), text, len(text) % 2 == 0) for text in texts]


class Slot:
    def load(self, adapter):
        self.adapter = adapter


class Scripted:
    """A selector whose adapter is a function of two texts: the log-odds that the first is better."""

    def __init__(self):
        self.slot = Slot()

    def margins(self, comparisons):
        return np.array([self.slot.adapter(c.first, c.second) for c in comparisons], dtype=float)


def longer(first, second):
    return len(first) - len(second)


PROMPTS = {f"q{i}": f"text {i}" for i in range(12)}
COMPLETIONS = {q: written("x" * (i % 5 + 1), "y" * ((3 * i) % 7 + 1), "z" * (5 * i % 6 + 2)) for i, q in enumerate(PROMPTS)}


def test_all_pairs_of_a_prompts_completions_are_made():
    pairs, counts = candidate_pairs({"q": "text"}, {"q": written("a", "b", "c", "d")})
    assert [(p.first.text, p.second.text) for p in pairs] == [("a", "b"), ("a", "c"), ("a", "d"), ("b", "c"), ("b", "d"), ("c", "d")]
    assert counts == {"completions": 4, "dropped_identical": 0, "dropped_empty": 0, "pairs": 6, "prompts_without_pair": 0}
    assert len({p.pair_id for p in pairs}) == 6 and all((p.prompt_id, p.prompt) == ("q", "text") for p in pairs)


def test_identical_and_empty_completions_are_dropped_and_counted():
    given = {"q0": written("a", "a", "b", "a"), "q1": written("c", "c"), "q2": written("", "d"), "q3": written("", "")}
    pairs, counts = candidate_pairs({q: q for q in given}, given)
    assert [(p.prompt_id, p.first.text, p.second.text) for p in pairs] == [("q0", "a", "b")]
    assert counts == {"completions": 10, "dropped_identical": 3, "dropped_empty": 3, "pairs": 1, "prompts_without_pair": 3}
    assert counts["completions"] - counts["dropped_identical"] - counts["dropped_empty"] == len({(q, c.text) for q, cs in given.items() for c in cs if c.text})


def test_both_labels_survive_and_as_many_rows_come_out_as_went_in():
    """The reference kept a pair only where its choice was 1, and so lost half of them."""
    candidates, counts = candidate_pairs(PROMPTS, COMPLETIONS)
    rows = label_pairs(Scripted(), [longer], candidates)
    assert len(rows) == len(candidates) == counts["pairs"]
    labels = [row["label"] for row in rows]
    assert min(labels.count(0), labels.count(1)) > 5 and labels.count(0) + labels.count(1) == len(rows)


@pytest.mark.parametrize("direction", [1, -1])
def test_the_chosen_one_is_the_one_that_the_selector_scores_higher_whichever_comes_first(direction):
    candidates, _ = candidate_pairs(PROMPTS, COMPLETIONS)
    for row in label_pairs(Scripted(), [lambda a, b: direction * longer(a, b)], candidates):
        assert direction * len(row["chosen"]) >= direction * len(row["rejected"]) and row["chosen"] != row["rejected"]
        assert (row["label"] == 0) == (row["margin"] > 0)
        for which in ("chosen", "rejected"):
            assert row[f"{which}_ids"] == list(row[which].encode()) and row[f"{which}_finished"] == (len(row[which]) % 2 == 0)


def test_a_verdict_belongs_to_its_pair_whatever_the_order_of_the_rows():
    """The reference zipped labels to rows from which some had been dropped, so that all later labels shifted."""
    candidates, _ = candidate_pairs(PROMPTS, COMPLETIONS)
    expected = {row["pair_id"]: row for row in label_pairs(Scripted(), [longer], candidates)}
    for seed in range(3):
        shuffled = candidates[:]
        random.Random(seed).shuffle(shuffled)
        shuffled = shuffled[seed:]
        rows = label_pairs(Scripted(), [longer], shuffled)
        assert [row["pair_id"] for row in rows] == [c.pair_id for c in shuffled]
        assert all(row == expected[row["pair_id"]] for row in rows)


def test_dropped_completions_do_not_shift_the_labels_of_the_later_ones():
    given = {"q0": written("aa", "a"), "q1": written("b", "b"), "q2": written("", "cc"), "q3": written("d", "dd"), "q4": written("eee", "e")}
    candidates, _ = candidate_pairs({q: q for q in given}, given)
    assert {r["prompt_id"]: (r["chosen"], r["label"]) for r in label_pairs(Scripted(), [longer], candidates)} == {
        "q0": ("aa", 0), "q3": ("dd", 1), "q4": ("eee", 0)}


def test_an_ensemble_decides_by_its_majority_and_the_margin_is_the_mean():
    candidates, _ = candidate_pairs({"q": "t"}, {"q": written("aaa", "b")})
    (row,) = label_pairs(Scripted(), [longer, lambda a, b: -0.5, lambda a, b: -0.25], candidates)
    assert row["label"] == 1 and row["chosen"] == "b" and row["margin"] == pytest.approx((2 - 0.5 - 0.25) / 3)


def test_a_selector_that_sees_no_difference_prefers_the_second_as_in_the_paper():
    candidates, _ = candidate_pairs({"q": "t"}, {"q": written("a", "b")})
    assert label_pairs(Scripted(), [lambda a, b: 0.0], candidates)[0]["label"] == 1


def test_an_even_ensemble_is_refused():
    candidates, _ = candidate_pairs(PROMPTS, COMPLETIONS)
    with pytest.raises(ValueError, match=r"expected \[U, N\] with an odd number U"):
        label_pairs(Scripted(), [longer, longer], candidates)
    with pytest.raises(ValueError, match="odd number U"):
        majority_vote(np.array([[0, 1], [1, 1]]))


def test_no_pairs_give_no_rows():
    assert label_pairs(Scripted(), [longer], []) == []


def test_a_real_selector_labels_in_both_orders_the_same(tiny_selector, random_adapter):
    """With both orders scored, it does not matter which completion is shown first."""
    candidates, _ = candidate_pairs(PROMPTS, {q: [Completion(tuple(t.encode()), t, True) for t in ("first " + q, "the second one of " + q)] for q in PROMPTS})
    exchanged, _ = candidate_pairs(PROMPTS, {q: [Completion(tuple(t.encode()), t, True) for t in ("the second one of " + q, "first " + q)] for q in PROMPTS})
    chosen = [{r["prompt_id"]: r["chosen"] for r in label_pairs(tiny_selector, [random_adapter(1)], c)} for c in (candidates, exchanged)]
    assert chosen[0] == chosen[1]
