"""`python -m flows.fed_rlhf`, the commands run, resume and check for scripts that call the flow's module."""

import re
import subprocess
import sys

import pytest

from flows.module import main
from tests.support.pipeline import ROOT, environment_without


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """A function that calls the module in this process; gives its exit status, output and errors."""
    monkeypatch.setenv("FED_RLHF_HOME", str(tmp_path))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["flows.fed_rlhf", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return call


def test_a_recipe_is_checked_with_overrides_in_any_place(call):
    status, output, errors = call("federation.rounds=2", "--recipe", "debug", "--check")
    assert status == 0, errors
    assert output.startswith("debug: the recipe is valid")
    of_selectors = "summarization/selector_short"
    templates = (
        f"selector {of_selectors}, policy summarization/policy, evaluation.judge.selector {of_selectors}"
    )
    assert f"\nprompt templates: {templates}\n" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "nope", "--check"], "error: recipe 'nope' is not known"),
        (["federation.round=2", "--recipe", "debug"], "error: .*federation.round"),
        (["--resume", "nope"], "error: there is no run 'nope'"),
        (["--resume", "nope", "--check"], "error: there is no run 'nope'"),
        (["--resume", "nope", "federation.rounds=2"], "error: a resumed run continues with its own recipe"),
    ],
)
def test_wrong_arguments_are_refused_with_a_sentence(call, arguments, message):
    status, _, errors = call(*arguments)
    assert status == 2
    assert re.search(message, errors)


@pytest.mark.long
def test_the_module_runs_a_recipe_and_checks_the_run_by_its_id(call, new_workplace, monkeypatch, tmp_path):
    place = new_workplace("module")
    arguments = ["--recipe", "debug", "federation.rounds=1", "evaluation.judge.steps=1"]
    (status, output, _), _ = place.call(lambda: call(*arguments))
    assert status == 0
    folder = place.newest().folder
    assert f"fed-rlhf show {folder.name} --open" in output
    monkeypatch.setenv("FED_RLHF_RUNS", str(place.runs))
    assert call("--resume", folder.name, "--check")[0] == 0


@pytest.mark.pipeline
def test_the_flows_module_is_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "flows.fed_rlhf", "--resume", "nope"],
        cwd=ROOT,
        env=environment_without("FED_RLHF_RUNS") | {"FED_RLHF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no run 'nope'")
