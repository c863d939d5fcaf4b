"""Clients on a Ray cluster: the same bytes as on threads, also when a process of the cluster is killed."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from components.config import RecipeError
from components.config.runtime import RuntimeConfig
from infra.servers import free_port
from tasks import ray_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed"),
]

SELECTORS = ["federation.rounds=3"]
PRIVATE = ["federation.method=fedper", "federation.options={shared_layers: 1}", "federation.rounds=2"]


@pytest.fixture(scope="module")
def token():
    """The file of a token of the tests' own, which all clusters and clients here use.

    Ray reads the variables when it is imported.
    """
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "token"
        path.write_text(secrets.token_hex(32))
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield path


def shutdown():
    """Disconnect this process from its cluster."""
    import ray

    ray.shutdown()


class Head:
    """A Ray of one node with two cores, ended by its process id."""

    def __init__(self, token, *options):
        self.folder = Path(tempfile.mkdtemp(prefix="ray-head-"))  # short: it has sockets in it
        self.address = f"127.0.0.1:{free_port()}"
        command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus=2"]
        command += ["--include-dashboard=false", "--node-ip-address=127.0.0.1", f"--temp-dir={self.folder}"]
        command += [f"--port={self.address.rpartition(':')[2]}", *options]
        self.log = self.folder.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)

    def workers(self):
        """Its processes that run a task of a shard now."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in children if one.is_running() and "run_shard" in " ".join(one.cmdline())]

    def end(self):
        shutdown()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.log.unlink()


@pytest.fixture(scope="module")
def head(token):
    head = Head(token)
    yield head
    head.end()


@pytest.fixture(scope="module")
def place(new_workplace):
    return new_workplace("ray")


@pytest.fixture(scope="module")
def on_threads(place):
    return place.run(*SELECTORS)


def on_ray(head):
    return ["runtime.task_runner=ray", f"runtime.ray_address={head.address}"]


def assert_same_results(one, other):
    for name in ("federation/result.json", "alignment/result.json", "evaluation/result.json"):
        assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes(), name
    assert one.hashes == other.hashes


def test_selectors_of_clients_on_ray_have_the_bytes_of_clients_on_threads(place, head, on_threads):
    assert_same_results(place.run(*SELECTORS, *on_ray(head)), on_threads)


def test_private_modules_of_clients_on_ray_have_the_bytes_of_clients_on_threads(place, head):
    threads, cluster = place.run(*PRIVATE), place.run(*PRIVATE, *on_ray(head))
    assert_same_results(cluster, threads)
    stores = [run.folder / "federation-clients" for run in (threads, cluster)]
    files = [sorted(path.relative_to(store) for path in store.rglob("*.*")) for store in stores]
    assert files[0] == files[1]
    assert files[0]
    assert all((stores[0] / name).read_bytes() == (stores[1] / name).read_bytes() for name in files[0])


def test_a_round_in_which_a_process_of_the_cluster_is_killed_is_repeated(place, head, on_threads):
    killed = []
    ended = threading.Event()

    def kill_a_worker():
        before = {path.name for path in place.runs.glob("*")}
        while not ended.wait(0.05):
            new = [path for path in place.runs.glob("*") if path.name not in before]
            if new and (new[0] / "federation" / "commits" / "00001.json").is_file() and head.workers():
                worker = head.workers()[0]
                worker.kill()
                killed.append(worker.pid)
                return

    killer = threading.Thread(target=kill_a_worker)
    killer.start()
    try:
        run = place.run(*SELECTORS, *on_ray(head))
    finally:
        ended.set()
        killer.join()
    assert killed
    assert_same_results(run, on_threads)


def test_a_cluster_that_does_not_answer_is_named(token):
    shutdown()
    runtime = RuntimeConfig(task_runner="ray", ray_address=f"127.0.0.1:{free_port()}")
    with pytest.raises(RecipeError, match=rf"ray_address is {runtime.ray_address}, but no Ray .* answers"):
        ray_cluster.connect(runtime)


def test_a_process_of_the_cluster_serves_several_tasks_that_ask_for_a_gpu(token, prefect_session):
    from prefect import flow, task

    shutdown()
    head = Head(token, "--num-gpus=1")
    runtime = RuntimeConfig(task_runner="ray", ray_address=head.address)

    @task
    def process_of_task(number):
        import torch

        return os.getpid(), number, torch.cuda.is_available()

    @flow
    def ask():
        answers = []
        for _ in range(2):
            with ray_cluster.placement(runtime):
                answers += process_of_task.map([1, 2]).result()
        return answers

    try:
        runner = ray_cluster.connect(runtime)
        assert ray_cluster.requested(runtime) == {"num_gpus": 1}
        assert ray_cluster.max_tasks(runtime) == 1
        answers = ask.with_options(task_runner=runner)()
        assert len(answers) == 4
        assert len({process for process, *_ in answers}) == 1
    finally:
        head.end()
