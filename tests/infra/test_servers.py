"""Servers on loopback are known by their process id and start time, and nothing else is ever ended."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import MagicMock
from uuid import NAMESPACE_DNS, uuid5

import psutil
import pytest
import yaml

from components import paths
from components.environment import PRIVATE_PREFECT
from infra import processes, servers, stores
from infra.processes import ProcessRecord, ServerError

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
WORKER = "prefect-worker"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home of the project, and an environment, of the test's own."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in ("PREFECT_API_URL", "PREFECT_API_KEY", PRIVATE_PREFECT):
        os.environ.pop(name, None)
    os.environ["FED_RLHF_HOME"] = str(tmp_path)
    return tmp_path


@pytest.fixture
def state(home):
    """The folder of records and logs."""
    processes.state_folder().mkdir()
    return processes.state_folder()


@pytest.fixture
def sleeper():
    """A process that is not started by the project."""
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


def is_running(pid):
    """Whether a process exists and is no zombie."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def eventually(condition, seconds=60):
    """Whether a condition becomes true within some seconds."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def wait_for_pid(path):
    """The process id that another process writes to a file."""
    assert eventually(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def writes_its_pid(path):
    """A command that writes its process id to a file, and sleeps."""
    code = f"import os, time; open({str(path)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    return [sys.executable, "-c", code]


def test_a_process_is_alive_only_under_its_own_start_time(sleeper):
    record = ProcessRecord(sleeper.pid, psutil.Process(sleeper.pid).create_time(), "none")
    assert record.find().pid == sleeper.pid
    assert ProcessRecord(sleeper.pid, 1.0, "none").find() is None  # its id was given to another process
    sleeper.kill()
    assert eventually(lambda: record.find() is None)  # a zombie until it is waited for
    sleeper.wait()
    assert record.find() is None


def test_down_leaves_a_process_that_only_has_the_same_id_and_is_harmless_where_nothing_runs(
    state, sleeper, capsys
):
    record = {"pid": sleeper.pid, "started": 1.0, "mark": "none"}
    processes.record_path(WORKER).write_text(json.dumps(record))
    servers.stop_servers()
    assert sleeper.poll() is None
    assert not processes.record_path(WORKER).exists()
    assert capsys.readouterr().out == "nothing is running\n"
    servers.stop_servers()
    assert capsys.readouterr().out == "nothing is running\n"


def test_down_ends_a_started_process_and_its_child_in_another_session(state, sleeper):
    ready = state / "child"
    command = writes_its_pid(ready)
    code = (
        "import subprocess, time;"
        f" child = subprocess.Popen({command!r}, start_new_session=True);"
        " time.sleep(600)"
    )
    processes.start(WORKER, [sys.executable, "-c", code], dict(os.environ))
    child = wait_for_pid(ready)
    parent = processes.read_record(WORKER)
    assert is_running(child)
    servers.stop_servers()
    assert not is_running(child)
    assert parent.find() is None
    assert sleeper.poll() is None


def test_a_server_of_a_background_job_ends_at_the_first_signal(state, monkeypatch):
    ready = state / "server"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        processes.start("prefect-server", writes_its_pid(ready), dict(os.environ))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    wait_for_pid(ready)  # an interpreter that is starting ends with 1
    monkeypatch.setattr(psutil.Process, "kill", lambda process: pytest.fail("it did not end in 15 s"))
    servers.stop_servers()


def test_a_running_server_is_not_started_again(state, capsys):
    process = processes.start("prefect-server", SLEEP, dict(os.environ))
    try:
        assert processes.start("prefect-server", SLEEP, dict(os.environ)) is None
        assert processes.read_record("prefect-server").pid == process.pid
        assert "prefect-server is running already" in capsys.readouterr().out
    finally:
        servers.stop_servers()


def test_a_taken_port_is_reported_before_anything_is_started(state, monkeypatch):
    with socket.socket() as foreign:
        foreign.bind((servers.HOST, 0))
        foreign.listen()
        port = foreign.getsockname()[1]
        monkeypatch.setenv("MLFLOW_PORT", str(port))
        monkeypatch.setattr(servers, "PREFECT_PORT", servers.free_port())
        with pytest.raises(ServerError, match=rf"port {port}.*mlflow-server.*stop.*MLFLOW_PORT"):
            servers.start_servers()
    assert not list(state.glob("*.json"))


@pytest.mark.long
@pytest.mark.pipeline
def test_a_server_that_fails_ends_the_servers_of_the_same_call(state, monkeypatch, prefect_database):
    fails = [sys.executable, "-c", "print('the store is locked'); raise SystemExit(3)"]
    monkeypatch.setenv("MLFLOW_PORT", str(servers.free_port()))
    monkeypatch.setattr(servers, "PREFECT_PORT", servers.free_port())
    monkeypatch.setattr(servers, "prefect_command", lambda port: SLEEP)
    monkeypatch.setattr(servers, "mlflow_command", lambda: fails)
    monkeypatch.setattr(servers, "is_up", lambda url, timeout=2.0: url.endswith("/api/health"))
    started = []
    start = processes.start
    monkeypatch.setattr(
        processes, "start", lambda *arguments: started.append(start(*arguments)) or started[-1]
    )
    with pytest.raises(ServerError, match=r"mlflow-server.*status 3.*the store is locked"):
        servers.start_servers()
    assert len(started) == 2
    assert not any(is_running(process.pid) for process in started)
    assert prefect_database.read_bytes() == b"empty"
    assert not list(state.glob("*.json"))


@contextlib.contextmanager
def private_stub(meanwhile):
    meanwhile()
    yield "http://127.0.0.1:1/api"


@pytest.mark.parametrize(
    ("configured", "started", "chosen"),
    [
        ("http://prefect.example/api", True, "http://prefect.example/api"),
        (None, True, "http://127.0.0.1:4200/api"),
        (None, False, "http://127.0.0.1:1/api"),
    ],
    ids=[
        "configured before shared",
        "shared before private",
        "private where the server on the port was not started by up",
    ],
)
def test_a_run_uses_the_configured_api_then_the_shared_one_then_a_private_one(
    monkeypatch, configured, started, chosen
):
    monkeypatch.setattr(servers, "is_up", lambda url, timeout=2.0: True)
    monkeypatch.setattr(processes, "is_started", lambda name: started)
    monkeypatch.setattr(servers, "_private_server", private_stub)
    if configured:
        os.environ["PREFECT_API_URL"] = configured
    called = []
    with servers.prefect_api(lambda: called.append(True)):
        assert os.environ["PREFECT_API_URL"] == chosen
        assert bool(called) == (chosen == "http://127.0.0.1:1/api")
        assert (PRIVATE_PREFECT in os.environ) == (chosen == "http://127.0.0.1:1/api")
    assert os.environ.get("PREFECT_API_URL") == configured
    assert PRIVATE_PREFECT not in os.environ


def test_a_configured_api_that_does_not_answer_is_an_error_and_not_replaced():
    os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{servers.free_port()}/api"
    with (
        pytest.raises(ServerError, match="PREFECT_API_URL is .*unset the variable"),
        servers.prefect_api(),
    ):
        pass


@pytest.mark.parametrize(
    "background", [False, True], ids=["foreground", "in a shell's background, where SIGINT is ignored"]
)
def test_the_server_of_a_run_ends_when_the_run_is_killed(tmp_path, background):
    ready, interrupted = tmp_path / "pid", tmp_path / "interrupted"
    server = [
        "import os, pathlib, time",
        f"pathlib.Path({str(ready)!r}).write_text(str(os.getpid()))",
        "try:",
        "    time.sleep(600)",
        "except KeyboardInterrupt:",  # the guard kills a server that does not end
        f"    pathlib.Path({str(interrupted)!r}).touch()",
    ]
    guard = [sys.executable, "-c", servers.GUARD, sys.executable, "-c", "\n".join(server)]
    lines = [
        "import signal, subprocess, time",
        f"subprocess.Popen({guard!r}, stdin=subprocess.PIPE, start_new_session=True)",
        "time.sleep(600)",
    ]
    if background:
        lines.insert(1, "signal.signal(signal.SIGINT, signal.SIG_IGN)")
    process = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stderr=subprocess.DEVNULL)
    pid = wait_for_pid(ready)
    assert is_running(pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert eventually(lambda: not is_running(pid))
    assert interrupted.is_file()


@pytest.fixture
def api_stub(home, monkeypatch):
    """A web server in the place of Prefect's, which answers /api/health."""
    (home / "api").mkdir()
    (home / "api" / "health").write_text("true")

    def command(port, *options):
        return [sys.executable, "-m", "http.server", str(port), "--bind", servers.HOST]

    monkeypatch.setattr(servers, "prefect_command", command)


