"""The servers of `fed-rlhf up` run the deployments of prefect.yaml, and a schedule starts a run by itself."""

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from datetime import timedelta

import pytest
import yaml

from infra import processes, servers
from tasks.runs import Run
from tests.support.pipeline import ROOT

pytestmark = [pytest.mark.long, pytest.mark.pipeline]

SECONDS_BETWEEN_RUNS = 20
FAULT = re.compile(r"Traceback|\bERROR\b|\bCRITICAL\b|Error:")
START_OF_RECORD = re.compile(r"^(?=\d\d:\d\d:\d\d\.\d{3} \| )", re.MULTILINE)
# SQLite refuses a transaction whose snapshot is outdated or that waits for too long, and the services of
# Prefect's server try again.
TRIED_AGAIN = re.compile(r"sqlite3\.OperationalError\) database is locked")
PLAN = {
    "recipe": "debug",
    "seeds": [0],
    "arms": {"FedBis": ["federation.rounds=1", "evaluation.judge.steps=1"]},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home of the project in which `fed-rlhf up` has started its servers, on ports of their own."""
    folder = tmp_path_factory.mktemp("up")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("PREFECT_", "MLFLOW_", "FED_RLHF_"))]:
            patch.delenv(name)
        patch.setenv("FED_RLHF_HOME", str(folder))
        patch.setenv("MLFLOW_PORT", str(servers.free_port()))
        patch.setattr(servers, "PREFECT_PORT", servers.free_port())
        servers.start_servers()
        try:
            yield folder
        finally:
            servers.stop_servers()


@pytest.fixture(scope="module")
def client(home):
    """A client of the started Prefect server."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    url = f"http://{servers.HOST}:{servers.PREFECT_PORT}/api"
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as opened:
        yield opened


def prefect(*arguments):
    """Run a command of Prefect with the started server."""
    url = f"http://{servers.HOST}:{servers.PREFECT_PORT}/api"
    subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
        cwd=ROOT,
        env=os.environ | servers.prefect_environment() | {"PREFECT_API_URL": url},
        check=True,
        capture_output=True,
    )


def runs_of(client, deployment, *states):
    """The flow runs of a deployment, in any state or in one of some."""
    from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter

    return client.read_flow_runs(
        deployment_filter=DeploymentFilter(id={"any_": [deployment.id]}),
        flow_run_filter=FlowRunFilter(state={"type": {"any_": list(states)}}) if states else None,
    )


def wait_for(condition, seconds):
    """The first value of a condition that is true; an assertion fails after some seconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{condition} is still {value} after {seconds} s"
        time.sleep(0.5)
    return value


def faults(home, name):
    """The records of a server's log that report a fault, in the order of the log."""
    log = processes.log_path(name).read_text(encoding="utf-8", errors="replace")
    records = START_OF_RECORD.split(log)
    return [record for record in records if FAULT.search(record) and not TRIED_AGAIN.search(record)]


def test_the_server_has_every_deployment_of_the_file_with_its_pool_and_parameters(home, client):
    expected = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    registered = {deployment.name: deployment for deployment in client.read_deployments()}
    for entry in expected:
        deployment = registered[entry["name"]]
        assert deployment.work_pool_name == servers.WORK_POOL
        assert deployment.parameters == entry["parameters"]
        assert set(deployment.parameters) <= set(deployment.parameter_openapi_schema["properties"])
    pool = client.read_work_pool(servers.WORK_POOL)
    assert pool.type == "process"
    assert wait_for(lambda: client.read_work_pool(servers.WORK_POOL).status.value == "READY", 300)


def test_each_queue_runs_one_flow_at_a_time_and_the_server_ends_flow_runs_without_a_heartbeat(home, client):
    from prefect.automations import Automation
    from prefect.settings import PREFECT_API_URL, temporary_settings

    url = f"http://{servers.HOST}:{servers.PREFECT_PORT}/api"
    assert client.read_work_pool(servers.WORK_POOL).concurrency_limit is None
    queues = client.read_work_queues(work_pool_name=servers.WORK_POOL)
    assert {queue.name: queue.concurrency_limit for queue in queues} == dict.fromkeys(servers.QUEUES, 1)
    servers.register_zombie_automation(url)  # as a second `up` does
    with temporary_settings({PREFECT_API_URL: url}):
        automation = Automation.read(name=servers.ZOMBIES)
    assert automation.enabled
    assert automation.trigger.within.total_seconds() == servers.ZOMBIE_SECONDS
    settings = tomllib.loads((ROOT / "prefect.toml").read_text(encoding="utf-8"))
    assert settings["flows"]["heartbeat_frequency"] < servers.ZOMBIE_SECONDS / 2


def test_a_schedule_that_the_file_no_longer_has_is_removed_and_one_of_a_user_stays(home, client):
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule

    url = f"http://{servers.HOST}:{servers.PREFECT_PORT}/api"
    ours = DeploymentScheduleCreate(
        schedule=CronSchedule(cron="0 5 * * *"), active=False, slug=servers.SCHEDULE_SLUG
    )
    users = DeploymentScheduleCreate(schedule=CronSchedule(cron="0 4 * * *"), active=False)
    deployment = client.read_deployment_by_name("fed-rlhf/qa")
    client.create_deployment_schedules(deployment.id, [ours, users])
    prefect("deploy", "--all")
    assert len(client.read_deployment_by_name("fed-rlhf/qa").schedules) == 2  # Prefect leaves them
    servers.update_schedules(url)
    for name, crons in (("fed-rlhf/qa", ["0 4 * * *"]), ("benchmark/nightly", ["0 2 * * *"])):
        assert [one.schedule.cron for one in client.read_deployment_by_name(name).schedules] == crons


