"""Labels of pairs of completions: one for each pair, with counts of what was dropped."""

import random

import numpy as np
import pytest

from components.alignment.label import (
    candidate_pairs,
    choose_ranked_pairs,
    label_pairs,
    label_shares,
)
from components.models.samples import Completion
from components.models.selector import Comparison


def completions(*texts: str) -> list[Completion]:
    """Completions that end by themselves if their length is even."""
    return [Completion(tuple(text.encode()), text, len(text) % 2 == 0) for text in texts]


def prefer_longer(first, second):
    return len(first) - len(second)


def label_by(candidates, *scores):
    """Rows labeled by selectors: functions of two texts, the log-odds that the first is better."""
    texts = [(candidate.first.text, candidate.second.text) for candidate in candidates]
    margins = [[score(first, second) for first, second in texts] for score in scores]
    return label_pairs(np.array(margins, dtype=float), candidates)


PROMPTS = {f"q{i}": f"text {i}" for i in range(12)}
COMPLETIONS = {
    prompt_id: completions("x" * (i % 5 + 1), "y" * ((3 * i) % 7 + 1), "z" * (5 * i % 6 + 2))
    for i, prompt_id in enumerate(PROMPTS)
}


# --- Candidate pairs


def test_all_pairs_of_a_prompts_completions_are_formed():
    pairs, _ = candidate_pairs({"q": "text"}, {"q": completions("a", "b", "c", "d")})
    assert [pair.first.text + pair.second.text for pair in pairs] == ["ab", "ac", "ad", "bc", "bd", "cd"]
    assert len({pair.pair_id for pair in pairs}) == 6
    assert {(pair.prompt_id, pair.prompt) for pair in pairs} == {("q", "text")}


def test_identical_and_empty_completions_are_dropped_and_counted():
    sampled = {
        "q0": completions("a", "a", "b", "a"),
        "q1": completions("c", "c"),
        "q2": completions("", "d"),
        "q3": completions("", ""),
    }
    pairs, counts = candidate_pairs({name: name for name in sampled}, sampled)
    assert [(pair.prompt_id, pair.first.text, pair.second.text) for pair in pairs] == [("q0", "a", "b")]
    assert counts == {
        "completions": 10,
        "dropped_identical": 3,
        "dropped_empty": 3,
        "pairs": 1,
        "prompts_without_pair": 3,
    }


# --- Labels


def test_pairs_with_either_label_are_kept():
    """The published reference code kept a pair only if its choice was 1, and lost half of them."""
    candidates, counts = candidate_pairs(PROMPTS, COMPLETIONS)
    labels = [row["label"] for row in label_by(candidates, prefer_longer)]
    assert len(labels) == counts["pairs"]
    assert labels.count(0) > 5
    assert labels.count(1) > 5
    assert set(labels) == {0, 1}


@pytest.mark.parametrize("sign", [1, -1])
def test_the_chosen_completion_is_the_one_with_the_higher_score_and_is_stored_with_tokens_and_end(sign):
    candidates, _ = candidate_pairs(PROMPTS, COMPLETIONS)
    for row in label_by(candidates, lambda a, b: sign * prefer_longer(a, b)):
        assert sign * len(row["chosen"]) >= sign * len(row["rejected"])
        assert row["chosen"] != row["rejected"]
        assert (row["label"] == 0) == (row["margin"] > 0)
        for role in ("chosen", "rejected"):
            assert row[f"{role}_ids"] == list(row[role].encode())
            assert row[f"{role}_finished"] == (len(row[role]) % 2 == 0)


@pytest.mark.parametrize("seed", range(3))
def test_a_label_belongs_to_its_pair_in_any_order_of_the_pairs(seed):
    """The published reference code zipped labels to rows after some rows had been dropped."""
    candidates, _ = candidate_pairs(PROMPTS, COMPLETIONS)
    expected = {row["pair_id"]: row for row in label_by(candidates, prefer_longer)}
    random.Random(seed).shuffle(candidates)
    subset = candidates[seed:]
    rows = label_by(subset, prefer_longer)
    assert [row["pair_id"] for row in rows] == [candidate.pair_id for candidate in subset]
    assert all(row == expected[row["pair_id"]] for row in rows)


def test_an_ensemble_decides_by_its_majority_and_the_margin_is_the_mean():
    candidates, _ = candidate_pairs({"q": "t"}, {"q": completions("aaa", "b")})
    (row,) = label_by(candidates, prefer_longer, lambda a, b: -0.5, lambda a, b: -0.25)
    assert row["label"] == 1
    assert row["chosen"] == "b"
    assert row["margin"] == pytest.approx((2 - 0.5 - 0.25) / 3)


