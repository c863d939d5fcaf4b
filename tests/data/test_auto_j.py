"""The source auto-j: the direction of its labels, dropped rows, and the real sample."""

import json

import pytest

from components.config import DataConfig
from components.data import sources
from components.data.prepare import prepare
from components.data.records import DataError
from tests.support.sources import WHOLE, prepared_rows, read_jsonl


def load(path, **more):
    return sources.load(DataConfig(source="auto-j", path=str(path), **more), 0)


def test_label_0_prefers_response_1_and_label_1_response_2(fixtures):
    raw = read_jsonl(fixtures / "auto_j.jsonl")
    data = load(fixtures / "auto_j.jsonl", options=WHOLE)
    assert len(data.pairs) == 6
    assert all(r.chosen.startswith("Better") and r.rejected.startswith("Worse") for r in data.pairs)
    by_prompt = {row["prompt"]: row for row in raw}
    assert {by_prompt[r.prompt]["label"] for r in data.pairs} == {0, 1}
    for row in data.pairs:
        assert (
            row.chosen == by_prompt[row.prompt][("response 1", "response 2")[by_prompt[row.prompt]["label"]]]
        )


def test_the_domain_is_the_scenario_and_what_makes_no_pair_is_counted(fixtures):
    data = load(fixtures / "auto_j.jsonl", options=WHOLE)
    assert data.dropped == {"tie": 1, "both responses the same": 1, "empty prompt or response": 1}
    assert (
        sorted(row.domain for row in data.pairs)
        == ["chitchat"] * 2 + ["planning"] * 2 + ["text_correction"] * 2
    )
    assert {row.client_id for row in data.pairs} == {""}


def test_a_missing_file_is_named_in_one_sentence():
    with pytest.raises(
        DataError, match="give testdata_pairwise.jsonl of the repository GAIR-NLP/auto-j as data.path"
    ):
        sources.load(DataConfig(source="auto-j"), 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"label": 3},
            r"row 1: column 'label' must be 0 \(response 1 is better\), .* or 2 \(tie\), but is 3",
        ),
        ({"label": "0"}, "column 'label' must be .*, but is '0'"),
        ({"label": True}, "column 'label' must be .*, but is True"),
        ({"label": 1.0}, "column 'label' must be .*, but is 1.0"),
        ({"response 2": 5}, "column 'response 2' must be text"),
        ({"scenario": ...}, "column 'scenario' is missing"),
    ],
)
def test_a_row_with_wrong_columns_is_refused_with_file_and_row(fixtures, tmp_path, change, words):
    row = json.loads((fixtures / "auto_j.jsonl").read_text().splitlines()[0]) | change
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({k: v for k, v in row.items() if v is not ...}) + "\n")
    with pytest.raises(DataError, match=words) as error:
        load(path)
    assert str(path) in str(error.value)


@pytest.mark.slow
def test_the_real_sample_is_prepared_by_scenario_and_loses_no_row_uncounted(samples, tmp_path):
    path = samples / "auto_j" / "pairwise_human_even.jsonl"
    report = prepare(
        DataConfig(source="auto-j", path=str(path), partition="dirichlet", clients=10), 0, tmp_path / "data"
    )
    rows = report.rows
    dropped = rows.dropped
    assert rows.pairs + rows.judge + sum(dropped.values()) == 696
    assert dropped == {"tie": 183, "both responses the same": 1, "prompt given to the server": 68}
    assert rows.pairs == 408
    assert report.partition.clients == 10
    assert report.clients_without_train == []
    pairs = prepared_rows(tmp_path / "data")
    assert len({r["domain"] for r in pairs}) == 58
    assert len({(r["group"], r["client_id"]) for r in pairs}) == len({r["group"] for r in pairs})


@pytest.mark.slow
def test_the_real_harmlessness_sample_is_prepared_and_loses_no_row_uncounted(samples, tmp_path):
    path = samples / "hh_rlhf" / "harmless_base_even.jsonl.gz"
    report = prepare(
        DataConfig(source="hh-rlhf", path=str(path), partition="iid", clients=10), 0, tmp_path / "data"
    )
    rows = report.rows
    assert rows.pairs + rows.judge + sum(rows.dropped.values()) == 1156
    assert rows.pairs == 905
    assert report.splits == {"train": 592, "validation": 103, "test": 210}
