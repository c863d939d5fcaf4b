"""The flow in a script: it needs no Prefect server, whatever was imported before."""

import subprocess
import sys
from pathlib import Path

import pytest

from infra.servers import HOST, free_port
from tests.support.pipeline import ROOT, environment_without

NOTEBOOK = """
import asyncio, warnings
warnings.simplefilter("error", RuntimeWarning)
async def cell():  # an event loop runs in the thread that calls, as in a notebook
    import prefect  # reads prefect.toml, which names the server of `fed-rlhf up`
    from flows.fed_rlhf import fed_rlhf
    print(fed_rlhf("debug", overrides=["federation.rounds=1", "evaluation.judge.steps=1"]))
asyncio.run(cell())
"""


@pytest.mark.long
def test_a_notebook_calls_the_flow_without_a_server_and_gets_the_folder_of_the_run(tmp_path, fill_home):
    environment = environment_without("PREFECT_", "MLFLOW_", "FED_RLHF_RUNS", "FED_RLHF_HOME")
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK],
        cwd=ROOT,
        env=environment | {"FED_RLHF_HOME": str(fill_home(tmp_path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-1])
    assert folder.parent == tmp_path / "runs"
    assert (folder / "report" / "report.html").is_file()
    assert "Traceback" not in done.stderr
    assert "never awaited" not in done.stderr


LOST_SERVER = """
import sys, time
from flows import stopping
from flows.api import pipeline_flow
stopping.LOST_SECONDS, stopping.POLL_SECONDS = 1.0, 0.2

@pipeline_flow("waiting")
def waiting(seconds: float) -> float:
    time.sleep(seconds)
    return seconds

print(waiting.fn(float(sys.argv[1])))
"""


@pytest.mark.long
@pytest.mark.pipeline
@pytest.mark.parametrize(("deployment", "is_stopped"), [("a-deployment", True), ("", False)])
def test_a_deployments_run_ends_with_a_sentence_when_its_server_does_not_answer(deployment, is_stopped):
    url = f"http://{HOST}:{free_port()}/api"
    environment = environment_without("PREFECT_") | {"PREFECT_API_URL": url}
    if deployment:
        environment["PREFECT__RUNTIME__DEPLOYMENT__ID"] = deployment
    command = [sys.executable, "-c", LOST_SERVER, "300" if is_stopped else "2"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == is_stopped, done.stderr
    assert (
        f"error: the Prefect server at {url} does not answer any more. Stopped" in done.stderr
    ) == is_stopped
    assert done.stdout == ("" if is_stopped else "2.0\n")
