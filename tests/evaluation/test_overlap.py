"""ROUGE against one or several references."""

import pytest

from components.evaluation.overlap import rouge


def test_the_same_words_give_1_disjoint_ones_0_and_others_the_f1_of_the_words():
    assert rouge(["the cat sat"], [["The cat sat."]]) == {
        "rouge1": 1.0,
        "rouge2": 1.0,
        "rougeLsum": 1.0,
    }
    assert rouge(["the cat sat"], [["dogs bark loudly"]]) == {
        "rouge1": 0.0,
        "rouge2": 0.0,
        "rougeLsum": 0.0,
    }
    # Hand-computed: 2 of 3 words against 2 of 5: precision 2/3, recall 2/5, F1 1/2.
    assert rouge(["a red cat"], [["a grey cat sleeps here"]])["rouge1"] == pytest.approx(0.5)


def test_each_text_is_scored_against_its_best_reference_and_left_out_without_one():
    scores = rouge(["one two three", "four"], [["seven eight", "one two three"], ["five"]])
    assert scores["rouge1"] == pytest.approx(0.5)
    assert rouge(["one two", "three"], [[], ["three"]])["rouge1"] == 1.0
    assert rouge(["one"], [[]]) == {}
