"""The cost table of DRIFT's server side, on adapters of one layer."""

import math

import pytest

from components.config import UserError
from perf import graph_costs
from perf.__main__ import main


@pytest.fixture
def in_this_process(monkeypatch):
    """Measure in the test process, which has loaded the libraries already."""
    monkeypatch.setattr(graph_costs, "in_process", lambda function, *arguments: function(*arguments))


def rows_of(capsys):
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()]
    return [words for words in lines if words[0].isdigit()]


@pytest.mark.parametrize("in_memory", [64, 0], ids=["in memory", "read from files"])
def test_the_table_has_a_row_per_number_of_clients_and_the_double_loop_agrees(
    in_this_process, capsys, in_memory
):
    graph_costs.compare_clients([3, 2, 4], loop=3, in_memory=in_memory, rank=1, layers=1)
    rows = rows_of(capsys)
    assert [row[0] for row in rows] == ["2", "3", "4"]
    assert [len(row) for row in rows] == [9, 9, 6]  # the loop is not timed for 4
    assert all(float(row[-2]) < 1e-6 for row in rows[:2])


def test_the_costs_are_plotted(in_this_process, tmp_path):
    graph_costs.compare_clients([2, 3], loop=2, rank=1, layers=1, plot=tmp_path / "costs.html")
    assert (tmp_path / "costs.html").read_text(encoding="utf-8").count("plotly-graph-div") == 1


def test_no_clients_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["graph-costs", "0"])
    assert "'clients'" in capsys.readouterr().err


@pytest.mark.pipeline
def test_each_number_of_clients_is_measured_in_a_process_of_its_own(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["graph-costs", "2", "--rank", "1", "--layers", "1"])
    assert [row[0] for row in rows_of(capsys)] == ["2"]


def test_a_measurement_that_fails_ends_with_the_reason_and_shows_the_others(monkeypatch, capsys):
    def measure(function, folder, count, *options):
        if count == 3:
            raise UserError("3 clients: the process was killed")
        return {"clients": count, "all": 1.0, "memory": 8.0, "double loop": math.nan}

    monkeypatch.setattr(graph_costs, "in_process", measure)
    with pytest.raises(SystemExit, match="2"):
        main(["graph-costs", "3", "2", "--rank", "1", "--layers", "1"])
    output = capsys.readouterr()
    assert output.err == "error: 3 clients: the process was killed\n"
    assert "  2         1 " in output.out
