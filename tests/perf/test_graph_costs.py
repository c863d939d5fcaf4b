"""The cost table of DRIFT's server side, on adapters of one layer."""

import re

import pytest

from perf import graph_costs

SMALL = ["--clients", "3", "2", "--loop", "3", "--rank", "1", "--layers", "1"]


@pytest.fixture
def in_this_process(monkeypatch):
    """Measure in the test process, which has loaded the libraries already."""

    def measure(folder, count, options):
        return graph_costs.measure(folder, count, count <= options.in_memory, count <= options.loop)

    monkeypatch.setattr(graph_costs, "_measure_in_process", measure)


@pytest.mark.parametrize("in_memory", ["64", "0"], ids=["in memory", "read from files"])
def test_the_table_has_a_row_per_number_of_clients_and_the_double_loop_agrees(
    in_this_process, capsys, in_memory
):
    assert graph_costs.main([*SMALL, "--in-memory", in_memory]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["2", "3"]
    assert all("x" in row for row in rows)
    assert all(float(re.split(r"\s+", row)[-1]) < 1e-6 for row in rows)


@pytest.mark.slow
def test_the_costs_are_plotted(in_this_process, tmp_path):
    assert graph_costs.main([*SMALL, "--plot", str(tmp_path / "costs.html")]) == 0
    assert (tmp_path / "costs.html").read_text(encoding="utf-8").count("plotly-graph-div") == 1


def test_no_clients_are_refused(capsys):
    assert graph_costs.main(["--clients", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_each_number_of_clients_is_measured_in_a_process_of_its_own(capsys):
    assert graph_costs.main(["--clients", "2", "--rank", "1", "--layers", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[0] == "2"


def test_a_measurement_that_fails_ends_with_the_reason(monkeypatch, capsys):
    def fail(folder, count, options):
        raise graph_costs.MeasurementError(f"{count} clients: the process was killed")

    monkeypatch.setattr(graph_costs, "_measure_in_process", fail)
    assert graph_costs.main(SMALL) == 1
    assert capsys.readouterr().err == "error: 2 clients: the process was killed\n"
