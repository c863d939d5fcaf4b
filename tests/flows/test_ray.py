"""Clients on a Ray cluster: the same bytes as on threads, also when a process of the cluster is killed."""

import os
import secrets
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
from components.recipes import load_recipe
from infra.servers import free_port
from tasks import ray_cluster, ray_tasks
from tasks.devices import describe_places, release_pool
from tasks.ray_nodes import PREFIX
from tasks.runs import create_run
from tests.support.ray_node import Node

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed"),
]

needs_a_namespace = pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="no mount namespace of the test's own is allowed",
)
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


def end(node):
    """End a node, and disconnect this process from its cluster."""
    shutdown()
    node.end()


@pytest.fixture(scope="module")
def head(token):
    head = Node()
    yield head
    end(head)


@pytest.fixture(scope="module")
def place(new_workplace):
    return new_workplace("ray")


@pytest.fixture(scope="module")
def blind_head(token, place):
    """A cluster whose node does not see the run folders of the place."""
    shutdown()
    place.runs.mkdir(exist_ok=True)
    head = Node(hidden=place.runs)
    yield head
    end(head)


@pytest.fixture(scope="module")
def on_threads(place):
    return place.run(*SELECTORS)


@pytest.fixture(scope="module")
def private_on_threads(place):
    return place.run(*PRIVATE)


def on_ray(head):
    return ["runtime.task_runner=ray", f"runtime.ray_address={head.address}"]


def private_files(run):
    """The private stores of a run's clients: contents and modes by path."""
    root = run.folder / "federation-clients"
    files = {
        str(path.relative_to(root)): (path.stat().st_mode, path.is_file() and path.read_bytes())
        for path in root.rglob("*")
    }
    assert files
    return files


def assert_same_results(one, other):
    for name in ("federation/result.json", "alignment/result.json", "evaluation/result.json"):
        assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes(), name
    assert one.hashes == other.hashes


def test_selectors_of_clients_on_ray_have_the_bytes_of_clients_on_threads(place, head, on_threads):
    assert_same_results(place.run(*SELECTORS, *on_ray(head)), on_threads)


def test_private_modules_of_clients_on_ray_have_the_bytes_of_clients_on_threads(
    place, head, private_on_threads
):
    run = place.run(*PRIVATE, *on_ray(head))
    assert_same_results(run, private_on_threads)
    assert private_files(run) == private_files(private_on_threads)


@needs_a_namespace
def test_selectors_on_nodes_that_do_not_see_the_run_folder_have_the_bytes_of_threads(
    place, blind_head, on_threads
):
    assert_same_results(place.run(*SELECTORS, *on_ray(blind_head)), on_threads)