def test_equal_scores_prefer_the_second_completion_as_in_the_paper():
    candidates, _ = candidate_pairs({"q": "t"}, {"q": completions("a", "b")})
    assert label_by(candidates, lambda a, b: 0.0)[0]["label"] == 1


def test_no_pairs_give_no_rows():
    assert label_by([], prefer_longer) == []


def test_a_real_selector_chooses_the_same_completion_in_both_orders(tiny_selector, random_adapter):
    """The selector scores both orders, so that the order of the pair does not matter."""

    tiny_selector.slot.load(random_adapter(1))

    def chosen(first_label, second_label):
        sampled = {q: completions(f"{first_label} of {q}", f"{second_label} of {q}") for q in PROMPTS}
        candidates, _ = candidate_pairs(PROMPTS, sampled)
        comparisons = [Comparison(c.prompt, c.first.text, c.second.text) for c in candidates]
        rows = label_pairs(tiny_selector.margins(comparisons)[None], candidates)
        return {row["prompt_id"]: row["chosen"] for row in rows}

    assert chosen("first", "the second one") == chosen("the second one", "first")


# --- Shares


def test_shares_of_labeled_pairs_are_those_of_a_hand_computed_example():
    """Chosen: 'aa' (finished), 'ccc', 'dddd' (finished); rejected: 'b', 'c', 'ee' (finished)."""
    sampled = {
        "q0": completions("aa", "b"),
        "q1": completions("c", "ccc"),
        "q2": completions("dddd", "ee"),
    }
    candidates, _ = candidate_pairs({name: name for name in sampled}, sampled)
    shares = label_shares(label_by(candidates, prefer_longer))
    assert shares["label_1_share"] == pytest.approx(1 / 3)
    assert shares["chosen_longer_share"] == 1.0
    assert shares["chosen_finished_more"] == pytest.approx(2 / 3 - 1 / 3)


def test_shares_without_pairs_are_nan():
    assert all(np.isnan(value) for value in label_shares([]).values())


# --- Pairs by rank


def ranked(names, limit, **scores):
    """Texts of the chosen pairs of one prompt, labeled by the texts' scores."""
    candidates, _ = candidate_pairs({"q": "text"}, {"q": completions(*names)})
    labeled = label_by(candidates, lambda first, second: scores[first] - scores[second])
    return [(pair["chosen"], pair["rejected"]) for pair in choose_ranked_pairs(labeled, limit)]


@pytest.mark.parametrize(
    ("limit", "expected"), [(1, [("b", "a")]), (2, [("b", "a"), ("e", "d")]), (9, [("b", "a"), ("e", "d")])]
)
def test_the_best_completion_is_paired_with_the_worst_the_second_with_the_last_but_one_and_so_on(
    limit, expected
):
    assert sorted(ranked("abcde", limit, a=1, b=9, c=5, d=3, e=7)) == expected


@pytest.mark.parametrize(("of_z", "expected"), [(1, ("z", "x")), (9, ("y", "z"))])
def test_completions_with_equally_many_wins_are_ranked_by_the_log_odds_of_these(of_z, expected):
    """Each of three completions wins once: x by 5, y by 2, z by 1 or by 9."""
    candidates, _ = candidate_pairs({"q": "text"}, {"q": completions("x", "y", "z")})
    odds = {("x", "y"): 5, ("y", "z"): 2, ("x", "z"): -of_z}
    labeled = label_by(candidates, lambda first, second: odds[first, second])
    (pair,) = choose_ranked_pairs(labeled, 1)
    assert (pair["chosen"], pair["rejected"]) == expected


def test_pairs_are_chosen_for_each_prompt():
    candidates, _ = candidate_pairs(PROMPTS, COMPLETIONS)
    labeled = label_by(candidates, prefer_longer)
    chosen = [pair["prompt_id"] for pair in choose_ranked_pairs(labeled, 1)]
    assert sorted(chosen) == sorted({pair["prompt_id"] for pair in labeled})


def test_a_tie_of_an_even_number_of_selectors_is_decided_by_the_mean_of_the_log_odds():
    candidates, _ = candidate_pairs({"q": "text"}, {"q": completions("a", "bb")})
    for sure, expected in ((3.0, 0), (0.5, 1)):
        (row,) = label_by(candidates, lambda *texts, sure=sure: sure, lambda *texts: -1.0)
        assert row["label"] == expected
    (row,) = label_by(candidates, *[lambda *texts: 0.1] * 3, lambda *texts: -9.0)
    assert row["label"] == 0  # three votes to one