def test_the_stages_of_a_dvc_command_share_a_server_that_ends_with_it(api_stub, sleeper):
    dvc = psutil.Process(sleeper.pid)
    url = servers._stages_server(dvc)
    assert servers._stages_server(dvc) == url
    assert servers._stages_server(psutil.Process()) != url, "it belongs to another command"
    sleeper.kill()
    sleeper.wait()
    assert eventually(lambda: not servers.is_up(f"{url}/health"))
    assert eventually(lambda: len(list(processes.state_folder().glob("*.url"))) == 1)


@pytest.fixture
def prefect_database(home, monkeypatch):
    """Where a home has Prefect's database; there is an empty one to copy, with the content `empty`."""
    (home / "empty.db").write_bytes(b"empty")
    monkeypatch.setattr(stores, "empty_prefect_database", lambda: home / "empty.db")
    monkeypatch.setenv("PREFECT_HOME", str(home / "prefect"))
    return home / "prefect" / "prefect.db"


def test_a_private_server_starts_with_a_copy_of_the_empty_database(api_stub, sleeper, prefect_database):
    servers._stages_server(psutil.Process(sleeper.pid))
    assert prefect_database.read_bytes() == b"empty"


def test_a_dead_server_of_the_stages_is_replaced(api_stub, sleeper):
    dvc = psutil.Process(sleeper.pid)
    url = servers._stages_server(dvc)
    port = int(re.search(r":(\d+)/", url)[1])
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended meanwhile
            if process.status() != psutil.STATUS_ZOMBIE and str(port) in process.cmdline():
                process.kill()
    assert eventually(lambda: not servers.is_up(f"{url}/health"))
    other = servers._stages_server(dvc)
    assert servers.is_up(f"{other}/health")


