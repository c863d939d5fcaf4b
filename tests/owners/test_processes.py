"""Owners' processes: the same bytes as in one process, own rows alone, and what happens when they fail."""

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import stat
import threading
import time
from pathlib import Path

import psutil
import pytest
from datasets import Dataset
from typer.testing import CliRunner

from components.config import UserError
from components.data.records import read_pairs, read_rows
from components.federation.protocol import Failure, Job, Update
from components.federation.transport import Transport
from components.io import FullDiskError
from components.owners.codec import encode_answer
from components.owners.replay import replay
from components.owners.requests import Requests
from components.owners.sent_log import describe, read_log
from components.recipes import load_recipe
from flows.cli import app
from tasks import prefect_transport
from tasks.owner_processes import JobFailed, ResidentHost, owners_root
from tasks.prefect_transport import ProcessTransport
from tests.support.bare_loop import open_loop, run_bare_loop
from tests.support.crashes import folder_content
from tests.support.long_tier import with_examples
from tests.support.variants import SMALL, VARIANTS

pytestmark = pytest.mark.pipeline

FAULTY = [
    "runtime.transport=processes",
    "federation.postprocessors=[{kind: fault}]",
    "federation.clients_per_round=4",
]


class Processes(Transport):
    """Runs the jobs in owners' processes, one after the other."""

    def __init__(self, host, recipe, contexts):
        self.host, self.recipe, self.contexts = host, recipe, contexts
        self.owners = Requests(recipe, contexts)

    @classmethod
    def open(cls, recipe, contexts):
        raise NotImplementedError

    def run(self, jobs):
        return [self.host.ask(job, self.owners, self.contexts, self.recipe) for job in jobs]


@pytest.fixture
def prepared_run(prepared, tmp_path):
    """A run folder with the prepared data."""
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copytree(prepared, folder / "prepared")
    return folder


@pytest.mark.parametrize("variant", with_examples(VARIANTS, ("fedpdpo",)))
def test_rounds_in_owners_processes_have_the_bytes_of_rounds_in_one(
    variant, host, prepared, prepared_run, tmp_path, monkeypatch
):
    recipe = load_recipe("debug", [*SMALL, *VARIANTS[variant], "runtime.cpu_workers=2"])
    run_bare_loop(recipe, prepared, tmp_path / "one")
    monkeypatch.setattr(
        "components.federation.rounds.InProcessTransport",
        lambda recipe, contexts, trainers: Processes(host, recipe, contexts),
    )
    run_bare_loop(recipe, prepared_run / "prepared", prepared_run)
    one, several = folder_content(tmp_path / "one"), folder_content(prepared_run)
    assert server_part(several) == server_part(one)
    assert private_part(several) == private_part(one)


def server_part(content):
    """The federation's folder without the clients' own."""
    return {name: value for name, value in content.items() if name.startswith("federation/")}


def private_part(content):
    """The clients' private stores by their path within the folder of stores."""
    found = {}
    for name, value in content.items():
        _, inside, path = name.partition("federation-clients/")
        if inside and not path.endswith("lock"):
            found[path] = value
    return found


@pytest.fixture
def work(host, prepared_run):
    """A loop whose jobs meet the faults of the test, and a function that asks a client by its name."""
    loop = open_loop(load_recipe("debug", FAULTY), prepared_run / "prepared", prepared_run)
    jobs = {job.client: job for job in loop.bound.plan(loop.initial_state())}
    owners = Requests(loop.recipe, loop.contexts)

    def ask(client, **runtime) -> Job:
        recipe = loop.recipe.model_copy(update={"runtime": loop.recipe.runtime.model_copy(update=runtime)})
        sender = Requests(recipe, loop.contexts) if runtime else owners
        return host.ask(jobs[client], sender, loop.contexts, recipe)

    return loop, jobs, ask


def processes_of(host):
    """The owners' processes of a host."""
    return psutil.Process(host._process.pid).children()


