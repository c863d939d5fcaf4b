"""Lines of a run's log."""

import re

from components.data.data_report import (
    MarginSummary,
    PartitionSummary,
    PreparationReport,
    RowCounts,
    TreeCounts,
    ValidationSummary,
)
from components.data.prepare import prepare
from components.reporting.lines import (
    KEPT_BY,
    accuracy_line,
    left_out_line,
    margins_line,
    measure_line,
    partition_line,
    questions_line,
    round_line,
)
from components.results import Metrics
from tests.support.results import accuracy_report, client_record, question_result, step_record
from tests.support.sources import data_config, write_jsonl


def numbers_of(text):
    """The numbers in a text, in their order."""
    return re.findall(r"\d[\d,.]*\d|\d", text)


# --- Prepared data


def preparation(**values):
    """A report of prepared data with the partition of FedBiscuit's table 5."""
    every = PartitionSummary(samples=92858, clients=53, max=12985, min=1, std=2284.33)
    train = PartitionSummary(samples=65000, clients=53, max=9100, min=0, std=1600.5)
    defaults = {
        "rows": RowCounts(source=0, pairs=0, left_out={}, judge=0, prompts={}, dropped={}),
        "splits": {},
        "partition": every,
        "partition_train": train,
        "clients_without_train": [],
        "expectations": ValidationSummary(success=True, expectations=[]),
    }
    return PreparationReport(**defaults | values)


def test_the_partition_is_a_line_with_the_columns_of_table_5_over_all_pairs_and_over_training_pairs():
    every = ["92,858", "53", "12,985", "1", "2,284.33"]
    train = ["65,000", "9,100", "0", "1,600.50"]
    assert numbers_of(partition_line(preparation())) == [*every, *train]


def test_margins_of_thoughts_are_a_line_with_the_tied_siblings_which_is_empty_without_pairs():
    rows = preparation().rows.model_copy(
        update={"trees": TreeCounts(pairs=3, questions=1, dropped={"same score": 7})}
    )
    report = preparation(rows=rows, margins=MarginSummary(pairs=1234, min=1, median=2, max=9))
    assert numbers_of(margins_line(report)) == ["1,234", "1", "2", "9", "7"]
    assert margins_line(preparation()) == ""


def test_what_is_left_out_is_a_line_with_the_keys_that_keep_it(tmp_path):
    rows = [
        {"prompt": f"p{n}", "chosen": f"c{n}" + "x" * (n == 0) * 99, "rejected": f"r{n}"}
        | {"client_id": f"o{n % 6}"}
        for n in range(90)
    ]
    data = data_config(
        source="jsonl",
        path=write_jsonl(tmp_path / "p.jsonl", rows),
        options={"align_share": 0.3, "judge_clients": 0},
        clients=4,
        max_pairs=20,
        max_characters=50,
    )
    counts = prepare(data, 0, tmp_path / "data").rows
    line = left_out_line(counts)
    reasons = counts.left_out | counts.dropped
    assert len(reasons) == 4
    for reason, count in reasons.items():
        assert f"{count} ({reason}, see {KEPT_BY[reason]})" in line


def test_rare_reasons_are_counted_together():
    dropped = dict(zip("abcdef", range(1, 7), strict=True))
    rows = preparation().rows.model_copy(update={"dropped": dropped})
    assert left_out_line(rows) == "left out: 6 (f), 5 (e), 4 (d), 3 (c), 3 (other reasons)"
    assert left_out_line(preparation().rows) == ""


# --- Accuracies


def test_the_accuracy_is_a_line_with_a_few_domains_and_the_assigned_adapters():
    line = accuracy_line(accuracy_report())
    assert numbers_of(line) == ["0.600", "0.400", "0.800", "0.200", "0.900", "0.500"]
    assert line.endswith("common 0.900, own 0.500")
    domains = {f"Question {n}?": 0.5 for n in range(36)}
    assert numbers_of(accuracy_line(accuracy_report(domains=domains))) == ["0.600", "0.400", "0.800", "0.200"]
    assigned = accuracy_report(mean=0.7, domains={})
    line = accuracy_line(accuracy_report(domains={}, assigned=assigned))
    assert numbers_of(line) == ["0.600", "0.400", "0.800", "0.200", "0.700", "0.400", "0.800", "0.200"]
    assert "sd nan" in accuracy_line(accuracy_report(clients={}))


def test_a_measure_of_a_method_is_a_line():
    assert measure_line("rewards", Metrics(scalars={"helpful": 1.5, "kl": 0.25})) == (
        "rewards: helpful 1.500, kl 0.250"
    )


# --- Steps of the federation


def test_a_step_is_a_line_with_its_clients_failures_and_numbers_of_the_server():
    clients = {"ada": client_record({"loss": 0.5}), "bea": client_record({"loss": 0.7})}
    line = round_line(step_record(clients=clients, server={"s0/server_step": 0.25, "s0/members": 2}))
    assert line == "2 clients, training loss 0.600, update norm 0.250"
    record = step_record(phase="grouping", rounds_done=0, server={"moved": 3.0, "loss_of_group": 0.5})
    assert round_line(record) == "grouping: 0 clients, moved 3, loss_of_group 0.5"
    line = round_line(step_record(failed={"ada": "no memory"}, refused={"bea": "NaN in A"}))
    assert line == "0 clients, failed: ada (no memory), refused: bea (NaN in A)"


def test_the_answers_to_questions_are_a_line_with_the_means_over_sets_by_policy():
    line = questions_line({"base": question_result(0.3), "aligned": question_result(0.5, 0.8)})
    base, aligned = line.split(" | ")
    assert numbers_of(base) == ["0.300", "0.250", "0.100"]
    assert numbers_of(aligned) == ["0.500", "0.250", "5", "0.800", "0.400", "0.100"]