def test_a_stage_belongs_to_the_process_that_dvc_set_no_stage_for():
    code = "from infra.servers import _dvc_process; print(_dvc_process().pid)"
    stage = os.environ | {"DVC_STAGE": "federate"}
    shell = ["sh", "-c", f"{sys.executable} -c '{code}'; true"]
    done = subprocess.run(shell, env=stage, cwd=servers.PACKAGE, capture_output=True, text=True, check=True)
    assert int(done.stdout) == os.getpid()
    assert servers._dvc_process() is None


def test_servers_get_the_folders_of_the_project_by_their_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FED_RLHF_HOME", "here")
    environment = servers.project_servers()[2]
    assert environment["FED_RLHF_HOME"] == str(tmp_path / "here"), "they start in the checkout"


@pytest.mark.long
@pytest.mark.pipeline
@pytest.mark.parametrize(("name", "advice"), [("prefect-server", ""), ("mlflow-server", "advice\n")])
def test_the_server_alone_prints_its_address_and_prefects_no_advice_on_variables(
    name, advice, prefect_database, home
):
    lines = [
        "import pathlib, sys",
        "from infra import servers, stores",
        f"stores.empty_prefect_database = lambda: pathlib.Path({str(home / 'empty.db')!r})",
        f"servers.PREFECT_PORT = {servers.free_port()}",
        "command = [sys.executable, '-c', 'print(\"advice\")']",
        "servers.prefect_command = lambda port: command",
        "servers.mlflow_command = lambda: command",
        f"servers.serve({name!r})",
    ]
    variables = os.environ | {"MLFLOW_PORT": str(servers.free_port())}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], env=variables, capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"http://127.0.0.1:\d+  \(Ctrl-C ends it\)\n" + advice, done.stdout)
    assert prefect_database.exists() == (name == "prefect-server")


def test_loopback_never_goes_through_a_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "intranet.example")
    environment = servers.prefect_environment()
    assert environment["NO_PROXY"] == "intranet.example,127.0.0.1,localhost"
    assert environment["no_proxy"] == environment["NO_PROXY"]


@pytest.mark.parametrize("configured", ["~/prefect", "", None])
def test_the_home_of_prefect_is_where_prefect_takes_it_to_be(home, monkeypatch, configured):
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("FED_RLHF_HOME", str(home))
    monkeypatch.delenv("PREFECT_HOME", raising=False)
    if configured is not None:
        monkeypatch.setenv("PREFECT_HOME", configured)
    expected = home / ("prefect" if configured else ".prefect")
    assert servers.prefect_environment()["PREFECT_HOME"] == str(expected)


def test_the_mlflow_server_uses_the_store_that_runs_without_it_use(monkeypatch):
    for name in (
        "MLFLOW_TRACKING_URI",
        "MLFLOW_BACKEND_STORE_URI",
        "MLFLOW_DEFAULT_ARTIFACT_ROOT",
        "MLFLOW_HOST",
    ):
        monkeypatch.delenv(name, raising=False)
    settings = servers.mlflow_settings()
    assert settings["MLFLOW_BACKEND_STORE_URI"] == paths.tracking_uri()
    assert settings["MLFLOW_DEFAULT_ARTIFACT_ROOT"] == paths.artifact_root(paths.tracking_uri()).as_uri()
    assert settings["MLFLOW_HOST"] == "127.0.0.1"
    monkeypatch.setenv("MLFLOW_PORT", "5055")
    assert servers.mlflow_settings()["MLFLOW_PORT"] == "5055"


