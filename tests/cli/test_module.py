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


def test_a_process_runs_the_pipeline_and_its_run_is_checked_by_its_id(call, tmp_path, fill_home):
    environment = environment_without("PREFECT_", "MLFLOW_", "FED_RLHF_HOME")
    arguments = ["--recipe", "debug", "federation.rounds=1", "evaluation.judge.steps=1"]
    done = subprocess.run(
        [sys.executable, "-m", "flows.fed_rlhf", *arguments],
        cwd=ROOT,
        env=environment | {"FED_RLHF_HOME": str(fill_home(tmp_path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").glob("debug-*")
    assert f"fed-rlhf show {folder.name} --open" in done.stdout
    assert call("--resume", folder.name, "--check")[0] == 0