def await_end(process, seconds=30):
    """Wait for the end of a process that is no child of this one, and may stay a zombie in a container."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.long
def test_an_owner_has_a_folder_of_its_own_with_its_own_rows(work):
    loop, _, ask = work
    ask("ada"), ask("bea")
    for client in ("ada", "bea"):
        home = owners_root(loop.contexts.federation) / client
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        (path,) = home.rglob("pairs.parquet")
        own = read_pairs(path)
        assert {row.client_id for row in own} == {client}
        assert own == read_pairs(loop.contexts.pairs, client)


@pytest.mark.long
def test_each_message_that_leaves_an_owner_is_in_its_log(work, faults):
    loop, jobs, ask = work
    faults.let("ada", "fail")
    with pytest.raises(JobFailed):
        ask("ada")
    update = ask("ada")
    home = owners_root(loop.contexts.federation) / "ada"
    failed, sent = read_log(home)
    assert failed.failure.startswith("ValueError (errors/")
    assert (sent.update, sent.client, sent.job, sent.when) == (update, "ada", jobs["ada"].key(), "round 1")
    store = loop.contexts.adapters
    message = encode_answer(update)
    assert sent.sha256 == hashlib.sha256(message).hexdigest()
    assert sent.bytes == len(message) + store.size(update.adapter)
    assert {name: one.norm for name, one in sent.tensors.items()} == pytest.approx(
        {name: float(tensor.double().norm()) for name, tensor in store.get(update.adapter).items()}
    )
    text = "\n".join(describe(sent, with_tensors=True))
    assert update.adapter[:12] in text
    assert all(name in text for name in sent.tensors)
    assert stat.S_IMODE((home / "sent.jsonl").stat().st_mode) == 0o600


@pytest.mark.long
def test_a_job_that_is_carried_out_again_has_the_bytes_that_were_sent_unless_the_rows_are_others(work):
    loop, jobs, ask = work
    ask("ada")
    home = owners_root(loop.contexts.federation) / "ada"
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert replay(home) == (jobs["ada"].key(), [])
    printed = CliRunner().invoke(app, ["owner", "replay", str(home), jobs["ada"].key()])
    assert (printed.exit_code, printed.stdout) == (0, f"job {jobs['ada'].key()}: the same bytes\n")
    printed = CliRunner().invoke(app, ["owner", "log", str(home), "--last"])
    assert "round 1: train of ada" in printed.stdout
    after = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert after == before, "nothing but a copy is changed"
    pairs = next(home.rglob("pairs.parquet"))
    rows = read_rows(pairs)
    for row in rows:
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    Dataset.from_list(rows).to_parquet(str(pairs))
    key, differences = replay(home, jobs["ada"].key())
    assert key == jobs["ada"].key()
    assert any(line.startswith("adapter: ") for line in differences)
    printed = CliRunner().invoke(app, ["owner", "replay", str(home)])
    assert (printed.exit_code, printed.stdout.splitlines()[-1]) == (1, f"job {key}: differs")
    with pytest.raises(UserError, match="has sent no update of a job other"):
        replay(home, "other")
    with pytest.raises(UserError, match=r"has no sent\.jsonl: give the home of an owner"):
        replay(home / "runs")


@pytest.mark.long
def test_the_error_of_a_job_stays_with_its_owner_and_the_process_goes_on(work, host, faults):
    loop, _, ask = work
    ask("bea")
    before = {process.pid for process in processes_of(host)}
    faults.let("bea", "fail")
    loop.contexts.adapters.root.parent.joinpath("updates").rename(loop.commits.folder / "away")
    shutil.rmtree(owners_root(loop.contexts.federation) / "bea" / "runs")
    with pytest.raises(JobFailed, match=r"^ValueError \(errors/\w+\.txt of its private store\)$"):
        ask("bea")
    (error,) = (owners_root(loop.contexts.federation) / "bea").rglob("errors/*.txt")
    assert "the text of a row" in error.read_text()
    assert {process.pid for process in processes_of(host)} == before
    assert ask("bea").client == "bea"


@pytest.mark.long
def test_a_process_that_is_killed_is_named_with_its_signal_and_another_one_goes_on(work, faults):
    loop, jobs, ask = work
    faults.let("ada", "kill")
    with pytest.raises(JobFailed, match=r"^its process ended by signal 9$"):
        ask("ada")
    update = ask("ada")
    assert update.model_dump(exclude={"metrics"}) == loop.run_job(jobs["ada"]).model_dump(exclude={"metrics"})


@pytest.mark.long
def test_a_job_that_hangs_is_ended_with_its_process(work, host, faults):
    _, _, ask = work
    ask("cyd")
    faults.let("dan", "hang")
    with pytest.raises(JobFailed, match=r"^no answer within 1.5 s \(runtime.client_timeout\)$"):
        ask("dan", client_timeout=1.5)
    assert all(process.is_running() for process in processes_of(host))
    assert ask("dan").client == "dan"


@pytest.mark.long
def test_a_stopped_process_is_ended_too(work, host, faults):
    """A worker that is suspended does not look at its clock."""
    _, _, ask = work
    ask("ada")
    faults.let("cyd", "hang")
    failed = []

    def wait():
        try:
            ask("cyd", client_timeout=3.0)
        except JobFailed as error:
            failed.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while (faults.folder / "cyd").exists():
        time.sleep(0.05)
    for process in processes_of(host):
        process.suspend()
    thread.join(60)
    assert failed == ["no answer within 3 s (runtime.client_timeout)"]


@pytest.mark.long
def test_as_many_processes_run_as_the_recipe_has_places_and_none_after_a_release(work, host):
    _, _, ask = work
    for client in ("ada", "bea", "cyd", "dan"):
        ask(client, cpu_workers=2)
        assert len(processes_of(host)) <= 2
    host.release()
    assert processes_of(host) == []
    assert ask("ada", cpu_workers=2).client == "ada"


@pytest.mark.long
def test_a_host_that_is_killed_takes_its_processes_with_it_and_is_started_again(work, host, faults):
    """A process that lived on would hold the lock of its owner's folder, for which the next one waits."""
    _, _, ask = work
    faults.let("bea", "hang")
    failed = []

    def wait():
        try:
            ask("bea")
        except JobFailed as error:
            failed.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while (faults.folder / "bea").exists():
        time.sleep(0.05)
    (worker,) = processes_of(host)
    os.kill(host._process.pid, signal.SIGKILL)
    thread.join(60)
    assert failed == ["the host of its process ended"]
    await_end(worker)
    assert ask("bea").client == "bea"