@needs_a_namespace
def test_clients_on_nodes_that_do_not_see_the_run_folder_are_sent_its_files(
    place, blind_head, private_on_threads
):
    before = set(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    run = place.run(*PRIVATE, *on_ray(blind_head))
    assert_same_results(run, private_on_threads)
    assert private_files(run) == private_files(private_on_threads)
    assert not set(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")) - before


@pytest.fixture
def strike(place):
    """Calls a function once, in the second round of the next run, when a node works on a shard."""
    ended = threading.Event()
    threads = []

    def wait_for(node, act):
        before = {path.name for path in place.runs.glob("*")}
        while not ended.wait(0.05):
            new = [path for path in place.runs.glob("*") if path.name not in before]
            if new and (new[0] / "federation" / "commits" / "00001.json").is_file() and node.workers():
                act(node)
                struck.append(node)
                return

    struck = []

    def start(node, act):
        threads.append(threading.Thread(target=wait_for, args=(node, act)))
        threads[-1].start()
        return struck

    yield start
    ended.set()
    for thread in threads:
        thread.join()


def test_a_round_in_which_a_process_of_the_cluster_is_killed_is_repeated(place, head, on_threads, strike):
    struck = strike(head, lambda node: node.workers()[0].kill())
    run = place.run(*SELECTORS, *on_ray(head))
    assert struck
    assert_same_results(run, on_threads)


def test_a_round_in_which_a_node_is_lost_is_repeated_on_the_others(place, head, on_threads, strike):
    node = Node(head=head)
    try:
        struck = strike(node, Node.kill)
        run = place.run("federation.clients_per_round=4", *SELECTORS, *on_ray(head))
        assert struck
    finally:
        end(node)
    assert_same_results(run, place.run("federation.clients_per_round=4", *SELECTORS))


def test_a_node_that_ray_does_not_yet_know_to_be_lost_is_left_out(head, prefect_session):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    shutdown()
    ray_cluster.connect(RuntimeConfig(task_runner="ray", ray_address=head.address))
    node = Node(head=head)
    try:
        nodes = ray_cluster.living_nodes()
        assert ray_cluster.sees(Path(__file__))
        node.kill()
        assert ray_cluster.living_nodes() == nodes
        with temporary_settings({PREFECT_API_URL: prefect_session}):
            ray_cluster.require_prefect_api(head.address)
        assert len(ray_cluster.living_nodes()) == len(nodes) - 1
        assert ray_cluster.sees(Path(__file__).with_name("test_api.py"))
    finally:
        node.end()


def test_a_run_that_is_killed_on_a_cluster_is_resumed_there(new_workplace, head, on_threads):
    shutdown()
    place = new_workplace("killed on ray")
    killed = place.kill_when(lambda run: run.commits >= 2, *SELECTORS, *on_ray(head))
    assert not (killed.folder / "federation" / "result.json").exists()
    resumed = place.resume(killed)
    assert "resuming after round" in resumed.output
    assert_same_results(resumed, on_threads)


HANGING_CLIENT = """
import time

from components.federation.postprocessing import PostProcessor


class Hanging(PostProcessor):
    kind: str = "hanging"

    def at_client(self, result, context):
        if context.round == 1 and context.client == context.participants[0]:
            time.sleep(1000)
        return result
"""


@pytest.fixture
def hanging_client(tmp_path, monkeypatch):
    """The setting with which a client hangs in the second round, by a package of its own."""
    (tmp_path / "hanging.py").write_text(HANGING_CLIENT)
    (tmp_path / "hanging-1.dist-info").mkdir()
    (tmp_path / "hanging-1.dist-info" / "METADATA").write_text("Name: hanging\nVersion: 1\n")
    entry = "[fed_rlhf.postprocessors]\nhanging = hanging:Hanging\n"
    (tmp_path / "hanging-1.dist-info" / "entry_points.txt").write_text(entry)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "federation.postprocessors=[{kind: hanging}]"


@pytest.mark.parametrize("is_hidden", [False, pytest.param(True, marks=needs_a_namespace)])
def test_sigterm_ends_a_run_whose_clients_work_on_a_cluster(new_workplace, token, hanging_client, is_hidden):
    shutdown()
    place = new_workplace("stopped on ray")
    place.runs.mkdir()
    head = Node(hidden=place.runs if is_hidden else None)
    settings = [*SELECTORS, hanging_client, *on_ray(head)]
    try:
        stopped = place.kill_when(lambda run: run.commits >= 1, *settings, wait=6, number=signal.SIGTERM)
    finally:
        end(head)
    assert "Stopped after round" in stopped.output
    assert not (stopped.folder / "federation" / "result.json").exists()


def test_a_client_that_no_node_has_the_cores_for_is_refused(head):
    shutdown()
    settings = [*on_ray(head), "runtime.torch_threads=8", "runtime.cpu_workers=2"]
    reason = r"a client has 4 threads .*, but the largest node of Ray offers 2 cores"
    with pytest.raises(RecipeError, match=reason):
        describe_places(load_recipe("debug", settings))


def test_a_run_without_an_address_joins_no_other_ray(head, tmp_path, monkeypatch):
    import ray

    shutdown()
    monkeypatch.setenv("RAY_ADDRESS", head.address)
    ray_cluster.connect(RuntimeConfig(task_runner="ray"))
    try:
        addresses = set(ray_cluster.living_nodes())
    finally:
        ray.shutdown()
    monkeypatch.delenv("RAY_ADDRESS")
    ray_cluster.connect(RuntimeConfig(task_runner="ray", ray_address=head.address))
    assert addresses.isdisjoint(ray_cluster.living_nodes())


def test_a_cluster_that_does_not_answer_is_named(token):
    shutdown()
    runtime = RuntimeConfig(task_runner="ray", ray_address=f"127.0.0.1:{free_port()}")
    with pytest.raises(RecipeError, match=rf"ray_address is {runtime.ray_address}, but no Ray .* answers"):
        ray_cluster.connect(runtime)


def test_nodes_that_do_not_reach_the_prefect_server_are_named(head, prefect_session):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    shutdown()
    ray_cluster.connect(RuntimeConfig(task_runner="ray", ray_address=head.address))
    with temporary_settings({PREFECT_API_URL: prefect_session}):
        ray_cluster.require_prefect_api(head.address)
    url = f"http://user:secret@127.0.0.1:{free_port()}/api"
    reason = r"its nodes [\d.]+ do not have .* reach the Prefect server .* \(http://127.0.0.1:\d+/api\): set"
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(RecipeError, match=reason):
        ray_cluster.require_prefect_api(head.address)


def test_a_check_says_how_many_clients_work_at_a_time_on_the_cluster(head):
    settings = [*on_ray(head), "federation.clients_per_round=3", "runtime.torch_threads=1"]
    shutdown()
    clients, where = describe_places(load_recipe("debug", settings))
    assert clients == 2
    assert where == f"Ray {head.address} (1 node, 2 cores), with 1 core each"


@pytest.mark.parametrize(
    ("visible", "inside"), [("4,5,6,7", "5,7"), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-b,GPU-d"), (None, "1,3")]
)
def test_a_ray_that_starts_here_has_the_gpus_of_the_recipe_alone(monkeypatch, visible, inside):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with ray_cluster._visible(["cuda:1", "cuda:3"]):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == inside
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


@pytest.fixture(scope="module")
def gpu_head(token):
    """A cluster of two GPUs that Ray is told of."""
    shutdown()
    head = Node("--num-gpus=2")
    yield head
    end(head)


@pytest.fixture
def gpus(gpu_head):
    """A function that runs a task on each GPU of the cluster twice."""
    from prefect import flow, task

    shutdown()
    runtime = RuntimeConfig(task_runner="ray", ray_address=gpu_head.address)

    @task
    def where(seconds):
        from tasks.devices import POOL

        time.sleep(seconds)
        with POOL.borrow_model(runtime, "a model", lambda device: time.monotonic_ns()) as model:
            return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"], model

    @flow
    def ask(seconds):
        calls = [{"seconds": seconds * n} for n in (6, 1, 1, 6)]
        return [future.result() for future in ray_tasks.map_task(where, calls, runtime)]

    def run(seconds=0.1):
        return ask.with_options(task_runner=ray_cluster.task_runner(runtime))(seconds)

    yield run
    shutdown()


def test_a_gpu_has_one_process_which_keeps_its_model_until_it_is_released(gpus, prefect_session):
    first, second, *others = [*gpus(), *gpus()]
    assert others == [first, second] * 3
    assert {first[1], second[1]} == {"0", "1"}
    assert first[0] != second[0]
    ray_tasks.call_in_processes(release_pool)
    again = gpus()[0]
    assert again[:2] == first[:2]
    assert again[2] != first[2]


def test_the_process_that_follows_a_lost_one_has_its_gpu(gpus, prefect_session):
    (first, gpu, _), (second, *_), *_ = gpus()
    os.kill(first, signal.SIGKILL)
    (other, same, _), (kept, *_), *_ = gpus()
    assert (other != first, same, kept) == (True, gpu, second)


def test_another_run_does_not_get_the_gpus_of_this_one(gpus, prefect_session):
    gpus()
    code = (
        "from components.config.runtime import RuntimeConfig as R; from tasks import ray_cluster, ray_tasks\n"
        f"r = R(task_runner='ray', ray_address='{ray_cluster.CONNECTED[0]}')\n"
        "ray_cluster.connect(r); ray_tasks.max_tasks(r)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "RecipeError: no GPU of the Ray cluster is free" in done.stderr


def test_the_gpus_of_a_lost_node_are_replaced_by_those_of_the_others(gpus, gpu_head, prefect_session):
    gpus()
    shutdown()
    node = Node("--num-gpus=1", head=gpu_head)
    try:
        before = {process for process, *_ in gpus()}
        assert ray_tasks.reserve_gpus().count == len(before) == 3
        threading.Timer(3, node.kill).start()
        answers = gpus(seconds=2)
        assert len(answers) == 4
        assert ray_tasks.reserve_gpus().count == 2
        answers = gpus()
        assert {gpu for _, gpu, _ in answers} == {"0", "1"}
        assert before.isdisjoint(process for process, *_ in answers)
        assert not any(map(psutil.pid_exists, before))  # they would keep models on these GPUs
    finally:
        node.end()


def test_a_run_that_has_lost_all_gpus_does_not_go_on_without(token, prefect_session):
    shutdown()
    head = Node()
    node = Node("--num-gpus=1", head=head)
    try:
        ray_cluster.connect(runtime := RuntimeConfig(task_runner="ray", ray_address=head.address))
        assert ray_tasks.max_tasks(runtime) == 1
        node.kill()
        while len(ray_cluster.living_nodes()) > 1:
            time.sleep(0.2)
        with pytest.raises(RecipeError, match="no GPU of the Ray cluster is free"):
            ray_tasks.max_tasks(runtime)
        with pytest.raises(RecipeError, match="no GPU of the Ray cluster is free"):
            ray_tasks.max_tasks(runtime)
    finally:
        node.end()
        end(head)


@pytest.mark.parametrize("settings", [["runtime.task_runner=ray"], []])
def test_a_stage_of_dvc_that_grows_no_trees_runs_on_ray_too(new_workplace, token, settings):
    from flows.stages import run_stage

    shutdown()
    place = new_workplace("stage")
    create_run(load_recipe("debug", settings), place.runs / "run")
    place.call(lambda: run_stage("grow_trees", str(place.runs / "run")))
    assert (place.runs / "run" / "trees" / "done").is_file()
