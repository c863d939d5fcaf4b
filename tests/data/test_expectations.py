"""Suites give the rows that do not meet an expectation, with and without the Data Docs."""

import pandas as pd
import pytest

FRAME = pd.DataFrame({"text": ["a", "b", None, "b"], "length": [1.0, 2.0, 30.0, 4.0]})


def run(docs=None):
    """The results by the description of the expectation."""
    import great_expectations as gx
    import great_expectations.expectations as gxe

    from components.data.validation import run_suites

    expectations = [
        gxe.ExpectColumnValuesToNotBeNull(description="text is not null", column="text"),
        gxe.ExpectColumnValuesToBeUnique(description="text is unique", column="text"),
        gxe.ExpectColumnMeanToBeBetween(description="mean length", column="length", max_value=20),
        gxe.ExpectColumnMaxToBeBetween(description="longest", column="length", max_value=20),
        gxe.ExpectColumnValuesToNotBeNull(description="no such column", column="missing"),
    ]
    results = run_suites([gx.ExpectationSuite("rows", expectations=expectations)], {"rows": FRAME}, docs)
    assert {suite for suite, _ in results} == {"rows"}
    return {result.expectation_config.description: result for _, result in results}


@pytest.fixture(scope="module")
def results():
    return run()


@pytest.mark.parametrize(
    ("expectation", "success", "indices"),
    [
        ("text is not null", False, [2]),
        ("text is unique", False, [1, 3]),
        ("mean length", True, []),
        ("longest", False, []),
    ],
)
def test_an_expectation_fails_with_the_rows_that_violate_it(results, expectation, success, indices):
    result = results[expectation]
    assert result.success is success
    assert result.result.get("unexpected_index_list", []) == indices


def test_an_expectation_that_cannot_be_checked_fails_with_an_error(results):
    assert not results["no such column"].success
    assert "missing" in str(results["no such column"].exception_info)


def test_data_docs_are_written_without_a_log_and_change_no_result(results, tmp_path, caplog, capfd):
    documented = run(tmp_path / "docs")
    assert {name: result.result for name, result in documented.items()} == {
        name: result.result for name, result in results.items()
    }
    assert (tmp_path / "docs" / "index.html").is_file()
    assert list((tmp_path / "docs" / "validations" / "rows").rglob("*.html"))
    with caplog.at_level("INFO"):
        run(tmp_path / "docs")
    assert [record for record in caplog.records if record.name.startswith("great_expectations")] == []
    assert capfd.readouterr() == ("", "")
