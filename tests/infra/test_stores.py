"""The databases of the project's home: made once and whole, and refused where they cannot be written."""

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from mlflow import MlflowClient

from infra import servers, stores
from infra.processes import DATABASES, ServerError, _cause, exclusive

CREATE = "import sys; from infra.stores import prepare_tracking_store; prepare_tracking_store(sys.argv[1])"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FED_RLHF_HOME", str(tmp_path))
    monkeypatch.delenv("FED_RLHF_RUNS", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def create_in_process(uri):
    return subprocess.Popen([sys.executable, "-c", CREATE, uri])


@pytest.mark.long
@pytest.mark.pipeline
def test_a_store_whose_first_process_was_killed_is_made_by_the_next(home):
    uri = f"sqlite:///{home / 'mlflow.db'}"
    process = create_in_process(uri)
    building = home / ".mlflow.db.building"
    while not building.is_file():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (home / "mlflow.db").exists()
    stores.prepare_tracking_store(uri)
    assert MlflowClient(uri).get_experiment_by_name("Default") is not None
    assert not building.exists()


@pytest.mark.long
@pytest.mark.pipeline
def test_processes_that_start_at_once_make_one_store(home):
    uri = f"sqlite:///{home / 'mlflow.db'}"
    processes = [create_in_process(uri) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert len(MlflowClient(uri).search_experiments()) == 1


@pytest.fixture
def project(migrated_store, tmp_path):
    """A project whose store has an experiment with artifacts, and one with artifacts on a server."""
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(migrated_store, folder / "mlflow.db")
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    artifacts = folder / "mlartifacts" / "é 1"
    artifacts.mkdir(parents=True)
    client.create_experiment("é 1", artifacts.as_uri())
    client.create_experiment("elsewhere", artifact_location="s3://bucket/mlartifacts/elsewhere")
    return folder


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (shutil.copytree, "was copied, but has its artifacts in .*: use it where it was, or move"),
        (
            shutil.move,
            r"was moved, but has its artifacts in .*: use it where it was, make .* a link to .* or",
        ),
    ],
)
def test_the_store_of_a_moved_or_copied_project_is_refused(project, tmp_path, place, words):
    place(project, tmp_path / "other place")
    moved = tmp_path / "other place"
    uri = f"sqlite:///{moved / 'mlflow.db'}"
    with pytest.raises(ServerError, match=f"store {moved}/mlflow.db {words}"):
        stores.prepare_tracking_store(uri)
    shutil.rmtree(project, ignore_errors=True)
    project.mkdir()
    (project / "mlartifacts").symlink_to(moved / "mlartifacts")
    stores.prepare_tracking_store(uri)


def test_a_store_that_was_copied_alone_keeps_its_artifacts_where_they_are(project, tmp_path):
    stores.prepare_tracking_store(f"sqlite:///{project / 'mlflow.db'}")
    shutil.copy(project / "mlflow.db", tmp_path / "mlflow.db")
    stores.prepare_tracking_store(f"sqlite:///{tmp_path / 'mlflow.db'}")


def test_a_file_that_is_no_store_is_refused_and_an_empty_one_is_replaced(home):
    path = home / "mlflow.db"
    path.write_text("no database, but a long enough text to have a header of a hundred bytes in it. " * 3)
    with pytest.raises(
        ServerError, match=rf"store {path} cannot be read \(file is not a database\): restore"
    ):
        stores.prepare_tracking_store(f"sqlite:///{path}")
    path.write_bytes(b"")
    stores.prepare_tracking_store(f"sqlite:///{path}")
    assert MlflowClient(f"sqlite:///{path}").get_experiment_by_name("Default") is not None


@pytest.mark.parametrize("uri", ["http://127.0.0.1:5000", "postgresql://u:p@h/db"])
def test_a_store_that_is_no_file_is_left_to_its_server(home, uri):
    stores.prepare_tracking_store(uri)
    assert list(home.iterdir()) == []


def test_one_process_at_a_time_makes_databases(home):
    held = []

    def use(number):
        with exclusive(DATABASES):
            held.append(number)
            time.sleep(0.05)
            assert held[-1] == number

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(use, range(4)))
    assert sorted(held) == [0, 1, 2, 3]


def test_a_home_without_a_database_of_prefect_gets_the_empty_one_and_another_stays(home, monkeypatch):
    path = home / ".prefect" / "prefect.db"
    monkeypatch.setattr(stores, "empty_prefect_database", lambda: home / "empty.db")
    stores.prepare_prefect_database(path.parent)
    assert not path.exists(), "there is none to copy"
    (home / "empty.db").write_bytes(b"empty")
    stores.prepare_prefect_database(path.parent)
    assert path.read_bytes() == b"empty"
    path.write_bytes(b"of an earlier run")
    stores.prepare_prefect_database(path.parent)
    assert path.read_bytes() == b"of an earlier run"
    assert os.listdir(path.parent) == ["prefect.db"]


@pytest.mark.parametrize("left", ["prefect.db-wal", "prefect.db-journal"])
def test_a_home_with_a_part_of_a_database_gets_no_empty_one(home, monkeypatch, left):
    """SQLite would apply what is left of the earlier database to it."""
    monkeypatch.setattr(stores, "empty_prefect_database", lambda: home / "empty.db")
    (home / "empty.db").write_bytes(b"empty")
    (home / left).touch()
    stores.prepare_prefect_database(home)
    assert not (home / "prefect.db").exists()


def test_no_empty_database_is_put_where_another_one_is_named(home, monkeypatch):
    monkeypatch.setattr(stores, "empty_prefect_database", lambda: home / "empty.db")
    (home / "empty.db").write_bytes(b"empty")
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", "postgresql+asyncpg://server/prefect")
    stores.prepare_prefect_database(home)
    assert not (home / "prefect.db").exists()


