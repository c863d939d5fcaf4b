"""A judge against human verdicts: what counts as agreement, and the figures published for Auto-J on the real sample."""

import math

import pytest

from components.data.records import DataError
from components.evaluation.judge_report import judge_report, measure_judge, position_consistency, read_pairs, read_verdicts
from components.evaluation.winrate import Verdict

FIRST, SECOND, TIE, UNPARSABLE = Verdict


def report(*rows, **more):
    labels, given, exchanged, scenarios = zip(*rows, strict=True)
    return judge_report(labels, given, exchanged, scenarios, **more)


def test_agreement_is_the_human_verdict_in_both_orders():
    rows = [(FIRST, FIRST, SECOND, "a"), (FIRST, FIRST, FIRST, "a"), (SECOND, FIRST, FIRST, "a"), (SECOND, SECOND, FIRST, "b"), (TIE, TIE, TIE, "b"), (TIE, FIRST, FIRST, "b")]
    result = report(*rows)
    assert (result.agreement.count, result.agreement.of) == (3, 6)
    assert (result.agreement_given.count, result.agreement_exchanged.count) == (4, 4)
    assert {name: (agreement.rate, consistency.rate) for name, (agreement, consistency) in result.scenarios.items()} == {"a": (1 / 3, 1 / 3), "b": (2 / 3, 2 / 3)}
    assert result.consistency.rate == 0.5 and "50.00%" in str(result)


def test_what_cannot_be_parsed_is_wrong_counted_and_out_of_the_consistency():
    result = report((FIRST, UNPARSABLE, SECOND, "a"), (TIE, UNPARSABLE, UNPARSABLE, "a"), (FIRST, FIRST, SECOND, "a"))
    assert (result.agreement.count, result.agreement.of) == (1, 3)
    assert (result.unparsable_given, result.unparsable_exchanged) == (2, 1)
    assert (result.consistency.count, result.consistency.of) == (1, 1)
    assert math.isnan(report((FIRST, UNPARSABLE, SECOND, "a")).consistency.rate)


def test_intervals_hold_the_rate_and_are_a_function_of_the_seed():
    rows = [(FIRST, FIRST, (SECOND, FIRST)[i % 2], "a") for i in range(40)]
    result = report(*rows, resamples=500, seed=3)
    assert result.agreement.low < result.agreement.rate == 0.5 < result.agreement.high
    assert result == report(*rows, resamples=500, seed=3)


def test_rows_that_do_not_belong_together_are_refused():
    with pytest.raises(DataError, match="there are 1, 2, 1 and 1"):
        judge_report([FIRST], [FIRST, FIRST], [SECOND], ["a"])


def test_a_judge_is_measured_in_both_orders(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"scenario": "s", "label": 0, "prompt": "p", "response 1": "good", "response 2": "bad"}\n'
                    '{"scenario": "t", "label": 1, "prompt": "p", "response 1": "bad", "response 2": "good"}\n'
                    '{"scenario": "t", "label": 2, "prompt": "p", "response 1": "good", "response 2": "good too"}\n')

    class Good:
        description = "knows what is good"

        def compare(self, comparisons):
            return [FIRST if c.first == "good" else SECOND if c.second == "good" else TIE for c in comparisons]

    result = measure_judge(Good(), read_pairs(path))
    assert result.agreement.count == 2 and result.consistency.rate == 1.0 and set(result.scenarios) == {"s", "t"}


@pytest.mark.parametrize("output", ["3", '"Response 1"', "true", "1.0"])
def test_an_output_of_another_kind_is_refused_by_file_and_row(tmp_path, output):
    path = tmp_path / "words.jsonl"
    path.write_text('{"output": 0}\n{"output": -1}\n{"output": null}\n')
    assert read_verdicts(path) == [FIRST, UNPARSABLE, UNPARSABLE]
    path.write_text(f'{{"output": 0}}\n{{"output": {output}}}\n')
    with pytest.raises(DataError, match=r"words.jsonl, row 2: 'output' is"):
        read_verdicts(path)


def test_on_the_real_sample_the_figures_are_those_measured_and_the_consistency_is_the_published_one(samples):
    """Published for all 1,392 rows: agreement 54.96%, consistency 83.41%. The sample has human verdicts on rows 2, 4, 6, ..."""
    pairs = read_pairs(samples / "auto_j" / "pairwise_human_even.jsonl")
    given, exchanged = (read_verdicts(samples / "auto_j" / f"pairwise_{order}example_output.jsonl") for order in ("", "exchange_"))
    assert len(given) == len(exchanged) == 2 * len(pairs) == 1392
    whole = position_consistency(given, exchanged)
    assert (whole.count, whole.of) == (1161, 1392) and round(100 * whole.rate, 2) == 83.41
    result = judge_report([p.label for p in pairs], given[1::2], exchanged[1::2], [p.scenario for p in pairs])
    assert (result.agreement.count, result.agreement.of) == (375, 696) and result.agreement.low < 0.5496 < result.agreement.high
    assert (result.agreement_given.count, result.agreement_exchanged.count, result.consistency.count) == (410, 411, 574)
    assert (result.unparsable_given, result.unparsable_exchanged, len(result.scenarios)) == (0, 0, 58)
