"""The command `fed-rlhf` without a run: help, completion, lists and refused input."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from components import paths
from components.config.federation import METHODS
from components.io import FullDiskError
from components.recipes import load_recipe
from components.recipes.benchmarks import benchmark_names
from components.recipes.load import recipe_names
from flows.outputs import list_recipes
from infra import servers
from tasks.runs import create_run, git_commit
from tests.support.command_line import fed_rlhf, refusal
from tests.support.pipeline import ROOT

FRAMEWORKS = {"torch", "transformers", "prefect", "mlflow", "datasets", "pandas", "great_expectations"}
HEAVY = FRAMEWORKS | {"numpy", "pydantic", "rich"}
START = "from flows.cli import app; app(prog_name='fed-rlhf')"
COMMANDS = [
    "run",
    "resume",
    "check",
    "runs",
    "show",
    "compare",
    "export",
    "chat",
    "judge",
    "delete",
    "prune",
    "recipes",
    "methods",
    "new",
    "benchmark",
    "sweep",
    "stage",
    "up",
    "down",
    "owners",
    "owner",
]


@pytest.fixture(autouse=True)
def runs(runs):
    """For all tests here."""
    return runs


def imported_packages(*arguments, code=START, **variables):
    """Top-level packages that a command of its own process imports, and what it prints."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code, *arguments],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    modules = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line]
    return {module.partition(".")[0] for module in modules}, done.stdout


def complete(words):
    """The words that a shell offers for the last one of a command line."""
    variables = {"_FED_RLHF_COMPLETE": "complete_bash", "COMP_WORDS": words}
    variables["COMP_CWORD"] = str(len(words.split()) - 1)
    variables["_TYPER_COMPLETE_ARGS"] = words
    return fed_rlhf(variables=variables).stdout.split()


