import pytest

from components.evaluation.overlap import rouge


def test_the_same_text_overlaps_wholly_and_another_not_at_all():
    assert rouge(["the cat sat"], [["The cat sat."]]) == {"rouge1": 1.0, "rouge2": 1.0, "rougeLsum": 1.0}
    assert rouge(["the cat sat"], [["dogs bark loudly"]]) == {"rouge1": 0.0, "rouge2": 0.0, "rougeLsum": 0.0}


def test_rouge_1_is_the_f1_of_the_words():
    """2 of 3 words against 2 of 5: precision 2/3, recall 2/5, F1 1/2."""
    assert rouge(["a red cat"], [["a grey cat sleeps here"]])["rouge1"] == pytest.approx(0.5)


def test_each_text_is_measured_with_the_reference_that_it_is_nearest_to_and_the_mean_is_taken():
    near = rouge(["one two three", "four"], [["seven eight", "one two three"], ["five"]])
    assert near["rouge1"] == pytest.approx(0.5)


def test_rows_without_a_reference_are_left_out():
    assert rouge(["one two", "three"], [[], ["three"]])["rouge1"] == 1.0
    assert rouge(["one"], [[]]) == {}
