"""Pairs of responses are put to a judge in both orders; judges are registered by name."""

import math
from typing import Literal

import pytest
from pydantic import Field

from components.config.evaluation import JUDGES
from components.evaluation.contests import judge_contest
from components.evaluation.judges import parse_autoj
from components.evaluation.judges.judge import Judge, JudgeResources, JudgeSection
from components.evaluation.winrate import Verdict, win_rate
from components.models.selector import Comparison
from components.recipes import load_recipe
from components.results import WinRate

FIRST, SECOND, TIE, UNPARSABLE = Verdict
PROMPTS = ["p0", "p1", "p2", "p3"]
OURS = ["good 0", "good 1", "bad 2", "good 3"]
THEIRS = ["bad 0", "bad 1", "good 2", "bad 3"]


class ScriptedJudge(Judge):
    """Decides by a function of a comparison, and records all comparisons that are put to it."""

    def __init__(self, decide):
        super().__init__("scripted")
        self.decide = decide
        self.comparisons = []

    def compare(self, comparisons):
        self.comparisons += comparisons
        return [self.decide(comparison) for comparison in comparisons]


def prefer_good(comparison):
    """A verdict for the first response if it starts with 'good', for the second one otherwise."""
    return FIRST if comparison.first.startswith("good") else SECOND


def pairs(ours=OURS, theirs=THEIRS):
    """Pairs of answers by the prompt's id."""
    rows = zip(PROMPTS, ours, theirs, strict=False)
    return {prompt: Comparison(prompt, one, other) for prompt, one, other in rows}


def judge_scripted(decide, ours=OURS, theirs=THEIRS):
    """The contest by a scripted judge, and the judge."""
    judge = ScriptedJudge(decide)
    return judge_contest(judge, pairs(ours, theirs)), judge


def test_a_contest_has_differences_of_style_where_they_are_asked_for():
    judge = ScriptedJudge(prefer_good)
    ours, theirs = ["# good\n\n- **a**", "good"], ["bad", "- bad\n- bad"]
    contest = judge_contest(judge, pairs(ours, theirs), style_control=True)
    assert contest.style == {"headings": [1, 0], "list_items": [1, -2], "bold": [1, 0]}
    assert judge_contest(judge, pairs(ours, theirs)).style == {}


# --- Public names


def test_the_parser_and_the_win_rate_have_their_public_names_and_types():
    assert parse_autoj("the final decision is Response 1") is Verdict.FIRST
    assert isinstance(win_rate([Verdict.FIRST, Verdict.TIE]), WinRate)


# --- Both orders


def test_each_pair_is_judged_once_in_each_order_and_a_judge_of_the_text_is_consistent():
    _, judge = judge_scripted(prefer_good)
    assert len(judge.comparisons) == 8
    expected = set()
    for prompt, ours, theirs in zip(PROMPTS, OURS, THEIRS, strict=True):
        expected |= {Comparison(prompt, ours, theirs), Comparison(prompt, theirs, ours)}
    assert set(judge.comparisons) == expected
    judged, _ = judge_scripted(prefer_good)
    assert judged.verdicts == [FIRST, FIRST, SECOND, FIRST]
    assert judged.consistency == 1.0
    assert judged.prompts == PROMPTS
    assert judged.ours == [len(text) for text in OURS]
    assert judged.theirs == [len(text) for text in THEIRS]


@pytest.mark.parametrize("position", [FIRST, SECOND])
def test_a_judge_of_the_position_gives_ties_and_no_consistency(position):
    """The published reference code shows the model first, and such a judge gives it all wins."""
    judged, _ = judge_scripted(lambda comparison: position)
    assert judged.verdicts == [TIE] * 4
    assert judged.consistency == 0.0


def test_exchanging_the_responses_exchanges_wins_and_losses():
    judged, _ = judge_scripted(prefer_good)
    exchanged, _ = judge_scripted(prefer_good, THEIRS, OURS)
    assert exchanged.verdicts == [SECOND, SECOND, FIRST, SECOND]
    assert exchanged.original != judged.original


def test_equal_responses_are_ties_and_are_not_put_to_the_judge():
    judged, judge = judge_scripted(prefer_good, ["good", "same", "bad"], ["bad", " same \n", "good"])
    assert judged.verdicts == [FIRST, TIE, SECOND]
    assert judged.equal == [False, True, False]
    assert judged.theirs == [3, 7, 4]
    assert judged.consistency == 1.0
    assert len(judge.comparisons) == 4
    assert "same" not in {comparison.first.strip() for comparison in judge.comparisons}
    judged, judge = judge_scripted(prefer_good, ["x"], ["x"])
    assert judged.verdicts == [TIE]
    assert math.isnan(judged.consistency)
    assert judge.comparisons == []


def test_an_unparsable_verdict_is_counted_and_is_left_out_of_the_consistency():
    def decide(comparison):
        is_unparsable = comparison.prompt == "p1" and comparison.first == "good 1"
        return UNPARSABLE if is_unparsable else prefer_good(comparison)

    judged, _ = judge_scripted(decide)
    assert judged.verdicts == [FIRST, UNPARSABLE, SECOND, FIRST]
    assert judged.consistency == 1.0
    assert judged.original[1] is UNPARSABLE
    assert judged.swapped[1] is SECOND


def test_the_consistency_is_the_share_of_pairs_on_which_both_orders_agree():
    judged, _ = judge_scripted(lambda c: FIRST if c.prompt == "p0" else prefer_good(c))
    assert judged.consistency == 0.75
    assert judged.verdicts[0] is TIE


# --- Registered judges


class ScriptedSection(JudgeSection):
    """A judge of a user's own package."""

    kind: Literal["scripted"] = Field("scripted", description="Kind of the judge.")

    def build(self, resources):
        return ScriptedJudge(prefer_good)


def test_a_new_judge_needs_no_more_than_its_name_in_the_registry(monkeypatch, tmp_path):
    monkeypatch.setitem(JUDGES.builtin, "scripted", f"{__name__}:ScriptedSection")
    section = load_recipe("debug", ["evaluation.judge=scripted"]).evaluation.judge
    judge = section.build(JudgeResources(tmp_path, tmp_path, 0, "cpu"))
    assert judge_contest(judge, pairs()).win_rate().wins == 3