@pytest.mark.long
def test_a_full_disk_at_a_simulated_owner_ends_the_step(work, faults):
    _, _, ask = work
    faults.let("dan", "full")
    with pytest.raises(FullDiskError, match="no space is left for .*owners/dan"):
        ask("dan")


@pytest.mark.long
def test_a_connection_that_sends_nothing_and_one_that_is_closed_delay_no_other(work, host):
    _, _, ask = work
    ask("ada")
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as closed:
        silent.connect(host._address)
        closed.connect(host._address)
        closed.close()
        assert ask("bea", client_timeout=20.0).client == "bea"


@pytest.mark.long
def test_a_host_removes_the_folder_of_its_socket_when_it_ends(work, faults):
    loop, jobs, _ = work
    own = ResidentHost()
    own.ask(jobs["ada"], Requests(loop.recipe, loop.contexts), loop.contexts, loop.recipe)
    folder = Path(own._address).parent
    assert folder.is_dir()
    own.end()
    assert not folder.exists()


@pytest.mark.long
def test_prefects_retry_asks_the_owners_without_an_answer_and_one_that_hangs_is_left_out(
    prefect_session, work, host, faults, monkeypatch
):
    from prefect import flow

    loop, jobs, _ = work
    monkeypatch.setattr(prefect_transport, "HOST", host)
    runtime = loop.recipe.runtime.model_copy(update={"retries": 1, "client_timeout": 2.0, "cpu_workers": 2})
    recipe = loop.recipe.model_copy(update={"runtime": runtime})
    faults.let("ada", "kill")
    faults.let("bea", "hang")
    faults.let("cyd", "hang", times=2)
    transport = ProcessTransport.open(recipe, loop.contexts)
    answers = flow(lambda: transport.run(list(jobs.values())), name="step")()
    assert [type(answer) for answer in answers] == [Update, Update, Failure, Update]
    assert answers[2] == Failure("cyd", "no answer within 2 s (runtime.client_timeout)")
    transport.close()
    assert processes_of(host) == []
