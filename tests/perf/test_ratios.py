"""Ratios of a run are judged by the median of earlier runs under the same conditions."""

import dataclasses

import pytest

from components.config import UserError
from perf.ratios import Conditions, Measured, Rule, judge, regression_tag, summarize

HERE = Conditions("debug", "Processor A", 2, "cpu")
RULE = Rule(tolerance=0.15, earlier_runs=7)


def earlier(*values, conditions=HERE, name="speed"):
    """Earlier runs with these values of a ratio, the newest first."""
    return [Measured(conditions.params() | {"torch": "1"}, {name: value}) for value in values]


def verdict(now, runs, rule=RULE):
    """The verdict on one ratio."""
    (single,) = judge({"speed": now}, HERE, runs, rule)
    return single


def test_a_ratio_below_the_tolerance_is_a_regression():
    judged = verdict(1.69, earlier(2.0, 1.0, 3.0))
    assert judged.before == 2.0
    assert judged.runs == 3
    assert judged.is_regression
    assert judged.row() == {
        "ratio": "speed",
        "now": "1.690",
        "median before": "2.000",
        "change": "-15.5%",
        "verdict": "regression",
    }


@pytest.mark.parametrize("now", [1.71, 2.0, 9.0])
def test_a_ratio_within_the_tolerance_or_above_is_no_regression(now):
    judged = verdict(now, earlier(2.0, 1.0, 3.0))
    assert not judged.is_regression
    assert judged.row()["verdict"] == "no regression"


def test_with_fewer_than_three_earlier_runs_nothing_is_judged():
    judged = verdict(0.1, earlier(2.0, 2.0))
    assert judged.before is None
    assert not judged.is_regression
    assert judged.row()["verdict"] == "not judged: 2 earlier runs of at least 3"
    assert regression_tag([judged]) == "not judged"
    assert "none was judged" in summarize([judged], RULE)


def test_only_the_last_runs_count():
    runs = earlier(1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0)
    assert verdict(1.0, runs, Rule(earlier_runs=3)).before == 1.0
    assert verdict(1.0, runs, Rule(earlier_runs=7)).before == 5.0


@pytest.mark.parametrize(
    "other",
    [{"processor": "Processor B"}, {"cores": 4}, {"recipe": "summarization/demo"}, {"device": "a GPU"}],
    ids=lambda change: next(iter(change)),
)
def test_runs_under_other_conditions_are_ignored(other):
    elsewhere = earlier(9.0, 9.0, 9.0, conditions=dataclasses.replace(HERE, **other))
    assert verdict(1.0, elsewhere).before is None
    assert verdict(1.0, elsewhere + earlier(1.0, 1.0, 1.0)).before == 1.0


def test_runs_without_the_ratio_are_not_counted():
    runs = earlier(9.0, 9.0, 9.0, name="another") + earlier(1.0, 1.0, 1.0)
    assert verdict(1.0, runs, Rule(earlier_runs=3)).before == 1.0


def test_a_run_of_which_nothing_is_known_is_ignored():
    assert verdict(1.0, [Measured({}, {"speed": 9.0})] * 3).before is None


def test_the_summary_and_the_tag_name_each_regression():
    now = {"speed": 1.0, "memory": 2.0}
    runs = [Measured(HERE.params(), {"speed": 2.0, "memory": 2.0})] * 4
    verdicts = judge(now, HERE, runs, RULE)
    assert regression_tag(verdicts) == "speed"
    assert summarize(verdicts, RULE) == (
        "1 of 2 ratios fell by more than 15%: speed is 1.000, the median of 4 earlier runs is 2.000."
    )


def test_without_a_regression_the_tag_is_none():
    verdicts = judge({"speed": 2.0, "new": 1.0}, HERE, earlier(2.0, 2.0, 2.0), RULE)
    assert regression_tag(verdicts) == "none"
    assert summarize(verdicts, RULE) == "No regression: 1 of 2 ratios were judged."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0.0}, "tolerance is 0, expected a fraction"),
        ({"tolerance": 1.5}, "tolerance is 1.5, expected a fraction"),
        ({"earlier_runs": 2}, "earlier_runs is 2, expected at least 3"),
    ],
)
def test_a_rule_out_of_its_range_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        Rule(**options)
