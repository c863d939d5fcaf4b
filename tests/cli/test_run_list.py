"""`fed-rlhf runs` with its limit, filters and width, and benchmarks in it and in `fed-rlhf show`."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from components.recipes import load_recipe
from tasks import run_table
from tasks.run_table import LEFT_OUT, SHORTENED, run_statuses, runs_table
from tasks.runs import Run, create_run, lock
from tasks.text_table import fit_columns, table_lines
from tests.support.command_line import fed_rlhf, refusal
from tests.support.pipeline import ROOT


@pytest.fixture
def three(runs):
    """A finished run, a stopped one, and one of another recipe and method that runs."""
    create_run(load_recipe("debug"), runs / "debug-1").mark_done("report")
    create_run(load_recipe("debug"), runs / "debug-2")
    recipe = load_recipe("debug", ["name=other", "federation.method=fedavg"])
    with lock(create_run(recipe, runs / "other-1")):
        yield


@pytest.fixture
def benchmark(runs):
    """A benchmark of two arms and two seeds, of which one run is finished and one stopped."""
    folder = runs / "nightly-1"
    for arm, method in (("Voting", "fedbis"), ("Averaging", "fedavg")):
        for seed in (3, 5):
            recipe = load_recipe("debug", [f"federation.method={method}"])
            create_run(recipe, folder / f"{arm}-seed-{seed}")
    (folder / "benchmark.yaml").write_text("recipe: debug\n")
    finish(folder, "Voting-seed-3")
    with lock(Run("stopped", folder / "Voting-seed-5")):
        pass
    return Run("nightly-1", folder)


def finish(folder, *names):
    """Finish runs of a benchmark, and write them into its report."""
    for name in names:
        with lock(Run(name, folder / name)):
            Run(name, folder / name).mark_done("report")
    report = folder / "report"
    report.mkdir(exist_ok=True)
    commits = {path.parent.name: [] for path in folder.glob("*/report.done")}
    (report / "metrics.json").write_text(json.dumps({"commits": commits}))
    (report / "report.html").write_text("")


def listed(*options):
    """The ids of the table, and of the JSON, which are the same."""
    result = fed_rlhf("runs", *options)
    assert result.exit_code == 0, result.output
    ids = [line.split()[0] for line in result.stdout.splitlines()[1:]]
    assert ids == [row["run"] for row in json.loads(fed_rlhf("runs", "--json", *options).stdout)]
    return ids


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), ["debug-1", "debug-2", "other-1"]),
        (("--limit", "2"), ["debug-2", "other-1"]),
        (("--limit", "9"), ["debug-1", "debug-2", "other-1"]),
        (("--recipe", "debug"), ["debug-1", "debug-2"]),
        (("--recipe", "debug", "--limit", "1"), ["debug-2"]),
        (("--method", "fedavg"), ["other-1"]),
        (("--state", "finished"), ["debug-1"]),
        (("--state", "stopped"), ["debug-2"]),
        (("--state", "running"), ["other-1"]),
    ],
)
def test_runs_are_limited_to_the_latest_of_those_that_are_filtered(three, options, expected):
    assert listed(*options) == expected


def test_a_limit_reads_no_earlier_runs(three, monkeypatch):
    from tasks import run_table

    read = []
    run_status = run_table.run_status
    monkeypatch.setattr(run_table, "run_status", lambda run: read.append(run.id) or run_status(run))
    run_statuses(limit=1)
    assert read == ["other-1"]


def test_an_unknown_state_is_refused_with_the_known_ones(runs):
    error = refusal("runs", "--state", "finish")
    assert "state 'finish' is not known; there are: finished, not started, running, stopped." in error


def test_a_limit_is_at_least_one(runs):
    result = fed_rlhf("runs", "--limit", "0")
    assert result.exit_code == 2
    assert "--limit" in result.stderr


def test_filters_that_no_run_meets_are_told_from_no_runs(three, runs):
    assert fed_rlhf("runs", "--method", "gone").stdout == f"there are no such runs under {runs}\n"


TABLE = [
    ["run", "recipe", "method", "state", "headline", "last written", "size"],
    [
        "demo-1",
        "summarization/demo",
        "fedbis",
        "stopped: evaluate",
        f"{'accuracy':<23} {'x' * 50}",
        "now",
        "9 MB",
    ],
]


def test_a_table_fits_every_width_that_holds_its_ids_and_shows_them_whole():
    tables = {width: table_lines(fit_columns(TABLE, width, SHORTENED, LEFT_OUT)) for width in range(6, 160)}
    assert [width for width, lines in tables.items() if max(map(len, lines)) > width] == []
    assert {lines[1].split()[0] for lines in tables.values()} == {"demo-1"}


def test_an_id_that_is_wider_than_the_terminal_is_whole():
    assert table_lines(fit_columns(TABLE, 3, SHORTENED, LEFT_OUT)) == ["run", "demo-1"]


def test_a_wide_table_is_whole():
    assert fit_columns(TABLE, 200, SHORTENED, LEFT_OUT) == TABLE


@pytest.mark.parametrize(
    ("width", "columns", "state"),
    [
        (120, ["run", "recipe", "method", "state", "headline", "last written", "size"], "stopped: evaluate"),
        (89, ["run", "recipe", "method", "state", "headline", "last written"], "stopped:..."),
        (88, ["run", "recipe", "method", "state", "headline"], "stopped: evaluate"),
        (74, ["run", "method", "state", "headline"], "stopped: evaluate"),
        (54, ["run", "state", "headline"], "stopped: evaluate"),
        (47, ["run", "state", "headline"], "stopped:..."),
        (19, ["run", "state"], "stopped:..."),
        (18, ["run"], None),
    ],
)
def test_a_narrow_table_leaves_out_the_least_important_columns(width, columns, state):
    header, row = fit_columns(TABLE, width, SHORTENED, LEFT_OUT)
    assert header == columns
    assert dict(zip(header, row, strict=True)).get("state") == state


def test_in_a_pipe_lines_are_whole(three, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(run_table, "naturaltime", lambda moment: "a moment ago")
    assert fed_rlhf("runs").stdout.splitlines() == runs_table(run_statuses(), None)


@pytest.mark.pipeline
def test_a_terminal_of_forty_characters_gets_lines_that_fit(three):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-m", "flows.cli", "runs"]
    subprocess.run(command, cwd=ROOT, env=environment, stdout=slave, check=True)
    lines = os.read(master, 10_000).decode().splitlines()
    os.close(master)
    os.close(slave)
    assert [line.split()[0] for line in lines] == ["run", "debug-1", "debug-2", "other-1"]
    assert max(map(len, lines)) <= 40
    assert lines[0].split() == ["run", "method", "state", "headline"]


def test_a_benchmark_has_a_row_after_its_runs_with_their_states(benchmark):
    rows = json.loads(fed_rlhf("runs", "--json").stdout)
    states = {row["run"]: row["state"] for row in rows}
    assert list(states.items()) == [
        ("nightly-1/Voting-seed-3", "finished"),
        ("nightly-1/Voting-seed-5", "stopped: prepare"),
        ("nightly-1/Averaging-seed-3", "not started"),
        ("nightly-1/Averaging-seed-5", "not started"),
        ("nightly-1", "stopped: 1 of 4 runs finished, 1 stopped, 2 not started"),
    ]
    assert [row["kind"] for row in rows] == [*["run"] * 4, "benchmark"]
    assert rows[-1]["recipe"] == "debug"
    assert rows[-1]["method"] == "fedbis, fedavg"
    assert rows[-1]["headline"] == ""
    assert rows[-1]["size"] > sum(row["size"] for row in rows[:-1])


def test_a_benchmark_is_listed_with_its_methods_and_its_state(benchmark):
    assert listed("--method", "fedavg")[-1] == "nightly-1"
    assert listed("--state", "stopped") == ["nightly-1/Voting-seed-5", "nightly-1"]
    assert listed("--state", "not started") == ["nightly-1/Averaging-seed-3", "nightly-1/Averaging-seed-5"]


def state_of(benchmark):
    (row,) = json.loads(fed_rlhf("runs", "--json", "--limit", "1").stdout)
    assert row["run"] == benchmark.id
    return row["state"]


def test_a_benchmark_is_running_while_a_process_works_on_it(benchmark):
    with lock(benchmark), lock(Run("running", benchmark.folder / "Voting-seed-5")):
        assert state_of(benchmark) == "running: 1 of 4 runs finished, 1 running, 2 not started"


def test_a_benchmark_is_finished_when_its_report_has_all_of_its_runs(benchmark):
    others = ["Voting-seed-5", "Averaging-seed-3", "Averaging-seed-5"]
    for name in others:  # the contests between them are not finished
        Run(name, benchmark.folder / name).mark_done("report")
    assert state_of(benchmark) == "stopped: 4 of 4 runs finished"
    finish(benchmark.folder, *others)
    assert state_of(benchmark) == "finished: 4 of 4 runs finished"


def test_a_benchmark_of_which_no_run_has_begun_is_not_started(benchmark):
    for path in benchmark.folder.glob("Voting-*"):
        (path / ".lock").unlink()
        (path / "report.done").unlink(missing_ok=True)
    assert state_of(benchmark) == "not started: 0 of 4 runs finished, 4 not started"


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"commits": null}', '{"commits": 5}'])
def test_a_benchmark_with_a_report_of_another_version_is_finished_if_its_runs_are(benchmark, content):
    (benchmark.report / "metrics.json").write_text(content)
    assert state_of(benchmark).startswith("stopped: 1 of 4")
    for folder in benchmark.folder.glob("*-seed-*"):
        (folder / "report.done").touch()
    assert state_of(benchmark) == "finished: 4 of 4 runs finished"


def test_a_benchmark_without_runs_is_listed(runs):
    (runs / "empty-1").mkdir(parents=True)
    (runs / "empty-1" / "benchmark.yaml").touch()
    (status,) = run_statuses()
    assert (status.recipe, status.method) == ("?", "?")
    assert "arm" not in fed_rlhf("show", "empty-1").stdout


def test_a_benchmark_is_shown_with_the_states_of_its_runs_and_its_report(benchmark):
    lines = fed_rlhf("show", "nightly-1").stdout.splitlines()
    assert (
        lines[0]
        == "nightly-1: debug, fedbis, fedavg, stopped: 1 of 4 runs finished, 1 stopped, 2 not started"
    )
    assert f"  report      {benchmark.report / 'report.html'}" in lines
    assert "  resume it   fed-rlhf benchmark --resume nightly-1" in lines
    cells = [re.split(" {2,}", line) for line in lines[-3:]]
    assert cells == [
        ["arm", "seed 3", "seed 5"],
        ["Voting", "finished", "stopped: prepare"],
        ["Averaging", "not started", "not started"],
    ]


def test_a_finished_benchmark_is_shown_with_its_summary(benchmark):
    (benchmark.report / "summary.txt").write_text("Means over seeds\n")
    assert "Means over seeds" not in fed_rlhf("show", "nightly-1").stdout, "of fewer runs"
    finish(benchmark.folder, "Voting-seed-5", "Averaging-seed-3", "Averaging-seed-5")
    lines = fed_rlhf("show", "nightly-1").stdout.splitlines()
    assert lines[-2:] == ["", "Means over seeds"]
    assert not any(line.startswith("arm ") for line in lines)


def test_a_benchmark_without_a_report_says_so_when_it_is_to_be_opened(benchmark):
    (benchmark.report / "report.html").unlink()
    assert "  report " not in fed_rlhf("show", "nightly-1").stdout
    error = refusal("show", "nightly-1", "--open")
    assert error.startswith("error: benchmark 'nightly-1' has no report.html, it is stopped: 1 of 4 runs")
    assert "`fed-rlhf benchmark --resume nightly-1`" in error


def test_the_json_of_a_benchmark_has_the_states_of_its_runs_by_arm_and_seed(benchmark):
    benchmark.update_metadata(mlflow_run_id="abc")
    shown = json.loads(fed_rlhf("show", "nightly-1", "--json").stdout)
    assert shown["mlflow_run_id"] == "abc"
    assert shown["report"] == str(benchmark.report / "report.html")
    assert shown["runs"] == {
        "Voting": {"3": "finished", "5": "stopped: prepare"},
        "Averaging": {"3": "not started", "5": "not started"},
    }


def test_ids_of_benchmarks_are_completed_where_they_are_taken(benchmark):
    def complete(words):
        variables = {"_FED_RLHF_COMPLETE": "complete_bash", "_TYPER_COMPLETE_ARGS": words}
        variables |= {"COMP_WORDS": words, "COMP_CWORD": "2"}
        return fed_rlhf(variables=variables).stdout.split()

    assert "nightly-1" in complete("fed-rlhf show night")
    assert "nightly-1" in complete("fed-rlhf delete night")
    assert "nightly-1" not in complete("fed-rlhf resume night")
