"""The containers' settings are those of the installed libraries; no container engine is needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from infra import processes, servers
from tests.support.pipeline import ROOT, environment_without

COMPOSE = yaml.safe_load((ROOT / "infra" / "compose.yaml").read_text(encoding="utf-8"))["services"]


def variables_of(service):
    """The environment of a service, that of its file included."""
    variables = dict(COMPOSE[service].get("environment", {}))
    if "env_file" in COMPOSE[service]:
        variables = servers.mlflow_settings() | variables
    return variables


def known_variables():
    """The environment variables that Prefect, MLflow and MLflow's server read."""
    from mlflow import environment_variables
    from mlflow.cli import server
    from prefect.settings import get_current_settings

    names = set(get_current_settings().to_environment_variables(exclude_unset=False))
    names.update(name for name in dir(environment_variables) if name.startswith("MLFLOW_"))
    for option in server.params:
        names.update([option.envvar] if isinstance(option.envvar, str) else option.envvar or [])
    return names


@pytest.mark.parametrize("service", ["prefect", "mlflow", "worker"])
def test_the_libraries_read_each_variable_of_a_container(service):
    assert set(variables_of(service)) - known_variables() == set()


@pytest.mark.parametrize(
    ("argument", "options"),
    [("", ["torch==2.13.0"]), ("https://a/b", ["--extra-index-url", "https://a/b", "torch==2.13.0"])],
)
def test_the_image_names_no_package_index_and_takes_a_further_one(argument, options):
    text = (ROOT / "infra" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
    assert "://" not in text
    (command,) = [line.removeprefix("RUN ") for line in text.splitlines() if "torch==" in line]
    echo = command.replace("pip install", "printf '%s\\n'", 1)
    shown = subprocess.run(
        ["sh", "-c", echo], env={"TORCH_EXTRA_INDEX": argument}, capture_output=True, text=True, check=True
    )
    assert shown.stdout.split()[-len(options) :] == options


def test_the_database_of_prefects_container_has_an_installed_driver():
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(COMPOSE["prefect"]["environment"]["PREFECT_SERVER_DATABASE_CONNECTION_URL"])
    assert engine.dialect.driver == "asyncpg"
    assert engine.url.host == "postgres"


@pytest.mark.pipeline
def test_the_worker_registers_the_deployments_as_up_does_and_does_not_start_without_them():
    command = COMPOSE["worker"]["command"][-1].replace("python", sys.executable, 1)
    assert "exec prefect worker start" in command
    url = f"http://127.0.0.1:{servers.free_port()}/api"
    done = subprocess.run(
        ["sh", "-c", command.replace("exec prefect worker start", "echo started")],
        cwd=ROOT,
        env=environment_without("PREFECT_") | {"PREFECT_API_URL": url},
        capture_output=True,
        text=True,
    )
    assert "ServerError: prefect work-pool create fed-rlhf --type process --overwrite failed" in done.stderr
    assert "started" not in done.stdout


@pytest.mark.long
@pytest.mark.pipeline
def test_a_client_without_the_artifact_folder_stores_artifacts_through_the_container_s_server(tmp_path):
    port = servers.free_port()
    url = f"http://127.0.0.1:{port}"
    variables = {
        name: value.replace("/mlflow/", f"{tmp_path}/") if name != "MLFLOW_DEFAULT_ARTIFACT_ROOT" else value
        for name, value in variables_of("mlflow").items()
    }
    variables |= {
        "MLFLOW_HOST": servers.HOST,
        "MLFLOW_PORT": str(port),
        "MLFLOW_SERVER_ALLOWED_HOSTS": f"127.0.0.1:{port}",
    }
    log = tmp_path / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            servers.mlflow_command(),
            env=environment_without("MLFLOW_", "PREFECT_") | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        processes.wait_until(lambda: servers.is_up(f"{url}/health"), server, "the MLflow server", log)
        log_artifact(url, tmp_path / "client")
    finally:
        server.terminate()
        server.wait(30)
    (stored,) = (tmp_path / "artifacts").rglob("note.txt")
    assert stored.read_text() == "stored"


def log_artifact(url: str, folder: Path) -> None:
    """Log an artifact from a process that knows nothing but the server's address."""
    folder.mkdir()
    lines = [
        "import mlflow",
        "with mlflow.start_run():",
        "    mlflow.log_text('stored', 'note.txt')",
    ]
    subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=folder,
        env=environment_without("MLFLOW_") | {"MLFLOW_TRACKING_URI": url, "MLFLOW_DISABLE_TELEMETRY": "true"},
        check=True,
    )
    assert os.listdir(folder) == []