def test_an_empty_database_that_cannot_be_made_is_a_line(home, monkeypatch, capsys):
    monkeypatch.setattr(stores, "empty_prefect_database", lambda: home / "share" / "empty.db")
    monkeypatch.setattr(stores.sys, "executable", shutil.which("false"))
    stores.make_empty_prefect_database()
    assert capsys.readouterr().out.startswith("no empty database of Prefect could be made (")
    assert os.listdir(home / "share") == []


def schema(database):
    with contextlib.closing(sqlite3.connect(database)) as opened:
        version = opened.execute("SELECT version_num FROM alembic_version").fetchall()
        return version, sorted(opened.execute("SELECT name, sql FROM sqlite_master").fetchall())


@pytest.mark.long
@pytest.mark.pipeline
def test_prefects_server_finds_nothing_to_migrate_in_the_empty_database(home, monkeypatch):
    empty = home / "share" / "empty.db"
    monkeypatch.setattr(stores, "empty_prefect_database", lambda: empty)
    monkeypatch.setenv("PREFECT_HOME", str(home / ".prefect"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    stores.make_empty_prefect_database()
    made = schema(empty)
    assert len(made[0]) == 1 and len(made[1]) > 100
    assert os.listdir(home / "share") == ["empty.db"]
    with contextlib.closing(sqlite3.connect(empty)) as database:
        database.execute("PRAGMA user_version = 7")  # which a database of the server does not have
    with servers.prefect_api():
        path = home / ".prefect" / "prefect.db"
        assert schema(path) == made
        with contextlib.closing(sqlite3.connect(path)) as database:
            assert database.execute("PRAGMA user_version").fetchone() == (7,)


@pytest.mark.parametrize("name", ["mlflow.db", ".prefect/prefect.db", "runs", ".state"])
def test_what_cannot_be_written_is_named_before_a_run(home, monkeypatch, name):
    path = home / name
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if name in ("runs", ".state") else path.touch()
    access = os.access
    monkeypatch.setattr(os, "access", lambda tested, mode: tested != path and access(tested, mode))
    words = rf"^{path} cannot be written by the user with id {os.geteuid()}: .*FED_RLHF_HOME"
    with pytest.raises(ServerError, match=words):
        stores.check_writable(home / ".prefect")


@pytest.mark.skipif(os.geteuid() != 0, reason="takes the place of another user")
def test_a_folder_that_may_not_be_searched_is_refused_in_a_sentence(home):
    (home / "closed").mkdir(mode=0o700)
    (home / "closed" / "mlflow.db").touch()
    home.chmod(0o777)
    user = os.fork()
    if user == 0:  # another user, in a process of its own
        try:
            os.setuid(65534)
            os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{home}/closed/mlflow.db"
            stores.check_writable(home / ".prefect")
        except ServerError as error:
            os._exit(0 if "cannot be written by the user with id 65534" in str(error) else 1)
        except BaseException:
            os._exit(2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(user, 0)[1]) == 0


def test_what_is_missing_is_made_in_a_folder_that_can_be_written(home):
    stores.check_writable(home / "not" / "yet" / "there")


@pytest.mark.long
@pytest.mark.pipeline
def test_a_prefect_server_that_ends_at_its_start_is_noticed_with_its_cause(home, monkeypatch):
    url = "postgresql+asyncpg://u:p@127.0.0.1:1/none"
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", url)
    start = time.monotonic()
    ended = r"its process ended with status \d+ \(.*Error.*\); see"
    called = []
    with pytest.raises(ServerError, match=ended), servers._private_server(lambda: called.append(True)):
        pytest.fail("the server is up")
    assert called
    assert time.monotonic() - start < 120


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            ["Traceback", "OSError: [Errno 111] refused", "ERROR: failed", "Server stopped!", ""],
            "OSError: [Errno 111] refused",
        ),
        (["permission denied: x", "Server stopped!"], "permission denied: x"),
        (["Server stopped!"], "Server stopped!"),
        (["DbError: at postgres://ada:secret@h/db: refused"], "DbError: at postgres://h/db: refused"),
    ],
)
def test_the_cause_is_the_last_line_that_names_an_error(lines, cause):
    assert _cause(lines) == f" ({cause})"
    assert _cause(["", " "]) == ""


@pytest.mark.parametrize(
    "configured", ["http://h:4200", "http://h:4200/", "http://h:4200/api/", "http://h:4200/api"]
)
def test_the_address_of_an_api_is_completed(monkeypatch, configured):
    monkeypatch.setattr(servers, "is_up", lambda url: url == "http://h:4200/api/health")
    assert servers._api_url(configured) == "http://h:4200/api"


@pytest.mark.parametrize("uri", ["{}/runs of me", "file://{}/runs%20of%20me"])
def test_a_store_of_files_is_refused_with_the_command_that_copies_its_runs(home, monkeypatch, uri):
    words = rf"is the folder {home}/runs of me, .* `mlflow migrate-filestore --source {home}/runs of me "
    with pytest.raises(ServerError, match=words):
        stores.prepare_tracking_store(uri.format(home))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    stores.prepare_tracking_store(uri.format(home))
    assert list(home.iterdir()) == []


def test_a_store_that_another_process_holds_is_refused(project):
    path = project / "mlflow.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ServerError, match=rf"store {path} cannot be read \(database is locked\): end"):
            stores.prepare_tracking_store(f"sqlite:///{path}?timeout=60")


def test_a_user_without_a_home_folder_is_refused_before_libraries_look_for_it(home, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", mock.Mock(side_effect=KeyError("uid")))
    with pytest.raises(ServerError, match=rf"^The user with id {os.geteuid()} has no home folder.* HOME"):
        stores.check_writable(home / ".prefect")