@pytest.mark.parametrize(("name", "hour"), [("nightly", 2), ("performance", 1)])
def test_the_scheduler_creates_the_runs_of_the_coming_nights(home, client, name, hour):
    deployment = client.read_deployment_by_name(f"benchmark/{name}")
    runs = wait_for(lambda: runs_of(client, deployment, "SCHEDULED"), 300)
    assert {run.expected_start_time.hour for run in runs} == {hour}
    assert all(run.auto_scheduled for run in runs)


def test_a_benchmark_on_a_schedule_is_started_by_the_worker_and_completes(home, client, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(PLAN), encoding="utf-8")
    file = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))
    (nightly,) = [entry for entry in file["deployments"] if entry["name"] == "nightly"]
    nightly |= {
        "name": "soon",
        "parameters": {"benchmark": str(plan)},
        "schedules": [{"interval": SECONDS_BETWEEN_RUNS, "active": True}],
    }
    (tmp_path / "prefect.yaml").write_text(yaml.safe_dump(file | {"deployments": [nightly]}))
    prefect("deploy", "--all", "--prefect-file", str(tmp_path / "prefect.yaml"))
    deployment = client.read_deployment_by_name("benchmark/soon")
    (run, *_) = wait_for(lambda: runs_of(client, deployment, "PENDING", "RUNNING", "COMPLETED"), 120)
    client.pause_deployment(deployment.id)
    assert run.auto_scheduled
    ended = wait_for(
        lambda: client.read_flow_run(run.id).state.is_final() and client.read_flow_run(run.id), 240
    )
    assert ended.state.is_completed(), ended.state
    assert list(home.glob("runs/*/report/*")), "the report is in the home of the servers"


@pytest.mark.parametrize("name", [servers.PREFECT_SERVER, servers.MLFLOW_SERVER, servers.WORKER])
def test_no_server_reports_a_fault_in_its_log(home, name):
    assert faults(home, name) == []


def test_a_run_whose_worker_dies_ends_as_crashed_and_resumes_when_it_is_retried(home, client):
    """All processes of the worker get SIGKILL; the automation ends the run, and a retry goes on with it."""
    from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter, LogFilter

    deployment = client.read_deployment_by_name("fed-rlhf/summarization")
    parameters = {"recipe": "debug", "overrides": ["federation.rounds=20"]}
    begun = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)

    def flow_run():
        return client.read_flow_run(begun.id)

    def phases():
        return client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id={"any_": [begun.id]}))

    def states_of_phases():
        return {run.state.type.value for run in phases()}

    wait_for(lambda: len(list(home.glob("runs/debug-*/federation/commits/*.json"))) > 2, 300)
    processes.stop(servers.WORKER, signal.SIGKILL)
    servers.start_servers()  # which forgets no flow run that awaits its next heartbeat
    (folder,) = (home / "runs").glob("debug-*")
    wait_for(lambda: flow_run().state.is_crashed() and states_of_phases() <= {"COMPLETED", "CRASHED"}, 200)
    assert flow_run().name == folder.name
    prefect("flow-run", "retry", str(begun.id))
    wait_for(lambda: flow_run().state.is_final(), 300)
    assert flow_run().state.is_completed(), flow_run().state
    assert flow_run().run_count == 2
    assert states_of_phases() == {"COMPLETED", "CRASHED"}  # the retry has a flow run of its own for the phase
    assert list((home / "runs").glob("debug-*")) == [folder]
    logs = client.read_logs(LogFilter(flow_run_id={"any_": [run.id for run in phases()]}))
    assert any(log.message.startswith("resuming after round") for log in logs)
    assert Run(folder.name, folder).federation_result().rounds == 20
    flow_runs = FlowRunFilter(id={"any_": [run.id for run in phases()]})
    names = {task.name for task in client.read_task_runs(flow_run_filter=flow_runs, limit=200)}
    assert {"prepare data", "form federation", "align by DPO", "prepare the judge"} <= names
    assert not [name for name in names if re.search(r"_|-[0-9a-f]{3}$", name)], "names that Prefect made up"
    for key in ("rounds", "dpo-steps"):
        bars = ArtifactFilter(key={"any_": [key]})
        (bar,) = client.read_artifacts(artifact_filter=bars, sort="UPDATED_DESC", limit=1)
        assert float(bar.data) == 100


def test_without_schedules_those_of_the_file_are_inactive(home, client):
    """And a run of a missed night does not start. The last test, since others wait for scheduled runs."""
    from prefect.states import Scheduled

    nightly = client.read_deployment_by_name("benchmark/nightly")
    (run, *_) = wait_for(lambda: runs_of(client, nightly, "SCHEDULED"), 300)
    late = Scheduled(scheduled_time=run.expected_start_time - timedelta(days=3))
    client.set_flow_run_state(run.id, late, force=True)
    servers.update_schedules(f"http://{servers.HOST}:{servers.PREFECT_PORT}/api", are_active=False)
    (schedule,) = client.read_deployment_by_name("benchmark/nightly").schedules
    assert not schedule.active
    assert not runs_of(client, nightly, "SCHEDULED")