def test_a_line_of_the_server_file_that_is_no_setting_is_named(tmp_path, monkeypatch):
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "server.env").write_text("# a comment\nMLFLOW_PORT 5000\n")
    monkeypatch.setattr(servers, "PACKAGE", tmp_path)
    with pytest.raises(ServerError, match=r"server\.env, line 2: .*KEY=VALUE.*MLFLOW_PORT 5000"):
        servers.mlflow_settings()


def test_up_outside_a_checkout_names_what_to_start_instead(state, monkeypatch):
    monkeypatch.setattr(servers, "in_checkout", lambda: False)
    with pytest.raises(ServerError, match=r"checkout.*prefect server start.*mlflow server"):
        servers.start_servers()
    assert not list(state.iterdir())


def test_schedules_that_the_file_no_longer_has_are_removed_and_those_of_users_stay(
    tmp_path, monkeypatch, capsys
):
    schedules = [{"cron": "0 2 * * *", "timezone": "UTC", "active": True}]
    kept = {"name": "nightly", "schedules": schedules}
    (tmp_path / "prefect.yaml").write_text(json.dumps({"deployments": [{"name": "qa"}, kept]}))
    monkeypatch.setattr(servers, "PACKAGE", tmp_path)
    assert servers.active_schedules() == ["nightly (0 2 * * * UTC)"]

    def deployed(name, *slugs):
        schedules = [SimpleNamespace(id=f"{slug} of {name}", slug=slug) for slug in slugs]
        return SimpleNamespace(id=uuid5(NAMESPACE_DNS, name), name=name, schedules=schedules)

    client = MagicMock()
    client.__enter__.return_value = client
    mine = servers.SCHEDULE_SLUG
    client.read_deployments.return_value = [
        deployed("qa", mine, None),
        deployed("nightly", mine, "weekly"),
        deployed("renamed", mine),
        deployed("theirs", None, "weekly"),
    ]
    monkeypatch.setattr("prefect.client.orchestration.get_client", lambda **_: client)
    servers.update_schedules("http://127.0.0.1:1/api")
    removed = [call.args for call in client.delete_deployment_schedule.call_args_list]
    ids = {one.name: one.id for one in client.read_deployments.return_value}
    assert removed == [(ids[name], f"{mine} of {name}") for name in ("qa", "renamed")]
    assert "the schedule of qa" in capsys.readouterr().out
    assert not client.update_deployment_schedule.called
    missed, by_hand = (
        SimpleNamespace(id=name, auto_scheduled=name == "missed") for name in ("missed", "own")
    )
    client.read_flow_runs.return_value = [missed, by_hand]
    servers.update_schedules("http://127.0.0.1:1/api", are_active=False)
    (paused,) = client.update_deployment_schedule.call_args_list
    assert (paused.args, paused.kwargs) == ((ids["nightly"], f"{mine} of nightly"), {"active": False})
    client.delete_flow_run.assert_called_once_with(missed.id)


def test_the_port_of_prefects_server_is_that_of_prefect_toml(tmp_path, monkeypatch):
    assert f"http://{servers.HOST}:{servers.PREFECT_PORT}" == paths.prefect_address()
    monkeypatch.setattr(paths, "PACKAGE", tmp_path)
    assert paths.prefect_address() == "http://127.0.0.1:4200"  # of a wheel
    (tmp_path / "prefect.toml").write_text('[api]\nurl = "http://127.0.0.1:4300/api"\n')
    assert paths.prefect_address() == "http://127.0.0.1:4300"


def test_the_schedules_of_the_file_have_the_slug_by_which_up_knows_them():
    """And are in the queue of their own, so that no other deployment waits for one."""
    file = yaml.safe_load((servers.PACKAGE / "prefect.yaml").read_text(encoding="utf-8"))
    schedules = [one for entry in file["deployments"] for one in entry["schedules"]]
    assert schedules
    default, nightly = servers.QUEUES
    queues = {
        entry["name"]: entry["work_pool"].get("work_queue_name", default) for entry in file["deployments"]
    }
    scheduled = {entry["name"] for entry in file["deployments"] if entry["schedules"]}
    assert {name for name, queue in queues.items() if queue == nightly} == scheduled
    assert set(queues.values()) == {default, nightly}
    assert {one["slug"] for one in schedules} == {servers.SCHEDULE_SLUG}
