"""The flow in a script: it needs no Prefect server, whatever was imported before."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pipeline import ROOT, environment_without

SCRIPT = """
import prefect  # reads prefect.toml, which names the server of `fed-rlhf up`
from flows.fed_rlhf import fed_rlhf
print(fed_rlhf("debug", overrides=["federation.rounds=1", "evaluation.judge.steps=1"]))
"""


@pytest.mark.slow
def test_a_script_calls_the_flow_without_a_server_and_gets_the_folder_of_the_run(tmp_path):
    environment = environment_without("PREFECT_", "MLFLOW_", "FED_RLHF_RUNS", "FED_RLHF_HOME")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=environment | {"FED_RLHF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-1])
    assert folder.parent == tmp_path / "runs"
    assert (folder / "report" / "report.html").is_file()
    assert "Traceback" not in done.stderr
