"""The tables of a run's report."""

from tasks.report import write_tables
from tasks.runs import Run
from tests.support.results import client_record, federation_result, round_evaluation, step_record


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
