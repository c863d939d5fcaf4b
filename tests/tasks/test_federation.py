"""Clients as tasks, which are retried and then left out, and the device pool."""

import logging
import pickle
import shutil
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from components.config import RecipeError, UserError
from components.data.records import Pair, read_pairs
from components.environment import available_cores
from components.evaluation.accuracy import count_evenly, count_uniformly
from components.federation.clients.context import ClientContexts
from components.federation.clients.trainer import ClientResult
from components.federation.clients.worker import build_trainer
from components.federation.commits import Commits
from components.federation.outcome import measure_jobs
from components.federation.protocol import Failure, TrainJob, Update, build_federation
from components.federation.transport import InProcessTransport
from components.io import FullDiskError
from components.learning.selector_training import score_pairs
from components.models.store import AdapterStore
from components.recipes import load_recipe
from components.results import Metrics, Outcome
from tasks import devices, federation, prefect_transport, ray_cluster, ray_tasks
from tasks.devices import DevicePool, choose_workers
from tasks.federation import evaluate_state, measure_accuracy, open_commits
from tasks.prefect_transport import (
    ClientsFailed,
    PrefectTransport,
    ShardAnswer,
    ThisProcess,
    close_exchange,
    collect_answers,
    exchange_contexts,
    rounds_contexts,
)
from tasks.runs import Run, create_run
from tests.support.bound_methods import bind
from tests.support.recipes import with_section

START = {"a": torch.zeros(3)}


class FragileTrainer:
    """A trainer that adds one, and fails for a client as often as the test says.

    Attributes:
        failures: number of failures that are left, by client.
        failure: what is raised then.
        calls: the clients, in the order of their jobs.
    """

    def __init__(self):
        self.failures = Counter()
        self.failure = RuntimeError("the device lost a client")
        self.calls = []
        self.model = torch.nn.Linear(1, 1)

    def run(self, job, context):
        self.calls.append(job.client)
        if self.failures[job.client] > 0:
            self.failures[job.client] -= 1
            raise self.failure
        tensors = {name: tensor + 1 for name, tensor in context.load_adapter(job.adapter).items()}
        return ClientResult(tensors=tensors, rows=1, metrics=Metrics(scalars={"loss": 1.0}))


@pytest.fixture
def fragile(monkeypatch):
    trainer = FragileTrainer()
    monkeypatch.setattr(devices, "build_trainer", lambda *_: trainer)
    monkeypatch.setattr(prefect_transport, "POOL", DevicePool())
    return trainer


@pytest.fixture
def store(tmp_path):
    return AdapterStore(tmp_path / "federation" / "adapters")


def train_jobs(store, *names):
    digest = store.put(START)
    return [
        TrainJob(client=name, round=0, seed=seed, adapter_name="selector", adapters=(digest,))
        for seed, name in enumerate(names)
    ]


@pytest.fixture
def run(debug, prepared, store):
    """Runs a shard with the debug recipe."""
    contexts = ClientContexts(store, prepared / "pairs.parquet")
    return lambda shard: ThisProcess(contexts).run(shard, debug).updates


def test_a_shard_gives_an_update_for_each_client_by_its_hash(fragile, run, store):
    updates = run(train_jobs(store, "ada", "bea"))
    assert [update.client for update in updates] == ["ada", "bea"]
    assert fragile.calls == ["ada", "bea"]
    assert all(torch.equal(store.get(update.adapter)["a"], torch.ones(3)) for update in updates)


def test_a_client_that_fails_does_not_stop_the_others_of_its_shard(fragile, run, store):
    fragile.failures["bea"] = 1
    with pytest.raises(ClientsFailed, match=r"client bea: RuntimeError \(errors/\w{8}\.txt") as error:
        run(train_jobs(store, "ada", "bea", "cyd"))
    assert list(error.value.reasons) == ["bea"]
    assert fragile.calls == ["ada", "bea", "cyd"]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_the_text_of_a_clients_error_stays_in_its_private_store(fragile, run, store, error, monkeypatch):
    def fail(job, context):
        raise error(f"a row of {job.client}")

    monkeypatch.setattr(fragile, "run", fail)
    with pytest.raises(ClientsFailed) as failed:
        run(train_jobs(store, "ada"))
    assert "a row" not in str(failed.value)
    (kept,) = (store.root.parents[1] / "federation-clients" / "ada" / "errors").iterdir()
    assert failed.value.reasons == {"ada": f"{error.__name__} (errors/{kept.name} of its private store)"}
    assert f"{error.__name__}: a row of ada" in kept.read_text()
    assert "Traceback" in kept.read_text()


ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


