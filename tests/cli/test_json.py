"""What commands print with --json, and the reference page of its fields."""

import json
import re
from datetime import UTC, datetime, timedelta

import pytest

from components.recipes import load_recipe
from components.recipes.load import recipe_names
from tasks.runs import create_run
from tests.support.command_line import fed_rlhf, refusal
from tests.support.pipeline import ROOT

REFERENCE = ROOT / "docs" / "reference" / "json.md"


@pytest.fixture(autouse=True)
def opened(tmp_path, monkeypatch):
    """A run that has its recipe only, in a folder of runs of the test's own."""
    monkeypatch.setenv("FED_RLHF_RUNS", str(tmp_path))
    return create_run(load_recipe("debug"), tmp_path / "debug-1")


def printed(*arguments):
    """The JSON that a command prints."""
    result = fed_rlhf(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def documented_fields(heading):
    """The fields and types below a heading of the reference page."""
    _, _, section = REFERENCE.read_text(encoding="utf-8").partition(f"## {heading}\n")
    rows = re.findall(r"^\| `(\w+)` \| ([\w ]+) \|", section.partition("\n## ")[0], re.M)
    assert rows
    return dict(rows)


def json_type(value):
    names = {str: "string", int: "integer", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]


@pytest.mark.parametrize(
    ("arguments", "is_list"),
    [
        (["runs"], True),
        (["show", "debug-1"], False),
        (["check", "debug"], False),
        (["recipes"], True),
        (["methods"], True),
    ],
    ids=["runs", "show", "check", "recipes", "methods"],
)
def test_a_command_prints_the_documented_fields_with_their_types(arguments, is_list):
    output = printed(*arguments)
    fields = documented_fields(f"fed-rlhf {arguments[0]} --json")
    assert isinstance(output, list) == is_list
    for row in output if is_list else [output]:
        assert list(row) == list(fields)
        for name, value in row.items():
            assert json_type(value) in fields[name].split(" or "), name


def test_a_benchmark_is_printed_with_the_documented_fields_and_their_types(tmp_path):
    create_run(load_recipe("debug"), tmp_path / "nightly-1" / "one-seed-0")
    (tmp_path / "nightly-1" / "benchmark.yaml").write_text("recipe: debug\n")
    output = printed("show", "nightly-1")
    fields = documented_fields("A benchmark of fed-rlhf show --json")
    assert list(output) == list(fields)
    for name, value in output.items():
        assert json_type(value) in fields[name].split(" or "), name


def test_a_comparison_is_printed_with_the_documented_fields_and_their_types(tmp_path):
    create_run(load_recipe("debug", ["seed=3"]), tmp_path / "debug-2")
    fields = documented_fields("fed-rlhf compare --json")
    for run, seed in zip(printed("compare", "debug-1", "debug-2"), (0, 3), strict=True):
        assert list(run) == list(fields)
        assert {name: json_type(value) for name, value in run.items()} == fields
        assert run["keys"] == {"seed": seed}
        assert run["metrics"] == {}


def test_a_check_has_the_prompt_templates_of_selectors_policy_and_questions():
    questions = "evaluation.questions={questions: [{set: chitchat, count: 2}]}"
    assert printed("check", "debug", questions)["templates"] == {
        "selector": "summarization/selector_short",
        "policy": "summarization/policy",
        "evaluation.judge.selector": "summarization/selector_short",
        "evaluation.questions": "thoughts/answer",
    }


def test_a_stage_of_a_check_has_the_documented_fields_and_a_total():
    stages = printed("check", "debug")["memory"]
    assert {stage["stage"] for stage in stages} == {"rounds", "alignment", "judge", "answers"}
    for stage in stages:
        assert list(stage) == list(documented_fields("Objects of the list `memory`"))
        terms = dict(stage["bytes"])
        assert terms.pop("total") == sum(terms.values())


def test_a_run_has_its_state_folder_and_time_and_the_metrics_of_its_report(opened):
    (run,) = printed("runs")
    assert run["run"] == "debug-1"
    assert run["state"] == "stopped: prepare"
    assert run["folder"] == str(opened.folder)
    assert datetime.now(UTC) - datetime.fromisoformat(run["written"]) < timedelta(minutes=1)
    assert run["size"] == sum(path.stat().st_size for path in opened.folder.rglob("*") if path.is_file())
    assert printed("show", "debug-1")["metrics"] is None
    opened.report.mkdir()
    (opened.report / "metrics.json").write_text('{"after/accuracy/mean": 0.5}')
    assert printed("show", "debug-1")["metrics"] == {"after/accuracy/mean": 0.5}


def test_the_lists_are_those_of_the_tables_and_no_runs_an_empty_one(tmp_path, monkeypatch):
    assert [row["recipe"] for row in printed("recipes")] == recipe_names()
    monkeypatch.setenv("FED_RLHF_RUNS", str(tmp_path / "empty"))
    assert printed("runs") == []


def test_an_error_is_a_sentence_with_json_too():
    assert "'federation.rounds'" in refusal("check", "debug", "federation.round=3", "--json")
