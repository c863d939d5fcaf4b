"""`fed-rlhf compare` on folders of runs."""

import json
import re

import pytest

from components.recipes import load_recipe
from tasks.comparison import read_curve, read_metrics
from tasks.runs import create_run
from tests.support.command_line import fed_rlhf, refusal
from tests.support.results import client_record, federation_result, round_evaluation, step_record


@pytest.fixture
def two(tmp_path, monkeypatch):
    """A run with figures, and a stopped one of another method and seed."""
    monkeypatch.setenv("FED_RLHF_RUNS", str(tmp_path / "runs"))
    first = create_run(load_recipe("debug"), tmp_path / "runs" / "debug-1")
    settings = ["seed=3", "federation.method=fedavg"]
    second = create_run(load_recipe("debug", settings), tmp_path / "runs" / "other-1")
    first.report.mkdir()
    (first.report / "metrics.json").write_text('{"after/accuracy/mean": 0.75}')
    first.mark_done("report")
    return first, second


def write_commits(run, records):
    folder = run.federation / "commits"
    folder.mkdir(parents=True)
    for number, record in enumerate([None, *records]):
        content = record and record.model_dump(mode="json")
        (folder / f"{number:05d}.json").write_text(json.dumps({"record": content}))


def rounds():
    """A step's record with losses of two clients, whose mean is 0.5."""
    losses = {"ada": 0.25, "bea": 0.75}
    clients = {name: client_record({"loss_last": loss}) for name, loss in losses.items()}
    return [step_record(0, clients)]


def test_differing_keys_and_figures_have_a_column_for_each_run(two):
    result = fed_rlhf("compare", "debug", "latest")  # a beginning, and the run that was started last
    assert result.exit_code == 0, result.output
    rows = [re.split(" {2,}", line.strip()) for line in result.stdout.splitlines()]
    assert ["1", "debug-1", "finished"] in rows
    assert ["2", "other-1", "stopped: prepare"] in rows
    assert ["Run 2 has no figures yet, it is stopped: prepare."] in rows
    assert ["seed", "0", "3"] in rows
    assert ["federation.method", '"fedbis"', '"fedavg"'] in rows
    assert ["pair accuracy", "0.750"] in rows
    assert "data.source" not in result.stdout


def test_a_run_of_another_version_is_compared_by_what_its_files_have(two):
    path = two[1].folder / "recipe.yaml"
    path.write_text(path.read_text().replace("  method: fedavg\n", "  method: gone\n  cycles: 3\n"))
    two[1].report.mkdir()
    (two[1].report / "metrics.json").write_text('{"accuracy": {"before": {}}}')
    rows = [line.split() for line in fed_rlhf("compare", "debug-1", "other-1").stdout.splitlines()]
    assert ["federation.cycles", "-", "3"] in rows
    assert ["federation.method", '"fedbis"', '"gone"'] in rows


def test_a_stopped_run_has_the_accuracies_that_were_measured_so_far(two):
    round_evaluation(0, mean=0.5).write(two[1].federation / "evaluation-00000.json")
    round_evaluation(1, mean=0.6).write(two[1].federation / "evaluation-00001.json")
    metrics = read_metrics(two[1])
    assert metrics["before/accuracy/mean"] == 0.5
    assert "after/accuracy/mean" not in metrics  # there may be more rounds
    federation_result(evaluations=[round_evaluation(0, mean=0.5), round_evaluation(2, mean=0.7)]).write(
        two[1].federation / "result.json"
    )
    assert read_metrics(two[1])["after/accuracy/mean"] == 0.7


@pytest.mark.parametrize("names", [["debug-1"], ["debug-1", "debug-1"], ["debug-1", "other-1", "debug"]])
def test_one_run_and_a_run_that_is_named_twice_are_refused(two, names):
    assert "two or more runs, each of them once" in refusal("compare", *names)


def test_the_page_has_the_tables_and_the_curves_so_far(two, tmp_path):
    write_commits(two[1], rounds())
    round_evaluation(0, mean=0.5).write(two[1].federation / "evaluation-00000.json")
    page = tmp_path / "pages" / "comparison.html"
    result = fed_rlhf("compare", "debug-1", "other-1", "--html", str(page))
    assert result.exit_code == 0, result.output
    assert result.stderr == f"wrote {page}\n"
    html = page.read_text()
    assert "federation.method" in html
    assert "Accuracy on held-out pairs" in html
    assert "Training loss at the last local step" in html


def test_json_with_a_page_is_json_alone(two, tmp_path):
    result = fed_rlhf("compare", "debug-1", "other-1", "--json", "--html", str(tmp_path / "page.html"))
    assert json.loads(result.stdout)[0]["metrics"] == {"after/accuracy/mean": 0.75}
    assert (tmp_path / "page.html").is_file()


def test_a_page_that_cannot_be_written_is_one_sentence(two, tmp_path):
    (tmp_path / "file").write_text("")
    result = fed_rlhf("compare", "debug-1", "other-1", "--html", str(tmp_path / "file" / "page.html"))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path / 'file'}")


def test_the_curve_of_a_stopped_run_is_of_its_commits_and_measurements(two):
    write_commits(two[1], rounds())
    round_evaluation(0, mean=0.5).write(two[1].federation / "evaluation-00000.json")
    round_evaluation(1, mean=float("nan")).write(two[1].federation / "evaluation-00001.json")
    assert read_curve(two[1]) == [
        {"round": 0.0, "accuracy": 0.5},
        {"round": 1.0},
        {"round": 1.0, "loss_last": 0.5},
    ]


def test_the_curve_of_finished_rounds_is_of_their_result(two):
    federation_result(
        records=rounds(), evaluations=[round_evaluation(0, mean=0.5), round_evaluation(1, mean=0.7)]
    ).write(two[1].federation / "result.json")
    assert read_curve(two[1]) == [
        {"round": 0.0, "accuracy": 0.5},
        {"round": 1.0, "accuracy": 0.7},
        {"round": 1.0, "loss_last": 0.5},
    ]


def test_a_run_before_its_rounds_has_no_curve(two):
    assert read_curve(two[1]) == []