def test_help_lists_commands_in_full_and_the_version_has_the_commit_of_a_checkout(monkeypatch):
    result = fed_rlhf("--help")
    assert result.exit_code == 0
    listed = result.stdout.partition("Commands:")[2]
    assert [line.split()[0] for line in listed.splitlines() if line.strip()] == COMMANDS
    assert "..." not in listed
    result = fed_rlhf("--version")
    assert result.exit_code == 0
    assert result.stdout == f"fed-rlhf {version('fed-rlhf')} (commit {git_commit()})\n"
    monkeypatch.setattr(paths, "PACKAGE", Path("/nonexistent"))
    assert fed_rlhf("--version").stdout == f"fed-rlhf {version('fed-rlhf')}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command):
    result = fed_rlhf(command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_help_imports_no_heavy_package():
    assert imported_packages("--help")[0] & HEAVY == set()


@pytest.mark.pipeline
def test_completion_of_recipes_imports_no_framework():
    variables = {"_FED_RLHF_COMPLETE": "complete_bash", "_TYPER_COMPLETE_ARGS": "fed-rlhf run s"}
    variables |= {"COMP_WORDS": "fed-rlhf run s", "COMP_CWORD": "2"}
    assert imported_packages(**variables)[0] & FRAMEWORKS == set()


LISTS = """
from flows.cli import app
for arguments in (["runs"], ["show", "debug-1"], ["show", "nightly-1"], ["show", "nope"], ["recipes"]):
    try:
        app(arguments)
    except SystemExit as end:
        print(arguments, end.code)
"""


@pytest.mark.pipeline
def test_lists_of_runs_and_recipes_import_no_heavy_package(runs):
    create_run(load_recipe("debug"), runs / "debug-1")
    create_run(load_recipe("debug"), runs / "nightly-1" / "one-seed-0")
    (runs / "nightly-1" / "benchmark.yaml").write_text("recipe: debug\n")
    packages, output = imported_packages(code=LISTS)
    assert "['runs'] 0" in output
    assert "['show', 'debug-1'] 0" in output
    assert "['show', 'nightly-1'] 0" in output
    assert "['show', 'nope'] 2" in output
    assert "['recipes'] 0" in output
    assert packages & (FRAMEWORKS | {"numpy", "networkx", "rich", "plotly"}) == set()


@pytest.mark.pipeline
def test_a_comparison_in_the_terminal_imports_no_framework_and_draws_nothing(runs):
    create_run(load_recipe("debug"), runs / "debug-1")
    create_run(load_recipe("debug", ["seed=3"]), runs / "debug-2")
    packages, output = imported_packages("compare", "debug-1", "debug-2")
    assert "seed" in output
    assert packages & (FRAMEWORKS | {"plotly"}) == set()


@pytest.mark.parametrize("command", ["run", "check"])
def test_recipe_names_are_completed(command):
    expected = [name for name in recipe_names() if name.startswith("summ")]
    assert expected
    assert complete(f"fed-rlhf {command} summ") == expected


def test_benchmark_names_are_completed():
    expected = [name for name in benchmark_names() if name.startswith("multi")]
    assert expected
    assert complete("fed-rlhf benchmark multi") == expected


def test_recipes_are_listed_with_their_methods_and_the_values_that_a_run_has():
    lines = fed_rlhf("recipes").stdout.splitlines()
    assert lines[0].split() == ["recipe", "method", "source", "rounds", "policy"]
    assert [line.split()[0] for line in lines[1:]] == recipe_names()
    assert ["debug", "fedbis", "aclsum", "3", "tiny-random"] in [line.split() for line in lines]
    for row in list_recipes():
        recipe = load_recipe(row.recipe)
        assert row.method == recipe.federation.method
        assert row.source == recipe.data.source
        assert row.rounds == recipe.federation.rounds
        assert row.policy == recipe.policy.backbone.name


def test_methods_are_listed_with_what_they_train_and_their_description():
    lines = fed_rlhf("methods").stdout.splitlines()
    assert lines[0].split() == ["method", "trains", "description"]
    assert [line.split()[0] for line in lines[1:]] == METHODS.names()
    (fedbis,) = [line for line in lines if line.startswith("fedbis ")]
    assert fedbis.split()[1] == "selector"
    assert "FedBis" in fedbis


def test_a_broken_plug_in_is_one_sentence(monkeypatch):
    monkeypatch.setitem(METHODS.builtin, "broken", "components.federation.methods.fedavg:Options")
    monkeypatch.setattr(METHODS, "load", broken_plug_in)
    assert "package my-methods" in refusal("methods")


def broken_plug_in(name):
    from components.config import RecipeError

    raise RecipeError(f"federation.method '{name}' of the package my-methods cannot be imported")


def test_no_runs_are_one_sentence_with_the_folder(runs):
    result = fed_rlhf("runs")
    assert result.exit_code == 0
    assert result.stdout == f"there are no runs under {runs}\n"


def test_a_valid_recipe_is_checked_without_writing_anything(runs):
    result = fed_rlhf("check", "debug", "federation.rounds=1")
    assert result.exit_code == 0
    assert "debug" in result.stdout
    assert not runs.exists()


@pytest.mark.parametrize("command", ["run", "check"])
def test_bad_data_are_refused_before_anything_is_written(command, runs, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "chosen": "b"}\n', encoding="utf-8")
    settings = ["data.source=jsonl", f"data.path={tmp_path}/bad.jsonl", "data.options={}"]
    assert "bad.jsonl, row 1: column 'rejected' is missing" in refusal(command, "debug", *settings)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_a_check_tells_the_data(runs):
    lines = fed_rlhf("check", "debug").stdout.splitlines()
    assert any(re.match(r"data: \d+ pairs of 4 clients \(\d+ train, ", line) for line in lines)


def test_a_recipe_file_is_checked_by_its_path(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"name": "mine", "data": {"source": "aclsum"}}))
    assert fed_rlhf("check", str(path)).exit_code == 0


@pytest.mark.parametrize("command", ["run", "check"])
def test_an_unknown_recipe_is_refused_with_the_nearest_one(command, runs):
    assert "'summarization/demo'" in refusal(command, "sumarization/demo")
    assert not runs.exists()


@pytest.mark.parametrize("command", ["run", "check"])
def test_an_unknown_key_is_refused_with_the_nearest_one(command, runs):
    error = refusal(command, "debug", "federation.round=3")
    assert "'federation.round'" in error
    assert "'federation.rounds'" in error
    assert not runs.exists()


def test_a_value_out_of_range_and_an_unknown_method_are_refused_with_what_is_accepted():
    error = refusal("check", "debug", "federation.rounds=0")
    assert "federation.rounds" in error
    assert "0" in error
    error = refusal("check", "debug", "federation.method=fedbiss")
    assert "'fedbiss'" in error
    assert "'fedbis'" in error


