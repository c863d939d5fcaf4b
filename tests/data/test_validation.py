"""The sentences on data that do not meet an expectation."""

import pandas as pd
import pytest

from components.data.data_report import Limits
from components.data.records import DataError
from components.data.validation import validate


def tables(prompt_column: str = "prompt_id") -> dict[str, pd.DataFrame]:
    rows = [
        {
            "pair_id": f"p{i}",
            "client_id": "c",
            "split": "train",
            "group": f"question {i}",
            "prompt": f"question {i}",
            "chosen": "yes",
            "rejected": f"no {i}",
        }
        for i in range(50)
    ]
    prompts = pd.DataFrame([{prompt_column: "1", "prompt": "other", "split": "align"}])
    pairs = pd.DataFrame(rows)
    return {"pairs": pairs, "judge": pairs.iloc[:0], "prompts": prompts}


def test_an_expectation_that_cannot_be_checked_says_why():
    with pytest.raises(DataError) as error:
        validate(tables(prompt_column="id"), Limits(["c"], 200, True), None)
    (line,) = [line for line in str(error.value).splitlines() if line.startswith("- prompts")]
    assert line.startswith("- prompts: 'the prompt_id is unique' (column prompt_id) could not be checked:")
    assert 'column "prompt_id"' in line


def test_an_extreme_label_balance_is_refused_with_its_share_and_the_expected_ones():
    data = tables()
    data["pairs"]["rejected"] = "no"
    with pytest.raises(DataError) as error:
        validate(data, Limits(["c"], 200, True), None)
    title, ids = str(error.value).splitlines()[1:]
    assert title.startswith("- pairs: 'label balance: chosen comes first in a label-free order'")
    assert title.endswith("% of 50 pairs, but 2% to 98% is expected; the first of 50 rows:")
    assert ids == "    pair_id: p0, p1, p2, p3, p4"


def test_data_docs_show_texts_and_names_of_the_data_as_text(tmp_path):
    tag = "<script>alert(1)</script> $\\bad{$ ${x}"
    data = tables()
    pairs = data["pairs"]
    pairs.loc[0, ["client_id", "pair_id", "split"]] = tag
    pairs.loc[1, ["pair_id", "prompt", "chosen", "rejected"]] = tag + "x" * 200
    pairs.loc[2, "client_id"] = f"unknown {tag}"
    with pytest.raises(DataError, match="6 of"):
        validate(data, Limits(["c", tag], 200, True), tmp_path / "docs")
    pages = [page.read_text(encoding="utf-8") for page in (tmp_path / "docs").rglob("*.html")]
    assert not any("<script>alert" in page for page in pages)
    assert sum(page.count("&lt;script&gt;alert(1)&lt;/script&gt; $\\bad{$ ${x}") for page in pages) >= 5
