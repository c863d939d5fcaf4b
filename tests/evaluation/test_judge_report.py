"""Reliability of a judge, with Auto-J's published figures on the real sample."""

import math

import pytest

from components.config.evaluation import JUDGES
from components.data.records import DataError
from components.data.sources.hub_pairs import LabeledRow
from components.evaluation.judge_report import (
    VERDICTS,
    Share,
    build_judge_report,
    measure_judge,
    read_pairs,
    read_verdicts,
)
from components.evaluation.judges.judge import Judge
from components.evaluation.winrate import Verdict, orders_agree
from components.recipes import load_recipe
from tasks.runs import create_run
from tests.support.command_line import fed_rlhf, refusal
from tests.support.judges import LengthSection

FIRST, SECOND, TIE, UNPARSABLE = Verdict


def report(*rows):
    """Report on rows of (human verdict, original verdict, swapped verdict, scenario)."""
    pairs = [labeled(label, scenario) for label, _, _, scenario in rows]
    return build_judge_report(pairs, [row[1] for row in rows], [row[2] for row in rows])


def labeled(label, scenario="a"):
    columns = {"prompt": "p", "response 1": "a", "response 2": "b"}
    return LabeledRow.model_validate({"scenario": scenario, "label": VERDICTS.index(label), **columns})


MIXED = [
    (FIRST, FIRST, SECOND, "a"),
    (FIRST, FIRST, FIRST, "a"),
    (SECOND, FIRST, FIRST, "a"),
    (SECOND, SECOND, FIRST, "b"),
    (TIE, TIE, TIE, "b"),
    (TIE, FIRST, FIRST, "b"),
]


def test_agreement_and_consistency_in_both_orders_are_reported_by_scenario_and_in_percent():
    overall = report(*MIXED)
    assert (overall.agreement.count, overall.agreement.total) == (3, 6)
    assert overall.agreement_original.count == 4
    assert overall.agreement_swapped.count == 4
    assert overall.consistency.rate == 0.5
    scenarios = report(*MIXED).scenarios
    rates = {name: (own.agreement.rate, own.consistency.rate) for name, own in scenarios.items()}
    assert rates == {"a": (1 / 3, 1 / 3), "b": (2 / 3, 2 / 3)}
    assert "50.00%" in str(report(*MIXED))


def test_unparsable_verdicts_disagree_are_counted_and_are_left_out_of_the_consistency():
    result = report(
        (FIRST, UNPARSABLE, SECOND, "a"), (TIE, UNPARSABLE, UNPARSABLE, "a"), (FIRST, FIRST, SECOND, "a")
    )
    assert (result.agreement.count, result.agreement.total) == (1, 3)
    assert result.unparsable == (2, 1)
    assert (result.consistency.count, result.consistency.total) == (1, 1)
    assert math.isnan(report((FIRST, UNPARSABLE, SECOND, "a")).consistency.rate)


def test_intervals_contain_the_rate_and_are_the_same_again():
    rows = [(FIRST, FIRST, (SECOND, FIRST)[i % 2], "a") for i in range(40)]
    result = report(*rows)
    agreement = result.agreement
    assert agreement.rate == 0.5
    assert agreement.low < 0.5 < agreement.high
    assert result == report(*rows)


def test_different_numbers_of_verdicts_are_refused_with_the_counts():
    with pytest.raises(DataError, match=r"1 labeled pairs .* there are 2 on the original order and 1 on"):
        build_judge_report([labeled(FIRST)], [FIRST, FIRST], [SECOND])


