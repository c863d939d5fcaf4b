"""The lines that a run logs, and the tables of its report."""

import re

import pytest

from components.reporting.lines import accuracy_line, partition_line
from components.results import AccuracyReport
from tasks.report import write_tables
from tasks.runs import Run
from tests.support.preparation import preparation_report
from tests.support.results import client_record, federation_result, round_evaluation, step_record


def numbers_of(line):
    return re.findall(r"\d[\d,.]*\d|\d", line)


@pytest.fixture
def report():
    every = {"samples": 92858, "clients": 53, "max": 12985, "min": 1, "std": 2284.33}
    train = {"samples": 65000, "clients": 53, "max": 9100, "min": 0, "std": 1600.5}
    return preparation_report(partition=every, partition_train=train)


def test_the_partition_is_logged_with_the_columns_of_table_5_for_all_pairs_and_for_training_pairs(report):
    every = ["92,858", "53", "12,985", "1", "2,284.33"]
    train = ["65,000", "9,100", "0", "1,600.50"]
    assert numbers_of(partition_line(report)) == [*every, *train]


def accuracy(domains):
    return AccuracyReport(
        mean=0.6, worst=0.5, best=0.75, clients={}, domains=domains, pairs=8, margin=1.0, margins={}
    )


def test_a_round_whose_clients_report_a_loss_without_its_steps_is_not_in_the_table_of_rounds(tmp_path):
    scalars = [{"loss": 0.5}, {"loss": 0.5, "loss_first": 0.75, "loss_last": 0.25}]
    records = [step_record(n, {"ada": client_record(values)}) for n, values in enumerate(scalars)]
    run = Run("run", tmp_path)
    run.report.mkdir()
    write_tables(run, federation_result(records=records))
    assert (run.report / "rounds.csv").read_text().split() == ["round,loss_first,loss_last", "2,0.75,0.25"]


def test_the_table_of_accuracies_has_a_client_that_did_not_answer_before_the_rounds(tmp_path):
    before, after = round_evaluation(0), round_evaluation(1)
    name, *others = sorted(before.accuracy.clients)
    fewer = before.accuracy.model_copy(update={"clients": dict.fromkeys(others, 0.5)})
    run = Run("run", tmp_path)
    run.report.mkdir()
    evaluations = [before.model_copy(update={"accuracy": fewer}), after]
    write_tables(run, federation_result(evaluations=evaluations))
    _, *rows = (run.report / "accuracy.csv").read_text().split()
    assert f"{name},,{after.accuracy.clients[name]}" in rows
    assert len(rows) == len(after.accuracy.clients)


def test_the_accuracy_of_a_few_domains_is_logged():
    line = accuracy_line(accuracy({"common": 0.7, "own": 0.5}))
    assert numbers_of(line) == ["0.600", "0.500", "0.750", "0.700", "0.500"]
    assert line.endswith("common 0.700, own 0.500")


def test_the_accuracy_of_many_domains_is_not_logged():
    line = accuracy_line(accuracy({f"Question {i}?": 0.5 for i in range(36)}))
    assert numbers_of(line) == ["0.600", "0.500", "0.750"]