class Ended(BaseException):
    """In place of the end of the process."""


@pytest.fixture
def ended(monkeypatch):
    """The process has a GPU of Ray whose context is broken; os._exit raises Ended."""

    def fail(error):
        raise error

    monkeypatch.setenv(ray_tasks.GPU_VARIABLE, "group/0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fail(ILLEGAL))
    monkeypatch.setattr("prefect.get_run_logger", logging.getLogger)
    monkeypatch.setattr(ray_tasks.os, "_exit", lambda status: fail(Ended(status)))


def test_a_process_of_ray_ends_at_a_clients_error_after_which_its_gpu_does_not_answer(
    ended, fragile, run, store, monkeypatch, caplog
):
    monkeypatch.setattr(fragile, "failure", ILLEGAL)
    fragile.failures["bea"] = 1
    with pytest.raises(Ended):
        run(train_jobs(store, "ada", "bea", "cyd"))
    assert fragile.calls == ["ada", "bea"]
    assert "cannot use its GPU any more: CUDA error: an illegal memory access" in caplog.text
    (kept,) = (store.root.parents[1] / "federation-clients" / "bea" / "errors").iterdir()
    assert "illegal memory access" in kept.read_text()
    assert [update.client for update in run(train_jobs(store, "ada", "bea"))] == ["ada", "bea"]
    assert fragile.calls == ["ada", "bea", "bea"]


def test_a_process_of_ray_ends_at_an_error_of_the_servers_work_in_the_same_way(ended, debug):
    with pytest.raises(Ended), DevicePool().borrow(debug.runtime):
        raise ILLEGAL


@pytest.mark.parametrize("missing", ["GPU", "broken context", "CUDA"])
def test_a_process_whose_gpu_answers_or_that_has_none_stays_after_an_error(
    missing, ended, fragile, run, store, monkeypatch
):
    if missing == "GPU":
        monkeypatch.delenv(ray_tasks.GPU_VARIABLE)
    if missing == "broken context":
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    if missing == "CUDA":
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(fragile, "failure", ILLEGAL)
    fragile.failures["ada"] = 1
    with pytest.raises(ClientsFailed):
        run(train_jobs(store, "ada", "bea"))
    assert fragile.calls == ["ada", "bea"]


def test_a_retry_repeats_only_the_client_that_failed(fragile, run, store):
    fragile.failures["bea"] = 1
    with pytest.raises(ClientsFailed):
        run(train_jobs(store, "ada", "bea", "cyd"))
    updates = run(train_jobs(store, "ada", "bea", "cyd"))
    assert [update.client for update in updates] == ["ada", "bea", "cyd"]
    assert Counter(fragile.calls) == {"ada": 1, "bea": 2, "cyd": 1}


def test_a_failure_of_the_whole_task_leaves_every_device_free(fragile, debug, run, store, monkeypatch):
    def fail(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(devices, "build_trainer", fail)
    for _ in range(2):
        with pytest.raises(MemoryError):
            run(train_jobs(store, "ada"))
    with prefect_transport.POOL.borrow(debug.runtime) as device:
        assert device == "cpu"


def test_a_full_disk_ends_the_round_and_leaves_no_client_out(fragile, run, store, monkeypatch):
    full = FullDiskError(28, "no space is left for /x: free some, and resume the run")
    monkeypatch.setattr(prefect_transport, "run_job", mock.Mock(side_effect=full))
    with pytest.raises(FullDiskError) as error:
        run(train_jobs(store, "ada"))
    with pytest.raises(FullDiskError, match="no space is left"):
        collect_answers([FinishedFuture(error=error.value)], [train_jobs(store, "ada")], store)


def test_the_failure_of_clients_travels_between_processes():
    failed = ClientsFailed({"ada": "RuntimeError (errors/1)", "bea": "no answer"}, {"path": b"bytes"})
    received = pickle.loads(pickle.dumps(failed))
    assert str(received) == "client ada: RuntimeError (errors/1); client bea: no answer"
    assert (received.reasons, received.written) == (failed.reasons, {"path": b"bytes"})


@dataclass(frozen=True)
class FinishedFuture:
    """A future of a task that has ended, with its result or its error."""

    value: object = None
    error: Exception | None = None
    name: str = "Failed"

    @property
    def state(self):
        return SimpleNamespace(
            is_completed=lambda: self.error is None, name=self.name, message=str(self.error)
        )

    def wait(self):
        pass

    def result(self, raise_on_failure=True):
        return self.error or self.value


def test_of_a_shard_that_failed_the_clients_that_finished_still_count(fragile, run, store):
    fragile.failures["bea"] = 9
    first = train_jobs(store, "ada", "bea", "cyd")
    second = train_jobs(store, "dan")
    with pytest.raises(ClientsFailed) as error:
        run(first)
    futures = [FinishedFuture(error=error.value), FinishedFuture(ShardAnswer(run(second)))]
    ada, bea, cyd, dan = collect_answers(futures, [first, second], store)
    assert bea == Failure("bea", error.value.reasons["bea"])
    for update, name in ((ada, "ada"), (cyd, "cyd"), (dan, "dan")):
        assert isinstance(update, Update)
        assert update.client == name


def test_the_reason_of_a_shard_whose_process_died_is_that_of_prefect(fragile, store):
    crashed = FinishedFuture(error=RuntimeError("worker lost"), name="Crashed")
    (answer,) = collect_answers([crashed], [train_jobs(store, "ada")], store)
    assert answer == Failure("ada", "Crashed: worker lost")


@pytest.mark.parametrize("size", [1, 2])
def test_prefect_retries_a_client_that_fails_and_the_round_continues_without_it(
    prefect_session, fragile, prepared, tmp_path, size
):
    from prefect import flow
    from prefect.task_runners import ThreadPoolTaskRunner

    fragile.failures.update({"ada": 1, "cyd": 99})
    settings = [f"federation.clients_per_task={size}", "runtime.retries=1"]
    recipe = load_recipe("debug", ["federation.clients_per_round=4", *settings])
    commits = Commits(tmp_path / "federation", "test")
    counts = {name: {"train": 1, "validation": 0, "test": 0} for name in ("ada", "bea", "cyd", "dan")}
    bound = bind(recipe.federation, commits.store)
    state = bound.start(build_federation(counts, commits.store.put(START), 4), 0)

    @flow(task_runner=ThreadPoolTaskRunner(max_workers=2))
    def one_round():
        jobs = bound.plan(state)
        contexts = ClientContexts(commits.store, prepared / "pairs.parquet")
        answers = PrefectTransport(recipe, contexts).run(jobs)
        return bound.close_step(state, jobs, answers, 0.5, commits)

    new, record = one_round()
    assert Counter(fragile.calls) == {"ada": 2, "bea": 1, "cyd": 2, "dan": 1}
    assert list(record.failed) == ["cyd"]
    assert record.failed["cyd"].startswith("RuntimeError (errors/")
    assert sorted(record.clients) == ["ada", "bea", "dan"]
    assert commits.latest(bound.memory_type)[0] == new
    assert torch.equal(commits.store.get(new.adapters["selector"])["a"], torch.ones(3))


# --- the device pool


def on_devices(recipe, *names):
    return with_section(recipe, "runtime", devices=list(names))


def on_cpu(recipe, workers, threads=None):
    return with_section(recipe, "runtime", devices=["cpu"], cpu_workers=workers, torch_threads=threads)


@dataclass
class Lending:
    """How many tasks have held each device at the same time."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    held: Counter = field(default_factory=Counter)
    largest_total: int = 0
    largest_per_device: int = 0
    all_lent: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def hold(self, device):
        with self.lock:
            self.held[device] += 1
            self.largest_total = max(self.largest_total, self.held.total())
            self.largest_per_device = max(self.largest_per_device, self.held[device])
            if self.held.total() == 3:
                self.all_lent.set()
        yield
        with self.lock:
            self.held[device] -= 1


def test_a_device_is_lent_to_one_task_at_a_time_and_all_devices_are_used(debug):
    pool = DevicePool()
    recipe = on_devices(debug, "one", "two", "three")
    lending = Lending()

    def borrow_often():
        for _ in range(5):
            with pool.borrow(recipe.runtime) as device, lending.hold(device):
                lending.all_lent.wait(60)
                time.sleep(0.002)

    threads = [threading.Thread(target=borrow_often) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lending.largest_per_device == 1
    assert lending.largest_total == 3
    assert set(lending.held) == {"one", "two", "three"}


def test_a_task_that_fails_returns_its_device(debug):
    pool = DevicePool()
    runtime = on_devices(debug, "one").runtime
    for _ in range(3):
        with pytest.raises(ValueError, match="broken"), pool.borrow(runtime):
            raise ValueError("broken")
    with pool.borrow(runtime) as device:
        assert device == "one"


@pytest.fixture
def thread_counts(monkeypatch):
    """The numbers of threads that were set."""
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    return counts


@pytest.fixture
def built(monkeypatch):
    """Devices of the trainers that were built; a trainer has a model without dropout."""
    names = []

    def build(recipe, device, name):
        names.append(device)
        return SimpleNamespace(device=device, model=torch.nn.Linear(1, 1))

    monkeypatch.setattr(devices, "build_trainer", build)
    return names


def test_the_cpu_is_lent_to_as_many_tasks_as_the_recipe_says_with_an_even_share_of_its_threads(
    debug, built, thread_counts
):
    recipe = on_cpu(debug, workers=2, threads=4)
    pool = DevicePool()
    with (
        pool.borrow_trainer(recipe, mapped=True) as first,
        pool.borrow_trainer(recipe, mapped=True) as second,
    ):
        assert first is not second
        assert first.device == "cpu"
        assert second.device == "cpu"
    with pool.borrow_trainer(recipe) as alone, pool.borrow(recipe.runtime) as device:
        assert alone in (first, second)
        assert device == "cpu"
    assert thread_counts == [2, 2, 4, 4]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_lent_device_computes_with_the_recipes_threads(debug, thread_counts, threads):
    with DevicePool().borrow(with_section(debug, "runtime", torch_threads=threads).runtime):
        assert thread_counts == [threads]


def test_a_lent_device_computes_with_all_cores_by_default(debug, thread_counts):
    with DevicePool().borrow(with_section(debug, "runtime", torch_threads=None).runtime):
        assert thread_counts == [available_cores()]
    assert available_cores() >= 1


def attention_with_dropout():
    attention = torch.nn.Linear(1, 1)
    attention.attention_dropout = 0.1
    return attention


@pytest.fixture(params=[lambda: torch.nn.Dropout(0.1), attention_with_dropout], ids=["layer", "attention"])
def dropout_model(request, monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), request.param())
    monkeypatch.setattr(devices, "build_trainer", lambda *_: SimpleNamespace(model=model))
    return model


def test_dropout_is_refused_for_concurrent_clients_on_the_cpu_and_for_no_others(debug, dropout_model):
    with (
        pytest.raises(RecipeError, match=r"runtime.cpu_workers is 2.*dropout \(1\).*set lora.dropout to 0"),
        DevicePool().borrow_trainer(on_cpu(debug, workers=2)),
    ):
        pass
    with DevicePool().borrow_trainer(on_cpu(debug, workers=1)) as trainer:
        assert trainer.model is dropout_model


def chosen(recipe, cores=8, workers=None, threads=None):
    """Workers and threads of a recipe on a CPU with so many cores."""
    recipe = on_cpu(recipe, workers, threads)
    with mock.patch("tasks.devices.available_cores", return_value=cores):
        runtime = choose_workers(recipe).runtime
    return runtime.cpu_workers, runtime.torch_threads


@pytest.fixture
def without_dropout(debug):
    return with_section(debug, "selector", lora=debug.selector.lora.model_copy(update={"dropout": 0.0}))


def test_two_clients_train_concurrently_by_default_where_none_that_trains_draws_dropout(
    debug, without_dropout
):
    assert chosen(without_dropout) == (2, 8)
    assert debug.selector.lora.dropout > 0
    assert chosen(debug) == (1, 8)
    lora = without_dropout.policy.lora.model_copy(update={"dropout": 0.5})
    assert chosen(with_section(without_dropout, "policy", lora=lora)) == (2, 8)


@pytest.mark.parametrize(("rate", "workers"), [(0.0, 2), (0.1, 1)])
def test_dropout_of_a_clients_own_modules_counts(rate, workers):
    recipe = load_recipe("personalized/demo", [f"federation.options.bottleneck.dropout={rate}"])
    assert chosen(recipe) == (workers, 8)


def test_one_client_trains_at_a_time_with_one_core_one_task_or_a_gpu(without_dropout, monkeypatch):
    assert chosen(without_dropout, cores=1) == (1, 1)
    assert chosen(without_dropout, threads=1) == (1, 1)
    clients = without_dropout.federation.clients_per_round
    assert chosen(with_section(without_dropout, "federation", clients_per_task=clients)) == (1, 8)
    monkeypatch.setattr(devices, "choose_devices", lambda names: ["cuda:0"])
    assert choose_workers(without_dropout).runtime.cpu_workers == 1


def test_workers_and_threads_of_the_recipe_are_kept(debug, without_dropout):
    assert chosen(without_dropout, workers=1, threads=3) == (1, 3)
    assert chosen(debug, workers=4) == (4, 8)


def test_a_client_on_ray_has_the_threads_of_one_on_threads(without_dropout):
    recipe = with_section(without_dropout, "runtime", task_runner="ray")
    assert chosen(recipe) == chosen(without_dropout) == (2, 8)


@pytest.mark.parametrize(
    ("gpus", "installed", "settings", "expected"),
    [
        (["cuda:0", "cuda:1"], True, {}, "ray"),
        (["cuda:0", "cuda:1"], False, {}, "threads"),
        (["cuda:0", "cuda:1"], True, {"task_runner": "threads"}, "threads"),
        (["cuda:0"], True, {}, "threads"),
        (["cpu"], True, {}, "threads"),
        (["cpu"], True, {"ray_address": "10.0.0.1:6379"}, "ray"),
    ],
)
def test_several_gpus_are_served_by_ray_where_it_is_installed(
    debug, monkeypatch, gpus, installed, settings, expected
):
    monkeypatch.setattr(devices, "choose_devices", lambda names: gpus)
    monkeypatch.setattr(ray_cluster, "is_installed", lambda: installed)
    recipe = with_section(debug, "runtime", devices=None, **settings)
    assert choose_workers(recipe).runtime.task_runner == expected


def test_rounds_of_other_workers_are_not_resumed(without_dropout, prepared, tmp_path):
    run = create_run(without_dropout, tmp_path / "run")
    shutil.copytree(prepared, run.prepared)
    fingerprints = {
        open_commits(run, on_cpu(without_dropout, workers, threads)).fingerprint
        for workers, threads in ((1, 1), (1, 2), (2, 2))
    }
    assert len(fingerprints) == 3


@pytest.mark.parametrize(
    ("setting", "is_other"),
    [
        ("seed=5", True),
        ("selector.lora.r=3", True),
        ("federation.local_steps=7", True),
        ("federation.method=feddpo", True),
        ("policy.max_new_tokens=9", False),  # the rounds train a selector
        ("evaluation.judge.steps=5", False),
    ],
)
def test_commits_belong_to_the_seed_and_the_settings_of_the_rounds(
    debug, prepared, tmp_path, setting, is_other
):
    run = create_run(debug, tmp_path / "run")
    shutil.copytree(prepared, run.prepared)
    plain, changed = (
        open_commits(run, recipe).fingerprint for recipe in (debug, load_recipe("debug", [setting]))
    )
    assert (plain != changed) == is_other


def train_clients(recipe, prepared, folder, workers):
    """Hashes of the adapters that four clients train, so many of them concurrently."""
    store = AdapterStore(folder / "adapters")
    with prefect_transport.POOL.borrow_trainer(recipe) as trainer:
        initial = store.put(trainer.initial_adapter(0))
    shards = [
        [TrainJob(client=name, round=0, seed=seed, adapter_name="selector", adapters=(initial,))]
        for seed, name in enumerate(("ada", "bea", "cyd", "dan"))
    ]
    contexts = ClientContexts(store, prepared / "pairs.parquet")
    with ThreadPoolExecutor(workers) as executor:
        answers = executor.map(lambda shard: ThisProcess(contexts).run(shard, recipe).updates, shards)
        return [update.adapter for (update,) in answers]


def test_concurrent_clients_train_the_bytes_of_clients_one_after_the_other(
    debug, prepared, tmp_path, monkeypatch
):
    lora = debug.selector.lora.model_copy(update={"dropout": 0.0})
    recipe = with_section(debug, "selector", lora=lora)
    hashes = []
    for workers in (1, 2):
        monkeypatch.setattr(prefect_transport, "POOL", DevicePool())
        on_workers = on_cpu(recipe, workers, threads=workers)
        hashes.append(train_clients(on_workers, prepared, tmp_path / str(workers), workers))
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 4


def test_a_trainer_is_built_once_on_each_device_and_stays_there(debug, built):
    pool = DevicePool()
    recipe = on_devices(debug, "one", "two")
    for _ in range(5):
        with pool.borrow_trainer(recipe) as first, pool.borrow_trainer(recipe) as second:
            assert {first.device, second.device} == {"one", "two"}
    assert sorted(built) == ["one", "two"]


def test_a_task_alone_has_the_same_trainer_each_time_whichever_was_used_last(debug, built):
    pool = DevicePool()
    recipe = on_devices(debug, "one", "two")
    with pool.borrow_trainer(recipe) as alone:
        pass
    first = pool.borrow_trainer(recipe, mapped=True)
    second = pool.borrow_trainer(recipe, mapped=True)
    assert first.__enter__() is alone
    assert second.__enter__() is not alone
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    with pool.borrow_trainer(recipe) as again:
        assert again is alone


def test_another_recipe_gets_a_trainer_of_its_own(debug, built):
    pool = DevicePool()
    recipe = on_devices(debug, "one")
    other = with_section(recipe, "selector", max_length=128)
    for one in (recipe, recipe, other, other):
        with pool.borrow_trainer(one):
            pass
    assert built == ["one", "one"]


class Built:
    """A trainer that can be referred to weakly."""


def test_the_memory_of_a_trainer_is_free_before_another_one_is_built(debug, monkeypatch):
    events = []

    def build(recipe, device, name=""):
        trainer = Built()
        trainer.model = torch.nn.Identity()
        trainer.itself = trainer  # garbage that a count of references does not find
        weakref.finalize(trainer, events.append, "freed")
        events.append("built")
        return trainer

    monkeypatch.setattr(devices, "build_trainer", build)
    pool = DevicePool()
    recipe = on_devices(debug, "one")
    for one in (recipe, with_section(recipe, "selector", max_length=128)):
        with pool.borrow_trainer(one) as trainer:
            del trainer
    assert events == ["built", "freed", "built"]
    pool.release()
    assert events == ["built", "freed", "built", "freed"]


def test_after_release_nothing_is_resident_and_the_devices_are_chosen_again(debug, built):
    pool = DevicePool()
    with pool.borrow_trainer(on_devices(debug, "one")):
        pass
    pool.release()
    with pool.borrow_trainer(on_devices(debug, "two")) as trainer:
        assert trainer.device == "two"
    assert built == ["one", "two"]


# --- the reference's log-probabilities, which the pool keeps

PAIR = Pair("a question", "an answer", "no")
CONCURRENT = ["policy.lora.dropout=0", "runtime.cpu_workers=2", "runtime.devices=[cpu]"]


@pytest.fixture(scope="module")
def dpo_recipe():
    return load_recipe("debug", [*CONCURRENT, "federation.method=feddpo"])


def test_the_references_logprobs_are_computed_once_for_all_trainers_of_a_backbone(dpo_recipe):
    pool = DevicePool()
    with (
        pool.borrow_trainer(dpo_recipe, mapped=True) as first,
        pool.borrow_trainer(dpo_recipe, mapped=True) as second,
    ):
        assert first is not second
        assert first.reference_cache is second.reference_cache
        adapter = first.initial_adapter(0)  # it is the reference
        expected = first.score_pairs([PAIR], adapter, None).margins_by_metric["summed"]
        second.resident.score = None  # called if the values had to be computed
        assert second.score_pairs([PAIR], adapter, None).margins_by_metric["summed"] == expected != 0


@pytest.mark.parametrize(
    ("overrides", "is_shared"), [([], True), (["policy.backbone.dtype=bfloat16"], False)]
)
def test_later_recipes_of_the_same_backbone_share_the_references_logprobs(dpo_recipe, overrides, is_shared):
    later = load_recipe("debug", [*CONCURRENT, "federation.method=fedrep", "seed=5", *overrides])
    pool = DevicePool()
    with pool.borrow_trainer(dpo_recipe) as trainer:
        reference_cache = trainer.reference_cache
    pool.release()
    with pool.borrow_trainer(later) as trainer:
        assert (trainer.reference_cache is reference_cache) == is_shared


# --- accuracy


@pytest.fixture
def measured(tmp_path, prepared):
    """A run with prepared data, whose clients measure in this process."""
    run = Run("run", tmp_path)
    run.prepared.symlink_to(prepared)
    return run


@pytest.fixture
def in_process(debug, measured):
    return InProcessTransport.open(debug, rounds_contexts(measured))


def test_accuracy_is_measured_once_and_then_read_from_its_file(
    debug, measured, in_process, store, monkeypatch
):
    initial = store.put(build_trainer(debug, "cpu").initial_adapter(0))
    counts = {name: {"train": 1, "validation": 0, "test": 2} for name in ("ada", "bea", "cyd", "dan")}
    bound = bind(debug.federation, store)
    state = bound.start(build_federation(counts, initial, 2), 0)
    first = evaluate_state(measured, debug, state, in_process)
    assert set(first.accuracy.clients) == {"ada", "bea", "cyd", "dan"}
    assert first.accuracy.pairs == 8
    assert first.accuracy.assigned is None
    monkeypatch.setattr(federation, "measure_accuracy", lambda *_: pytest.fail("measured again"))
    assert evaluate_state(measured, debug, state, in_process) == first


def test_what_clients_exchange_after_the_rounds_is_kept_apart_by_recipe_and_pairs(debug, measured):
    first = exchange_contexts(measured, debug)
    shorter = with_section(debug, "policy", max_new_tokens=3)
    assert exchange_contexts(measured, debug).adapters.root == first.adapters.root
    assert exchange_contexts(measured, shorter).adapters.root != first.adapters.root
    assert first.home == measured.federation
    first.adapters.put(START)
    close_exchange(measured)
    assert not measured.exchange.exists()


def test_short_jobs_are_a_task_for_each_place(debug, measured, monkeypatch):
    shards = []

    class Mapped:
        def with_options(self, **_):
            return self

        def submit(self, shard, **_):
            shards.append(shard)
            return FinishedFuture([])

    monkeypatch.setattr(prefect_transport, "run_shard", Mapped())
    recipe = on_cpu(debug, workers=2)
    names = ("ada", "bea", "cyd", "dan", "eva")
    prefect = PrefectTransport.open(recipe, rounds_contexts(measured))
    prefect.run(measure_jobs(Outcome(adapters={"policy": "a"}), "test", dict.fromkeys(names)))
    assert [[job.client for job in shard] for shard in shards] == [list(names[:3]), list(names[3:])]


def test_a_measurement_that_a_client_does_not_answer_is_refused_by_its_name(debug, measured, ensemble):
    class Unreachable:
        def run(self, jobs):
            return [Failure("bea", "the line is dead")]

    with pytest.raises(UserError, match=r"4 of 4 clients.*'measure'.*bea: the line is dead"):
        measure_accuracy(measured, debug, ensemble, 0, Unreachable())


ASSIGNMENT = {"ada": "selector-2", "bea": "selector-0", "cyd": "selector-2", "dan": "selector-1"}


@pytest.fixture
def ensemble(store, random_adapter):
    adapters = {f"selector-{u}": store.put(random_adapter(u, 1.0)) for u in range(3)}
    return Outcome(trained_model="selector", votes=True, adapters=adapters, assignment=ASSIGNMENT)


@pytest.fixture
def correct(ensemble, store, tiny_selector, prepared):
    """The held-out pairs, and by selector, on which of them it agrees with their owner."""
    pairs = read_pairs(prepared / "pairs.parquet", split="test")
    by_selector = {}
    for name, digest in ensemble.adapters.items():
        tiny_selector.slot.load(store.get(digest))
        by_selector[name] = score_pairs(tiny_selector, pairs)[0] > 0
    return pairs, by_selector


@pytest.mark.parametrize("client", ASSIGNMENT)
def test_accuracy_of_an_ensemble_is_that_of_the_majority_and_of_each_clients_assigned_adapter(
    debug, measured, in_process, ensemble, correct, client
):
    accuracy = measure_accuracy(measured, debug, ensemble, 0, in_process)
    pairs, by_selector = correct
    own = [n for n, pair in enumerate(pairs) if pair.client_id == client]
    votes = sum(by_selector.values())
    assert accuracy.assigned.clients[client] == np.mean([by_selector[ASSIGNMENT[client]][n] for n in own])
    assert accuracy.clients[client] == np.mean([votes[n] >= 2 for n in own])


def test_the_majority_and_the_assigned_adapters_differ(debug, measured, in_process, ensemble):
    accuracy = measure_accuracy(measured, debug, ensemble, 0, in_process)
    assert accuracy.clients != accuracy.assigned.clients


COUNTS = {"c": 9, "a": 20, "none": 0, "b": 3}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("limit", "expected"), [(6, {"a": 2, "b": 2, "c": 2}), (13, {"a": 5, "b": 3, "c": 5}), (7, None)]
)
def test_clients_measure_equally_many_held_out_pairs(seed, limit, expected):
    counts = count_evenly(COUNTS, limit, seed)
    assert sum(counts.values()) == limit
    if expected is None:
        assert sorted(counts.values()) == [2, 2, 3]
    else:
        assert counts == expected


@pytest.mark.parametrize(("sample", "limit"), [(count_evenly, 7), (count_uniformly, 6)])
def test_how_many_pairs_a_client_measures_is_a_function_of_the_seed(sample, limit):
    drawn = [sample(COUNTS, limit, seed) for seed in range(6)]
    assert drawn[0] == sample(COUNTS, limit, 0)
    assert any(other != drawn[0] for other in drawn)


def test_each_held_out_pair_is_drawn_with_the_same_probability():
    drawn = Counter()
    for seed in range(400):
        counts = count_uniformly(COUNTS, 8, seed)
        assert sum(counts.values()) == 8
        assert all(0 < count <= COUNTS[client] for client, count in counts.items())
        drawn.update(counts)
    assert {client: drawn[client] / COUNTS[client] for client in "abc"} == pytest.approx(
        dict.fromkeys("abc", 100), rel=0.2
    )


@pytest.mark.parametrize("sample", [count_evenly, count_uniformly])
def test_without_a_limit_below_their_number_all_held_out_pairs_are_used(sample):
    assert sample(COUNTS, 99, 0) == {"a": None, "b": None, "c": None}