def test_a_file_without_comparisons_is_refused(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("")
    with pytest.raises(DataError, match="pairs.jsonl"):
        read_pairs(path)


class GoodIsBetter(Judge):
    """A judge without a position bias that prefers the response 'good'."""

    def compare(self, comparisons):
        return [FIRST if c.first == "good" else SECOND if c.second == "good" else TIE for c in comparisons]


def test_a_judge_is_measured_in_both_orders(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        '{"scenario": "s", "label": 0, "prompt": "p", "response 1": "good", "response 2": "bad"}\n'
        '{"scenario": "t", "label": 1, "prompt": "p", "response 1": "bad", "response 2": "good"}\n'
        '{"scenario": "t", "label": 2, "prompt": "p", "response 1": "good", "response 2": "good too"}\n'
    )
    result = measure_judge(GoodIsBetter("prefers 'good'"), read_pairs(path))
    assert result.agreement.count == 2
    assert result.consistency.rate == 1.0
    assert set(result.scenarios) == {"s", "t"}


def test_negative_and_null_outputs_are_unparsable_verdicts(tmp_path):
    path = tmp_path / "verdicts.jsonl"
    path.write_text('{"output": 0}\n{"output": -1}\n{"output": null}\n')
    assert read_verdicts(path) == [FIRST, UNPARSABLE, UNPARSABLE]


@pytest.mark.parametrize("output", ["3", '"Response 1"', "true", "1.0"])
def test_an_output_of_another_kind_is_refused_with_its_file_and_row(tmp_path, output):
    path = tmp_path / "verdicts.jsonl"
    path.write_text(f'{{"output": 0}}\n{{"output": {output}}}\n')
    with pytest.raises(DataError, match=r"verdicts.jsonl, row 2: column 'output' must be 0 .*, but is"):
        read_verdicts(path)


@pytest.fixture
def labeled_pairs(tmp_path):
    """A file of two pairs, whose longer and whose first response people prefer."""
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        '{"scenario": "s", "label": 0, "prompt": "p", "response 1": "longer", "response 2": "long"}\n'
        '{"scenario": "s", "label": 0, "prompt": "p", "response 1": "long", "response 2": "longer"}\n'
    )
    return str(path)


def test_the_command_reports_the_judge_of_a_run(labeled_pairs, tmp_path, monkeypatch):
    monkeypatch.setenv("FED_RLHF_RUNS", str(tmp_path / "runs"))
    monkeypatch.setitem(JUDGES.builtin, "length", f"{LengthSection.__module__}:LengthSection")
    create_run(load_recipe("debug", ["evaluation.judge=length"]), tmp_path / "runs" / "debug-1")
    result = fed_rlhf("judge", labeled_pairs, "--run", "debug-1")
    assert result.exit_code == 0, result.output
    assert "in both orders  50.00%" in result.stdout
    assert "position consistency  100.00%" in result.stdout


def test_the_command_reports_stored_verdicts_and_needs_either_these_or_a_run(labeled_pairs, tmp_path):
    path = tmp_path / "verdicts.jsonl"
    path.write_text('{"output": 0}\n{"output": 0}\n')
    result = fed_rlhf("judge", labeled_pairs, "--verdicts", str(path), str(path))
    assert "in the original order only  100.00%" in result.stdout
    assert "position consistency  0.00%" in result.stdout
    assert "--run RUN, or its verdicts by --verdicts" in refusal("judge", labeled_pairs)


@pytest.fixture(scope="module")
def real_verdicts(samples):
    """Auto-J's published outputs on the original and on the swapped order of all 1,392 rows."""
    files = (f"pairwise_{order}example_output.jsonl" for order in ("", "exchange_"))
    return [read_verdicts(samples / "auto_j" / file) for file in files]


def test_on_the_real_sample_the_consistency_is_the_published_one(real_verdicts):
    """Published for all 1,392 rows: 83.41%."""
    original, swapped = real_verdicts
    assert len(original) == 1392
    assert len(swapped) == 1392
    consistency = Share.of(orders_agree(original, swapped))
    assert (consistency.count, consistency.total) == (1161, 1392)
    assert round(100 * consistency.rate, 2) == 83.41


def test_on_the_real_sample_the_interval_of_the_agreement_contains_the_published_one(samples, real_verdicts):
    """Published for all rows: 54.96%. The sample has human verdicts on rows 2, 4, 6, ... only."""
    original, swapped = real_verdicts
    pairs = read_pairs(samples / "auto_j" / "pairwise_human_even.jsonl")
    assert len(pairs) == 696
    result = build_judge_report(pairs, original[1::2], swapped[1::2])
    assert (result.agreement.count, result.agreement.total) == (375, 696)
    assert result.agreement.low < 0.5496 < result.agreement.high
    assert result.agreement_original.count == 410
    assert result.agreement_swapped.count == 411
    assert result.consistency.count == 574
    assert result.unparsable == (0, 0)
    assert len(result.scenarios) == 58