@pytest.mark.parametrize("command", ["resume", "show", "delete"])
def test_an_unknown_run_is_refused_with_the_folder_of_runs(command, runs):
    error = refusal(command, "nothing")
    assert "'nothing'" in error
    assert str(runs) in error


def test_a_benchmark_is_checked_without_writing_anything(tmp_path, runs):
    plan = {"recipe": "debug", "seeds": [0, 1], "arms": {"one": [], "more": ["federation.rounds=2"]}}
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    result = fed_rlhf("benchmark", str(path), "--check")
    assert result.exit_code == 0
    assert "arms: 2, seeds: 2" in result.stdout
    assert "the arm with the largest peak, " in result.stdout
    assert "estimated time: not known for 4 runs before one of them is finished" in result.stdout
    assert not runs.exists()


def test_an_unknown_benchmark_is_refused_also_to_be_resumed(runs):
    assert "'nothing'" in refusal("benchmark", "nothing", "--check")
    error = refusal("benchmark", "--resume", "benchmark-1")
    assert "'benchmark-1'" in error
    assert str(runs) in error


def test_a_resumed_benchmark_takes_no_name_and_no_override_but_more_seeds(runs):
    folder = runs / "benchmark-1"
    folder.mkdir(parents=True)
    (folder / "benchmark.yaml").write_text("recipe: debug\nseeds: [0, 1]\narms: {one: []}\n")
    assert "leave out" in refusal("benchmark", "summarization", "--resume", "benchmark-1")
    assert "leave out" in refusal("benchmark", "federation.rounds=2", "--resume", "benchmark-1")
    result = fed_rlhf("benchmark", "seeds=[0,1,2]", "--resume", "benchmark-1", "--check")
    assert "arms: 1, seeds: 3" in result.stdout


def test_runs_are_published_of_a_benchmark_that_is_named_by_resume_alone(runs, tmp_path):
    folder = runs / "benchmark-1"
    folder.mkdir(parents=True)
    (folder / "benchmark.yaml").write_text("recipe: debug\nseeds: [0]\narms: {one: []}\n")
    file = tmp_path / "one.jsonl"
    result = fed_rlhf("benchmark", "--resume", "benchmark-1", "--publish", str(file))
    assert result.stdout == f"{file}: 0 new lines\n"
    assert "--resume FOLDER alone" in refusal("benchmark", "debug", "--publish", str(file))
    assert "--resume FOLDER alone" in refusal("benchmark", "--publish", str(file))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["run"], "RECIPE"),
        (["stage", "aline"], "'align'"),
        (["nothing"], "'nothing'"),
        (["runs", "--nothing"], "--nothing"),
    ],
)
def test_a_wrong_command_line_is_an_error_with_status_2(arguments, word):
    result = fed_rlhf(*arguments)
    assert result.exit_code == 2
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    assert word in last
    assert "Traceback" not in result.stderr


def test_a_tracking_server_that_does_not_answer_is_refused_before_a_run_is_opened(monkeypatch, runs):
    url = f"http://127.0.0.1:{servers.free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    error = refusal("run", "debug")
    assert url in error
    assert "unset" in error
    assert not runs.exists()


def test_up_outside_a_checkout_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("FED_RLHF_HOME", str(tmp_path))
    monkeypatch.setattr(servers, "in_checkout", lambda: False)
    assert "prefect server start" in refusal("up")


def test_down_is_harmless_where_nothing_is_running(monkeypatch, tmp_path):
    monkeypatch.setenv("FED_RLHF_HOME", str(tmp_path))
    result = fed_rlhf("down")
    assert result.exit_code == 0
    assert result.stdout == "nothing is running\n"


def test_a_terminal_without_the_characters_of_a_name_shows_their_codes(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("extends: debug\ntracking: {experiment: 代理}\n", encoding="utf-8")
    ascii_terminal = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "check", str(recipe), "--print-recipe"],
        cwd=ROOT,
        env=os.environ | ascii_terminal,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert rb'experiment: "\u4ee3\u7406"' in done.stdout


def test_a_full_disk_is_one_sentence_and_status_2(capsys):
    from flows.process import exit_status

    def fail():
        raise FullDiskError(28, "no space is left for /x: free some, and run it again")

    assert exit_status(fail) == 2
    assert capsys.readouterr().err == "error: no space is left for /x: free some, and run it again\n"
