"""Ratios of a run are judged by the median of earlier runs under the same conditions."""

import pandas as pd
import pytest

from components.config import UserError
from perf.ratios import check_rule, judge, regression_tag, regressions, rows, summarize

HERE = {"recipe": "debug", "processor": "Processor A", "cores": "2", "device": "cpu"}


def earlier(*values, conditions=HERE, name="speed"):
    """Earlier runs with these values of a ratio, the newest first."""
    return [{**conditions, "torch": "1", name: value} for value in values]


def verdicts(now, runs, earlier_runs=7):
    """The verdicts on some ratios."""
    return judge(now, HERE, pd.DataFrame(runs), 0.15, earlier_runs)


def before(now, runs, earlier_runs=7):
    """The median with which a ratio is judged; None if it is not."""
    row = verdicts({"speed": now}, runs, earlier_runs).loc["speed"]
    return row["before"] if row["judged"] else None


def test_a_ratio_below_the_tolerance_is_a_regression():
    table = verdicts({"speed": 1.69}, earlier(2.0, 1.0, 3.0))
    assert list(regressions(table)) == ["speed"]
    assert rows(table) == [
        {
            "ratio": "speed",
            "now": "1.690",
            "median before": "2.000",
            "change": "-15.5%",
            "verdict": "regression",
        }
    ]


@pytest.mark.parametrize("now", [1.71, 2.0, 9.0])
def test_a_ratio_within_the_tolerance_or_above_is_no_regression(now):
    table = verdicts({"speed": now}, earlier(2.0, 1.0, 3.0))
    assert regressions(table) == {}
    assert rows(table)[0]["verdict"] == "no regression"


@pytest.mark.parametrize("values", [(), (2.0, 2.0)])
def test_with_fewer_than_three_earlier_runs_nothing_is_judged(values):
    table = verdicts({"speed": 0.1}, earlier(*values))
    assert regressions(table) == {}
    assert rows(table)[0]["verdict"] == f"not judged: {len(values)} earlier runs of at least 3"
    assert rows(table)[0]["median before"] == "-"
    assert regression_tag(table) == "not judged"
    assert "none was judged" in summarize(table, 0.15)


def test_only_the_last_runs_count():
    runs = earlier(1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0)
    assert before(1.0, runs, 3) == 1.0
    assert before(1.0, runs, 7) == 5.0


@pytest.mark.parametrize(
    "other",
    [{"processor": "Processor B"}, {"cores": "4"}, {"recipe": "summarization/demo"}, {"device": "a GPU"}],
    ids=lambda change: next(iter(change)),
)
def test_runs_under_other_conditions_are_ignored(other):
    elsewhere = earlier(9.0, 9.0, 9.0, conditions=HERE | other)
    assert before(1.0, elsewhere) is None
    assert before(1.0, elsewhere + earlier(1.0, 1.0, 1.0)) == 1.0


def test_runs_without_the_ratio_are_not_counted():
    runs = earlier(9.0, 9.0, 9.0, name="another") + earlier(1.0, 1.0, 1.0)
    assert before(1.0, runs, 3) == 1.0


def test_a_run_of_which_nothing_is_known_is_ignored():
    assert before(1.0, [{"speed": 9.0}] * 3) is None


def test_the_summary_and_the_tag_name_each_regression():
    table = verdicts({"speed": 1.0, "memory": 2.0}, [{**HERE, "speed": 2.0, "memory": 2.0}] * 4)
    assert regression_tag(table) == "speed"
    assert summarize(table, 0.15) == (
        "1 of 2 ratios fell by more than 15%: speed is 1.000, the median of 4 earlier runs is 2.000."
    )


def test_without_a_regression_the_tag_is_none():
    table = verdicts({"speed": 2.0, "new": 1.0}, earlier(2.0, 2.0, 2.0))
    assert regression_tag(table) == "none"
    assert summarize(table, 0.15) == "No regression: 1 of 2 ratios were judged."


@pytest.mark.parametrize(
    ("tolerance", "earlier_runs", "message"),
    [
        (0.0, 7, "tolerance is 0, expected a fraction"),
        (1.5, 7, "tolerance is 1.5, expected a fraction"),
        (0.15, 2, "earlier_runs is 2, expected at least 3"),
    ],
)
def test_a_rule_out_of_its_range_is_refused(tolerance, earlier_runs, message):
    with pytest.raises(UserError, match=message):
        check_rule(tolerance, earlier_runs)
