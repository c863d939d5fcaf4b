"""`python -m flows.fed_rlhf`, the commands run, resume and check for scripts that call the flow's module."""

import re
import subprocess
import sys

import pytest

from tests.support.pipeline import ROOT, environment_without


def call(*arguments, home):
    environment = environment_without("PREFECT_", "MLFLOW_", "FED_RLHF_HOME") | {"FED_RLHF_HOME": str(home)}
    command = [sys.executable, "-m", "flows.fed_rlhf", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_a_recipe_is_checked_with_overrides_in_any_place(tmp_path):
    done = call("federation.rounds=2", "--recipe", "debug", "--check", home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("debug: the recipe is valid")


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
def test_wrong_arguments_are_refused_with_a_sentence(tmp_path, arguments, message):
    done = call(*arguments, home=tmp_path)
    assert done.returncode == 2
    assert re.search(message, done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_is_run_and_checked_by_its_id(tmp_path):
    done = call("--recipe", "debug", "federation.rounds=1", "evaluation.judge.steps=1", home=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").glob("debug-*")
    assert f"fed-rlhf show {folder.name} --open" in done.stdout
    assert call("--resume", folder.name, "--check", home=tmp_path).returncode == 0
