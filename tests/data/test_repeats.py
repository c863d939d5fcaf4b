"""Pairs that repeat or contradict others of their owner."""

import pandas as pd

from components.data.data_report import RepeatCounts
from components.data.prepare import count_repeats, prepare, repeat_warnings
from tests.support.sources import WHOLE_FILE, data_config, write_jsonl


def frame(*rows):
    return pd.DataFrame(rows, columns=["client_id", "prompt", "chosen", "rejected"])


def test_repeats_and_contradictions_of_one_owner_are_counted():
    counts = count_repeats(
        frame(
            ("a", "p", "caf\u00e9", "r"),
            ("a", "p", "caf\u00e9", "r"),  # the same
            ("a", "p", "cafe\u0301", "r"),  # the same, decomposed
            ("a", "p", "caf\u00e9", "r"),  # the same
            ("a", "p", "r", "caf\u00e9"),  # the other way round: five pairs cannot all be learned
            ("b", "p", "r", "caf\u00e9"),  # of another owner
            ("a", "q", "s", "s"),  # no preference
            ("a", "q", "caf\u00e9", "r"),
        )
    )
    assert counts == RepeatCounts(duplicates=2, normalized=1, contradictory=5, equal=1)


def test_a_pair_that_prefers_a_spelling_is_no_repeat_of_its_contradiction():
    counts = count_repeats(frame(("a", "p", "Yes.", "yes."), ("a", "p ", "yes.", "Yes.")))
    assert counts == RepeatCounts(contradictory=2)


def test_texts_that_differ_in_case_indentation_or_exponents_repeat_and_contradict_nothing():
    others = [
        ("2^5 = 2⁵", "25", "2⁵"),
        ("2^5 = 25", "2⁵", "25"),
        ("x", "a\n b", "a\nb"),
        ("X", "a\nb", "a\n b"),
    ]
    assert count_repeats(frame(*(("a", *texts) for texts in others))) == RepeatCounts()


def test_completions_that_repeat_their_prompts_are_counted(tmp_path):
    def data(count):
        rows = [
            {
                "prompt": f"Where is the parcel of order {n}?",
                "chosen": f"{f'Where is the parcel of order {n}?' * (n < count)} On its way, {n}.",
                "rejected": f"{f'Where is the parcel of order {n}?' * (n < count)} No idea of {n}.",
                "client_id": f"o{n % 3}",
            }
            for n in range(60)
        ]
        path = write_jsonl(tmp_path / "p.jsonl", rows)
        return data_config(source="jsonl", path=path, options=WHOLE_FILE)

    report = prepare(data(7), 0, tmp_path / "data")
    assert report.metrics()["repeats/prompts"] == 7
    assert any("base models write them: 7;" in text for text in report.warnings)


def test_short_prompts_and_one_completion_that_begins_so_repeat_nothing():
    counts = count_repeats(
        frame(
            ("a", "Why?", "Why? So.", "Why? No."),
            ("a", "def add(a, b):\n    pass", "def add(a, b):\n    pass  # no", "def add(a, b): return"),
        )
    )
    assert counts == RepeatCounts()


def test_each_count_is_a_sentence_and_a_metric_where_there_are_some(tmp_path):
    counts = RepeatCounts(duplicates=1, normalized=2, contradictory=3, equal=4, prompts=5)
    found = list(repeat_warnings(counts))
    assert [int(warning.partition(";")[0].split()[-1]) for warning in found] == [1, 2, 3, 4, 5]
    assert list(repeat_warnings(RepeatCounts())) == []
    rows = [{"prompt": f"p{n}", "chosen": "c", "rejected": "r", "client_id": f"o{n % 3}"} for n in range(40)]
    data = data_config(
        source="jsonl", path=write_jsonl(tmp_path / "p.jsonl", [*rows, rows[0]]), options=WHOLE_FILE
    )
    metrics = prepare(data, 0, tmp_path / "data").metrics()
    assert metrics["repeats/duplicates"] == 1
    assert "repeats/contradictory" not in metrics
