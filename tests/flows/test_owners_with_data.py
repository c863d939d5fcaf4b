"""The tutorial with owners that keep their rows: a whole run of a server that cannot read their homes."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from components.config import InputFile
from components.data.prepare import prepare
from components.recipes import load_recipe
from components.results import FederationResult
from flows.cli import app
from tests.support.bare_loop import run_bare_loop
from tests.support.separate_owners import ROOT, separate_owners
from tests.support.tutorials import write_titled_files

OWNERS = ("north", "south", "east")
SECRET = re.compile(rb"order [123]0\d\d")
"""Is in each row of an owner, and in no text of the server."""

MOMENTS = 5

pytestmark = [pytest.mark.long, pytest.mark.pipeline]


def content(path):
    """The bytes of a file; of a table those of its texts, which the file compresses."""
    if path.suffix == ".parquet":
        return json.dumps(pyarrow.parquet.read_table(path).to_pylist(), default=str).encode()
    return path.read_bytes()


def call(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def serve(owners, *arguments):
    """Start a command of the server's, which has no permission to read the owners' homes."""
    folder = owners.homes.parent
    return owners.serve(
        *(sys.executable, "-m", "flows.cli", *arguments),
        cwd=folder,
        FED_RLHF_HOME=str(folder / "project"),
        FED_RLHF_BACKBONES=os.environ.get("FED_RLHF_BACKBONES", str(ROOT / "data" / "backbone")),
        PYTHONPATH=str(ROOT),
    )


def workers(owners, process):
    """The processes that owners have forked for jobs, when there is one or the server's process has ended."""
    found = []
    while not found and process.poll() is None:
        for owner in owners.processes.values():
            found += psutil.Process(owner.pid).children()
        time.sleep(0.02)
    return found


def kill(processes):
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def read_results(run):
    """The bytes of the results of a run's phases."""
    return [(run / phase / "result.json").read_bytes() for phase in ("federation", "alignment", "evaluation")]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The owners and the folder of the tutorial after its run, what the run printed, and its results."""
    folder = tmp_path_factory.mktemp("tutorial")
    write_titled_files("owners", folder)
    subprocess.run([sys.executable, "make_owners.py"], cwd=folder, check=True)
    with separate_owners(folder / "homes") as owners:
        (folder / "homes").mkdir()
        for name in OWNERS:
            owners.add(name, folder / f"{name}.jsonl")
        owners.start(*OWNERS)
        for name in OWNERS if owners.apart else ():
            (folder / f"{name}.jsonl").chmod(0)
            os.chown(folder / f"{name}.jsonl", 65534, 65534)
        done = serve(owners, "run", "support.yaml", f"runtime.sockets={owners.sockets}")
        output, _ = done.communicate()
        assert done.returncode == 0, output
        (run,) = (folder / "project" / "runs").glob("support-*")
        yield owners, run, output, read_results(run)


def test_the_rounds_have_the_bytes_of_rounds_with_the_same_rows_in_one_process(ended, tmp_path, monkeypatch):
    owners, run, *_ = ended
    lines = []
    for name in OWNERS:
        for line in (owners.homes.parent / f"{name}.jsonl").read_text().splitlines():
            lines.append(json.dumps(json.loads(line) | {"client_id": name}))
    (tmp_path / "together.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(owners.homes.parent)
    recipe = load_recipe("support.yaml")
    own = load_recipe("debug", ["data.source=jsonl", "data.options={align_share: 0.0, judge_clients: 0.0}"])
    own_data = own.data.model_copy(
        update={"path": InputFile(str(tmp_path / "together.jsonl")), "clients": None}
    )
    prepare(own_data, recipe.seed, tmp_path / "prepared")
    expected = run_bare_loop(recipe, tmp_path / "prepared", tmp_path / "one")
    result = FederationResult.read(run / "federation" / "result.json")
    assert {name: one.hash for name, one in result.adapters.items()} == expected.hashes
    own, one = ([step.without_seconds() for step in run.records] for run in (result, expected))
    assert own == one


def test_no_file_of_the_server_and_no_line_of_its_log_has_a_row_of_an_owner(ended):
    owners, run, output, _ = ended
    assert SECRET.search((owners.homes.parent / "north.jsonl").read_bytes())
    assert not SECRET.search(output.encode())
    files = [path for path in run.parents[1].rglob("*") if path.is_file()]
    assert {"owners.json", "mlflow.db", "report.html"} <= {path.name for path in files}
    assert [path for path in files if SECRET.search(content(path))] == []
    assert not (run / "prepared" / "pairs.parquet").exists()


def test_an_owner_repeats_its_last_job_and_a_deleted_run_is_forgotten(ended, monkeypatch):
    owners, run, *_ = ended
    homes = [owners.homes / name for name in OWNERS]
    assert "measure of north" in call("owner", "log", homes[0], "--last")
    assert "the same bytes" in call("owner", "replay", homes[0])
    monkeypatch.setenv("FED_RLHF_HOME", str(run.parents[1]))
    printed = call("delete", run, "--yes")
    assert [f"owner {name} has removed" in printed for name in OWNERS] == [True] * 3
    assert [list((home / "runs").iterdir()) for home in homes] == [[]] * 3
    assert all(Path(owners.homes.parent / f"{name}.jsonl").is_file() for name in OWNERS)


def test_owners_and_the_servers_flow_that_are_killed_at_five_moments_change_nothing(ended):
    owners, whole, _, results = ended
    folder = owners.homes.parent / "project" / "runs"
    settings = [f"runtime.sockets={owners.sockets}", "runtime.retries=9"]
    killed = None
    for moment in range(MOMENTS):
        process = serve(
            owners, *(["run", "support.yaml", *settings] if killed is None else ["resume", killed])
        )
        while not set(folder.glob("support-*")) - {whole}:  # the check before it asks the owners too
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        for _ in range(2):  # workers alone, then with the flow or, each other time, the flow alone
            found = workers(owners, process)
            assert found, process.communicate()[0]
            time.sleep(0.3 * moment)
            kill(found)
        found = workers(owners, process)
        process.kill()
        process.communicate()
        kill(found if moment % 2 else [])
        (killed,) = set(folder.glob("support-*")) - {whole}
    process = serve(owners, "resume", killed)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert read_results(killed) == results
