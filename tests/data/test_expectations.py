"""Expectations are checked alike with and without the Data Docs."""

from dataclasses import replace

import pandas as pd
import pytest

from components.data.expectations import Rule, Suite, run_suites

FRAME = pd.DataFrame({"text": ["a", "b", None, "b"], "length": [1.0, 2.0, 30.0, 4.0]})
RULES = [
    Rule("ExpectColumnValuesToNotBeNull", "text is not null", {"column": "text"}),
    Rule("ExpectColumnValuesToBeUnique", "text is unique", {"column": "text"}),
    Rule("ExpectColumnMeanToBeBetween", "mean length", {"column": "length", "max_value": 20}),
    Rule("ExpectColumnMaxToBeBetween", "longest", {"column": "length", "max_value": 20}),
    Rule("ExpectColumnValuesToNotBeNull", "no such column", {"column": "missing"}),
]


@pytest.fixture(scope="module")
def outcomes():
    return {outcome.expectation: outcome for outcome in run_suites([Suite("rows", FRAME, RULES)], None)}


@pytest.mark.parametrize(
    ("expectation", "success", "indices"),
    [
        ("text is not null", False, [2]),
        ("text is unique", False, [1, 3]),
        ("mean length", True, []),
        ("longest", False, []),
    ],
)
def test_an_expectation_fails_with_the_rows_that_violate_it(outcomes, expectation, success, indices):
    outcome = outcomes[expectation]
    assert outcome.success is success
    assert outcome.indices == indices
    assert outcome.error is None


def test_an_expectation_that_cannot_be_checked_has_an_error(outcomes):
    assert not outcomes["no such column"].success
    assert "missing" in outcomes["no such column"].error


def test_the_outcomes_are_the_same_where_the_data_docs_are_written(outcomes, tmp_path):
    documented = run_suites([Suite("rows", FRAME, RULES)], tmp_path / "docs")
    suite = next(iter(outcomes.values())).suite
    assert [replace(outcome, suite=suite) for outcome in documented] == list(outcomes.values())
    assert (tmp_path / "docs" / "index.html").is_file()
