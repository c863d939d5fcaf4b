"""Servers on loopback: what is started is known by its id and start time, and nothing else is ever ended."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from infra import servers
from infra.servers import ServerError

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """A state folder and an environment of the test's own."""
    monkeypatch.setattr(servers, "STATE", tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in ("PREFECT_API_URL", "PREFECT_API_KEY", servers.PRIVATE):
        os.environ.pop(name, None)
    return tmp_path


@pytest.fixture
def sleeper():
    """A process that nobody else knows."""
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


def eventually(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_a_process_is_alive_only_under_its_own_start_time(sleeper):
    record = {"pid": sleeper.pid, "started": servers.start_time(sleeper.pid)}
    assert servers.is_alive(record)
    assert not servers.is_alive(record | {"started": "1"})      # its id was given to another process
    sleeper.kill()
    assert eventually(lambda: not servers.is_alive(record))     # a zombie until it is waited for
    sleeper.wait()
    assert not servers.is_alive(record)


def test_down_leaves_a_process_that_only_has_the_same_id(state, sleeper, capsys):
    (state / "prefect-worker.json").write_text(json.dumps({"pid": sleeper.pid, "started": "1", "mark": "none"}))
    servers.down()
    assert sleeper.poll() is None
    assert not (state / "prefect-worker.json").exists()
    assert capsys.readouterr().out == "nothing is up\n"


def test_down_is_harmless_where_nothing_is_up(capsys):
    servers.down()
    assert capsys.readouterr().out == "nothing is up\n"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="what a started process starts itself is found by /proc")
def test_down_ends_what_was_started_and_what_that_started_in_a_session_of_its_own(state, sleeper):
    ready = state / "child"
    code = f"import subprocess, sys, time; c = subprocess.Popen({SLEEP!r}, start_new_session=True); open({str(ready)!r}, 'w').write(str(c.pid)); time.sleep(60)"
    servers._start("prefect-worker", [sys.executable, "-c", code], dict(os.environ), [])
    assert eventually(lambda: ready.exists() and ready.read_text())
    child, parent = int(ready.read_text()), json.loads((state / "prefect-worker.json").read_text())
    assert servers.start_time(child)
    servers.down()
    assert servers.start_time(child) is None
    assert not servers.is_alive(parent)
    assert sleeper.poll() is None


def test_what_is_up_already_is_not_started_again(state):
    started = []
    process = servers._start("prefect-server", SLEEP, dict(os.environ), started)
    try:
        assert servers._start("prefect-server", SLEEP, dict(os.environ), started) is None
        assert started == ["prefect-server"]
        assert json.loads((state / "prefect-server.json").read_text())["pid"] == process.pid
    finally:
        servers.down()


def test_a_port_that_is_taken_is_said_before_anything_is_started(state, monkeypatch):
    with socket.socket() as foreign:
        foreign.bind((servers.HOST, 0))
        foreign.listen()
        port = foreign.getsockname()[1]
        monkeypatch.setenv("MLFLOW_PORT", str(port))
        monkeypatch.setattr(servers, "PREFECT_PORT", servers.free_port())
        with pytest.raises(ServerError, match=rf"^port {port}, which mlflow-server needs, is taken by another program: stop that one first\.$"):
            servers.up()
    assert not list(state.glob("*.json"))


def test_a_server_that_fails_takes_down_what_the_same_call_had_started(state, monkeypatch):
    monkeypatch.setenv("MLFLOW_PORT", str(servers.free_port()))
    monkeypatch.setattr(servers, "PREFECT_PORT", servers.free_port())
    monkeypatch.setattr(servers, "prefect_command", lambda port: SLEEP)
    monkeypatch.setattr(servers, "mlflow_command", lambda: [sys.executable, "-c", "print('the store is locked'); raise SystemExit(3)"])
    monkeypatch.setattr(servers, "is_up", lambda url, timeout=2.0: url.endswith("/api/health"))
    pids = []
    start = servers._start
    monkeypatch.setattr(servers, "_start", lambda *given: pids.append(start(*given)) or pids[-1])
    with pytest.raises(ServerError, match=r"could not start mlflow-server: its process ended with status 3 \(the store is locked\)"):
        servers.up()
    assert len(pids) == 2
    assert all(servers.start_time(process.pid) is None for process in pids)
    assert not list(state.glob("*.json"))


@contextlib.contextmanager
def private_stub():
    yield "http://127.0.0.1:1/api"


@pytest.mark.parametrize(
    ("named", "started", "chosen"),
    [("http://prefect.example/api", True, "http://prefect.example/api"), (None, True, "http://127.0.0.1:4200/api"), (None, False, "http://127.0.0.1:1/api")],
    ids=["named before shared", "shared before private", "private where what answers on the port was not started by up"])
def test_a_run_takes_the_api_that_is_named_then_the_shared_one_then_its_own(monkeypatch, named, started, chosen):
    monkeypatch.setattr(servers, "is_up", lambda url, timeout=2.0: True)
    monkeypatch.setattr(servers, "_is_started", lambda name: started)
    monkeypatch.setattr(servers, "_private_server", private_stub)
    if named:
        os.environ["PREFECT_API_URL"] = named
    with servers.prefect_api():
        assert os.environ["PREFECT_API_URL"] == chosen
        assert (servers.PRIVATE in os.environ) == (chosen == "http://127.0.0.1:1/api")
    assert os.environ.get("PREFECT_API_URL") == named
    assert servers.PRIVATE not in os.environ


def test_a_named_api_that_does_not_answer_is_an_error_and_not_replaced():
    os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{servers.free_port()}/api"
    with pytest.raises(ServerError, match="no Prefect API answers there: start it, or unset the variable"), servers.prefect_api():
        pass


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "in a shell's background, where SIGINT is ignored"])
def test_the_server_of_a_run_ends_when_the_run_is_killed(tmp_path, background):
    pid_file = tmp_path / "pid"
    server = [sys.executable, "-c", f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"]
    ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " if background else ""
    run = f"{ignore}import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {servers.GUARD!r}, *{server!r}], stdin=subprocess.PIPE, start_new_session=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", run], stderr=subprocess.DEVNULL)
    assert eventually(lambda: pid_file.exists() and pid_file.read_text())
    pid = int(pid_file.read_text())
    assert servers.start_time(pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert eventually(lambda: servers.start_time(pid) is None, 5)      # before the guard would kill it


def test_loopback_never_goes_through_a_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "intranet.example")
    assert servers.environment()["NO_PROXY"] == servers.environment()["no_proxy"] == "intranet.example,127.0.0.1,localhost"


def test_the_mlflow_server_uses_the_store_that_runs_without_it_use(monkeypatch):
    from tasks import tracking

    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_BACKEND_STORE_URI", "MLFLOW_DEFAULT_ARTIFACT_ROOT", "MLFLOW_HOST"):
        monkeypatch.delenv(name, raising=False)
    settings = servers.mlflow_settings()
    assert settings["MLFLOW_BACKEND_STORE_URI"] == tracking.tracking_uri()
    assert settings["MLFLOW_DEFAULT_ARTIFACT_ROOT"] == tracking.artifact_root().as_uri()
    assert settings["MLFLOW_HOST"] == "127.0.0.1"
    monkeypatch.setenv("MLFLOW_PORT", "5055")
    assert servers.mlflow_settings()["MLFLOW_PORT"] == "5055"


def test_a_line_of_the_server_file_that_is_no_setting_is_named(tmp_path, monkeypatch):
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "server.env").write_text("# a comment\nMLFLOW_PORT 5000\n")
    monkeypatch.setattr(servers, "PROJECT", tmp_path)
    with pytest.raises(ServerError, match=r"server\.env, line 2: expected KEY=VALUE, not 'MLFLOW_PORT 5000'"):
        servers.mlflow_settings()
