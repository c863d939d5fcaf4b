"""Validated and committed steps, jobs of clients, and whole federations on the tiny backbone."""

import math
from functools import partial
from unittest import mock

import pytest
import torch

from components.config import UserError
from components.federation.clients.trainer import ClientResult
from components.federation.clients.worker import build_trainer, finished_update, run_job
from components.federation.protocol import Failure, MeasureJob, TrainJob
from components.federation.rounds import (
    run_federation,
    run_rounds,
    split_shards,
)
from components.federation.step_answers import match_answers, validate_updates
from components.federation.transport import InProcessTransport
from components.io import write_atomically
from components.models import selector_model
from components.models.store import AdapterError
from components.recipes import load_recipe
from components.results import Metrics
from tests.support.bare_loop import open_loop
from tests.support.bound_methods import make_update

TEMPLATE = {"a": torch.zeros(3), "b": torch.zeros(2)}


@pytest.fixture(scope="module")
def recipe():
    """Three rounds of two of the four clients of `prepared`."""
    overrides = ["federation.rounds=3", "federation.clients_per_round=2", "federation.local_steps=1"]
    return load_recipe("debug", ["federation.method=fedbis", *overrides])


@pytest.fixture(scope="module")
def trainer(recipe):
    return build_trainer(recipe, "cpu")


# --- validation of updates


def trained_update(store, client, **tensors):
    """An update of two tensors, some of them replaced; None leaves a tensor out."""
    job = TrainJob(client=client, round=0, seed=1, adapter_name="selector", adapters=(store.put(TEMPLATE),))
    values = {"a": [1.0, 2.0, 3.0], "b": [0.0, 1.0], **tensors}
    adapter = {name: torch.tensor(value) for name, value in values.items() if value is not None}
    return make_update(job, store.put(adapter))


@pytest.mark.parametrize(
    ("tensors", "parts"),
    [
        ({"a": [1.0, math.nan, math.nan]}, ("'a'", "2 values", "NaN or infinite")),
        ({"b": [math.inf, 0.0]}, ("'b'", "1 values", "NaN or infinite")),
        ({"a": [1.0, 2.0]}, ("'a'", "(2,)", "(3,)")),
        ({"b": None}, ("'b'", "missing")),
        ({"c": [1.0]}, ("'c'", "not part of the adapter")),
    ],
    ids=["nan", "infinite", "shape", "missing", "additional"],
)
def test_an_update_that_cannot_be_aggregated_is_refused_by_its_tensor(store, tensors, parts):
    cyd, ada = (trained_update(store, name) for name in ("cyd", "ada"))
    updates = [cyd, trained_update(store, "bea", **tensors), ada]
    accepted, refused = validate_updates(updates, store, TEMPLATE)
    assert accepted == [ada, cyd]
    assert [failure.client for failure in refused] == ["bea"]
    for part in parts:
        assert part in refused[0].reason


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_an_update_without_a_readable_file_is_refused(store, damage):
    update = trained_update(store, "ada")
    store.path(update.adapter).write_bytes(b"garbage")
    if damage == "missing":
        store.path(update.adapter).unlink()
    accepted, refused = validate_updates([update], store, TEMPLATE)
    assert accepted == []
    assert f"is {damage}" in refused[0].reason


@pytest.mark.parametrize(("ratio", "refused"), [(1000.0, ["cyd"]), (1e40, []), (None, [])])
def test_an_update_out_of_proportion_is_refused_by_its_norm(store, ratio, refused):
    updates = [trained_update(store, name) for name in ("ada", "bea")]
    updates.append(trained_update(store, "cyd", a=[1e30, 0.0, 0.0]))
    received = dict.fromkeys(("ada", "bea", "cyd"), store.put(TEMPLATE))
    accepted, failures = validate_updates(updates, store, TEMPLATE, received, ratio)
    assert [failure.client for failure in failures] == refused
    assert len(accepted) == 3 - len(refused)
    assert [failure.reason for failure in failures] == [
        f"its update has norm 1e+30, {1e30 / math.sqrt(15):.3g} times the median of the clients"
        " (federation.max_update_ratio 1000)"
        for _ in refused
    ]


def test_damaged_updates_and_those_out_of_proportion_are_refused_in_the_order_of_the_clients_names(store):
    updates = [trained_update(store, name, b=None) for name in ("dan", "bea")]
    updates += [trained_update(store, "cyd", a=[1e30, 0.0, 0.0]), trained_update(store, "ada")]
    received = dict.fromkeys(("ada", "bea", "cyd", "dan"), store.put(TEMPLATE))
    _, failures = validate_updates(updates, store, TEMPLATE, received, 1000.0)
    assert [failure.client for failure in failures] == ["bea", "cyd", "dan"]


@pytest.mark.parametrize(("values", "refused"), [([1e30], []), ([1e30, 1.0], ["c0"]), ([0.0, 0.0, 1.0], [])])
def test_norms_are_compared_with_the_smaller_median_that_is_not_zero(store, values, refused):
    clients = {f"c{n}": value for n, value in enumerate(values)}
    updates = [trained_update(store, name, a=[v, 0.0, 0.0], b=[0.0, 0.0]) for name, v in clients.items()]
    received = dict.fromkeys(clients, store.put(TEMPLATE))
    _, failures = validate_updates(updates, store, TEMPLATE, received, 1000.0)
    assert [failure.client for failure in failures] == refused


def test_the_norm_is_of_what_the_client_changed(store):
    far = store.put({"a": torch.tensor([1e8, 0.0, 0.0]), "b": torch.zeros(2)})
    updates = [trained_update(store, "ada"), trained_update(store, "bea", a=[1e8, 2.0, 3.0])]
    received = {"ada": store.put(TEMPLATE), "bea": far}
    assert validate_updates(updates, store, TEMPLATE, received, 1000.0)[1] == []


def test_a_nan_score_is_accepted_since_the_method_gives_it_a_meaning(store):
    job = MeasureJob(client="ada", round=0, seed=1, split="validation", losses=True, adapters=("0" * 64,))
    update = make_update(job, losses=(math.nan,))
    assert validate_updates([update], store, TEMPLATE) == ([update], [])


# --- the end of a step


@pytest.fixture
def step(prepared, trainer, tmp_path):
    """A round of all four clients: bound, state, jobs, made-up updates, commits."""
    recipe = load_recipe("debug", ["federation.method=fedbis", "federation.clients_per_round=4"])
    loop = open_loop(recipe, prepared, tmp_path, trainer)
    state = loop.initial_state()
    jobs = loop.bound.plan(state)
    store = loop.commits.store
    start = store.get(state.adapters["selector"])
    updates = []
    for number, job in enumerate(jobs):
        adapter = store.put({name: tensor + number for name, tensor in start.items()})
        updates.append(make_update(job, adapter, metrics=Metrics(scalars={"loss": float(number)})))
    return loop.bound, state, jobs, updates, loop.commits


def damage(update, store):
    adapter = store.get(update.adapter)
    adapter[min(adapter)].view(-1)[0] = math.nan
    return update.model_copy(update={"adapter": store.put(adapter)})


def test_a_step_is_committed_with_who_took_part_who_failed_and_who_was_refused_without_weight(step):
    bound, state, jobs, updates, commits = step
    answers = [updates[3], damage(updates[1], commits.store), Failure("cyd", "device lost"), updates[0]]
    new, record = bound.close_step(state, jobs, answers, 0.5, commits)
    assert list(record.clients) == ["ada", "dan"]
    assert record.failed == {"cyd": "device lost"}
    assert list(record.refused) == ["bea"]
    assert "NaN" in record.refused["bea"]
    assert record.clients["dan"].metrics.scalars == {"loss": 3.0}
    assert (record.step, record.round, record.rounds_done) == (1, 0, 1)
    assert record.ends_round
    assert record.server == new.metrics
    assert new.memory.job_keys == {}
    assert new.adapters == bound.aggregate(state, [updates[0], updates[3]]).adapters
    assert commits.latest(bound.memory_type) == (new, [record])


def rename(update, **changes):
    return update.model_copy(update=changes)


def test_an_answer_to_another_job_is_refused_and_a_missing_one_is_a_failure(step):
    bound, state, jobs, updates, commits = step
    stranger = rename(updates[0], client="eve")
    borrowed = rename(updates[0], client="bea")  # ada's answer under another name
    moved = rename(updates[2], adapter_name="another")
    answers = [moved, updates[0], borrowed, stranger]
    new, record = bound.close_step(state, jobs, answers, 0.25, commits)
    assert list(record.clients) == ["ada"]
    assert record.failed == {"dan": "there is no answer"}
    assert list(record.refused) == ["bea", "cyd", "eve"]
    assert set(record.refused.values()) == {
        f"its update answers job {job}, not that of this step" for job in (jobs[0].key(), jobs[2].key())
    }
    assert new.adapters == bound.aggregate(state, [updates[0]]).adapters


def test_matched_answers_are_in_the_order_of_the_clients_names(step):
    _, _, jobs, updates, _ = step
    strangers = [rename(updates[0], client=name) for name in ("zoe", "eve")]
    answers = [Failure("dan", "late"), Failure("cyd", "lost"), *updates[1::-1], *strangers]
    names = [[answer.client for answer in matched] for matched in match_answers(jobs, answers)]
    assert names == [["ada", "bea"], ["cyd", "dan"], ["eve", "zoe"]]


def test_a_second_update_of_a_client_is_refused_and_refusals_are_in_the_order_of_names(step):
    bound, state, jobs, updates, commits = step
    second = rename(updates[0], adapter=updates[1].adapter)
    answers = [damage(updates[3], commits.store), *updates[:3], second]
    new, record = bound.close_step(state, jobs, answers, 0.75, commits)
    assert list(record.refused) == ["ada", "dan"]
    assert record.refused["ada"] == "it has sent a second update in this step"
    assert new.adapters == bound.aggregate(state, updates[:3]).adapters


TWO_FAILURES = [Failure("cyd", "lost"), Failure("dan", "late")]


@pytest.mark.parametrize("quorum", [0.01, 0.5])
def test_a_round_with_its_quorum_is_closed(step, quorum):
    bound, state, jobs, updates, commits = step
    new, _ = bound.close_step(state, jobs, [*updates[:2], *TWO_FAILURES], quorum, commits)
    assert new.round == 1


@pytest.mark.parametrize(("quorum", "required"), [(0.51, 3), (0.75, 3), (1.0, 4)])
def test_a_round_without_its_quorum_fails_by_number_and_reasons_and_is_not_committed(step, quorum, required):
    bound, state, jobs, updates, commits = step
    answers = [*updates[:2], *TWO_FAILURES]
    with pytest.raises(UserError, match=f"round 1 .*{required} are needed.*cyd: lost; dan: late"):
        bound.close_step(state, jobs, answers, quorum, commits)
    assert commits.latest(bound.memory_type) is None


def test_a_round_without_any_accepted_update_fails_at_any_quorum(step):
    bound, state, jobs, updates, commits = step
    answers = [*(Failure(job.client, "lost") for job in jobs[:3]), damage(updates[3], commits.store)]
    with pytest.raises(UserError, match=r"1 are needed.*ada: lost; bea: lost; cyd: lost; dan: tensor"):
        bound.close_step(state, jobs, answers, 0.01, commits)


@pytest.mark.parametrize(
    ("jobs", "size", "shards"),
    [([1, 2, 3, 4, 5], 2, [[1, 2], [3, 4], [5]]), ([1, 2], 5, [[1, 2]]), ([], 3, [])],
)
def test_shards_have_all_jobs_in_their_order(jobs, size, shards):
    assert split_shards(jobs, size) == shards


# --- a client's job


class ScriptedTrainer:
    """A trainer whose results are made up; `rows` has the rows that each job could read."""

    def __init__(self, losses=()):
        self.losses = tuple(losses)
        self.rows = []

    def run(self, job, context):
        rows = context.rows("train" if job.kind == "train" else "validation")
        self.rows.append(rows)
        if job.kind == "measure":
            return ClientResult(losses=self.losses, rows=len(rows))
        tensors = {name: tensor + 1 for name, tensor in context.load_adapter(job.adapter).items()}
        return ClientResult(tensors, rows=len(rows), metrics=Metrics(scalars={"loss": 1.0}), kept_bytes=7)


@pytest.fixture
def job(contexts):
    adapter = contexts.adapters.put(TEMPLATE)
    return TrainJob(client="bea", round=0, seed=7, adapter_name="selector", adapters=(adapter,))


def test_a_job_reads_the_rows_of_its_own_client(contexts, job, debug):
    scripted = ScriptedTrainer()
    update = run_job(job, scripted, contexts, debug)
    (rows,) = scripted.rows
    assert {(row.client_id, row.split) for row in rows} == {("bea", "train")}
    assert len(rows) == update.rows == 6


def test_an_update_has_the_adapter_the_metrics_and_the_traffic_of_its_job(contexts, job, debug):
    update = run_job(job, ScriptedTrainer(), contexts, debug)
    size = contexts.adapters.path(job.adapter).stat().st_size
    assert (update.job, update.client, update.adapter_name) == (job.key(), "bea", "selector")
    assert contexts.adapters.get(update.adapter)["a"].tolist() == [1.0, 1.0, 1.0]
    assert update.metrics.scalars == {"loss": 1.0}
    assert (update.traffic.received, update.traffic.sent, update.traffic.kept) == (size, size, 7)


def test_a_score_job_receives_each_distinct_adapter_once_and_sends_none(contexts, job, debug):
    other = contexts.adapters.put({name: tensor + 1 for name, tensor in TEMPLATE.items()})
    score = MeasureJob(
        client="dan",
        round=0,
        seed=8,
        split="validation",
        losses=True,
        adapters=(job.adapter, other, job.adapter),
    )
    update = run_job(score, ScriptedTrainer(losses=(0.5, 1.5, 0.5)), contexts, debug)
    assert update.adapter is None
    assert update.losses == [0.5, 1.5, 0.5]
    sizes = [contexts.adapters.size(digest) for digest in (job.adapter, other)]
    assert (update.traffic.received, update.traffic.sent) == (sum(sizes), 0)


def test_a_finished_job_is_not_repeated_except_in_another_round(contexts, job, debug):
    scripted = ScriptedTrainer()
    first = run_job(job, scripted, contexts, debug)
    assert run_job(job, scripted, contexts, debug) == first
    assert finished_update(job, contexts.adapters) == first
    assert len(scripted.rows) == 1
    run_job(job.model_copy(update={"round": 1}), scripted, contexts, debug)
    assert len(scripted.rows) == 2


def test_a_job_whose_adapter_was_lost_is_repeated(contexts, job, debug):
    scripted = ScriptedTrainer()
    update = run_job(job, scripted, contexts, debug)
    contexts.adapters.path(update.adapter).unlink()
    assert finished_update(job, contexts.adapters) is None
    assert run_job(job, scripted, contexts, debug) == update
    assert len(scripted.rows) == 2


@pytest.mark.parametrize("content", ["", '{"adapter": "ab', "[]garbage", "{}"])
def test_a_half_written_update_is_not_read(contexts, job, tmp_path, content, debug):
    path = tmp_path / "federation" / "updates" / f"{job.key()}.json"
    path.parent.mkdir()
    path.write_text(content)
    assert finished_update(job, contexts.adapters) is None
    run_job(job, ScriptedTrainer(), contexts, debug)
    assert finished_update(job, contexts.adapters) is not None


def test_a_nan_score_is_read_back_from_its_file(contexts, job, debug):
    score = MeasureJob(
        client="ada", round=0, seed=3, split="validation", losses=True, adapters=(job.adapter,)
    )
    run_job(score, ScriptedTrainer(losses=(math.nan,)), contexts, debug)
    assert math.isnan(finished_update(score, contexts.adapters).losses[0])


# --- whole federations


@pytest.fixture(scope="module")
def finished(recipe, prepared, trainer, tmp_path_factory):
    """A federation after its three rounds."""
    loop = open_loop(recipe, prepared, tmp_path_factory.mktemp("finished"), trainer)
    loop.run()
    return loop


def test_a_federation_runs_all_rounds_and_its_adapter_moves_in_each_and_stays_finite_fp32(finished):
    state = finished.latest_state()
    records = finished.records
    assert (state.round, state.step) == (3, 3)
    assert [record.rounds_done for record in records] == [1, 2, 3]
    assert {len(record.clients) for record in records} == {2}
    assert all(record.server.scalars["server_step"] > 0 for record in records)
    assert len({record.adapters["selector"] for record in records}) == 3
    for tensor in finished.commits.store.get(state.adapters["selector"]).values():
        assert tensor.isfinite().all()
        assert tensor.dtype == torch.float32


class Killed(BaseException):
    """The process was killed."""


def count_jobs(trainer, monkeypatch, killed_at=None):
    """A list to which the client of each job is added; one of them is killed."""
    clients = []
    run = trainer.run

    def record(job, context):
        clients.append(job.client)
        if len(clients) == killed_at:
            raise Killed
        return run(job, context)

    monkeypatch.setattr(trainer, "run", record)
    return clients


def test_a_resumed_federation_repeats_only_the_job_that_was_killed(
    recipe, prepared, trainer, tmp_path, monkeypatch, finished
):
    clients = count_jobs(trainer, monkeypatch, killed_at=4)
    with pytest.raises(Killed):
        open_loop(recipe, prepared, tmp_path, trainer).run()
    resumed = open_loop(recipe, prepared, tmp_path, trainer).run()
    assert len(clients) == 6 + 1
    assert clients[3] == clients[4]
    assert resumed.adapters == finished.latest_state().adapters


@pytest.mark.parametrize("last", [0, 2])
def test_a_federation_without_its_last_commits_ends_with_the_same_bytes(
    recipe, prepared, trainer, tmp_path, finished, last
):
    loop = open_loop(recipe, prepared, tmp_path, trainer)
    loop.run()
    for path in (loop.commits.folder / "commits").iterdir():
        if int(path.stem) > last:
            path.unlink()
    for path in (loop.commits.folder / "updates").iterdir():
        path.unlink()
    state = loop.run()
    assert state.round == 3
    assert state.adapters == finished.latest_state().adapters


class WatchedTransport(InProcessTransport):
    """Records the updates in the folder before and after the jobs of each step."""

    def __init__(self, loop):
        super().__init__(loop.recipe, loop.contexts, {"": loop.trainer})
        self.folder = loop.commits.folder / "updates"
        self.before = []
        self.after = []
        self.jobs = []

    def names(self):
        return {path.stem for path in self.folder.glob("*.json")}

    def run(self, jobs):
        self.before.append(self.names())
        answers = super().run(jobs)
        self.jobs.append({job.key() for job in jobs})
        self.after.append(self.names())
        return answers


def test_updates_and_their_adapters_are_kept_for_one_step(recipe, prepared, trainer, tmp_path):
    loop = open_loop(recipe, prepared, tmp_path, trainer)
    transport = WatchedTransport(loop)
    state = run_rounds(loop.bound.method, loop.initial_state(), transport, loop.commits, recipe.federation)
    assert transport.before == [set()] * 3
    assert transport.after == transport.jobs
    assert transport.names() == set()
    named = {record.adapters["selector"] for record in loop.records} | {state.federation.initial}
    assert {path.stem for path in loop.commits.store.root.iterdir()} == named


def test_the_servers_adapters_stay_every_so_many_rounds_and_those_of_the_last_two(
    recipe, prepared, trainer, tmp_path
):
    federation = recipe.federation.model_copy(update={"keep_every": 3, "rounds": 5})
    loop = open_loop(recipe.model_copy(update={"federation": federation}), prepared, tmp_path, trainer)
    state = loop.run()
    hashes = [record.adapters["selector"] for record in loop.records]
    assert len(set(hashes)) == 5
    stored = {path.stem for path in loop.commits.store.root.iterdir()}
    assert stored == {*hashes[2:], state.federation.initial}


def write_updates(updates, commits):
    for update in updates:
        path = commits.folder / "updates" / f"{update.job}.json"
        write_atomically(path, update.model_dump_json().encode())


def test_updates_of_the_step_that_follows_are_kept(step):
    *_, jobs, updates, commits = step
    updates[2] = rename(updates[2], adapter=updates[1].adapter)
    write_updates(updates, commits)
    commits.discard(jobs[:2])
    assert [finished_update(job, commits.store) is not None for job in jobs] == [True, True, False, False]
    assert [commits.store.path(update.adapter).is_file() for update in updates[1:]] == [True, True, False]


def test_an_update_that_is_the_servers_adapter_is_kept(step):
    """Methods whose outcome is an adapter per client take a client's update as it is."""
    _, state, _, updates, commits = step
    write_updates(updates, commits)
    own = state.adapters | {"ada": updates[3].adapter}
    commits.write(state.end_round(own, {}), None)
    commits.discard()
    assert list((commits.folder / "updates").iterdir()) == []
    assert [commits.store.path(update.adapter).is_file() for update in updates[1:]] == [False, False, True]


def test_a_finished_federation_has_no_more_jobs(finished, monkeypatch):
    clients = count_jobs(finished.trainer, monkeypatch)
    assert finished.run() == finished.latest_state()
    assert clients == []


def test_the_bytes_do_not_depend_on_what_the_resident_model_did_before(recipe, prepared, tmp_path, finished):
    torch.manual_seed(99)
    other = open_loop(recipe, prepared, tmp_path, build_trainer(recipe, "cpu")).run()
    assert other.adapters == finished.latest_state().adapters


def test_the_bytes_depend_on_the_seed(recipe, prepared, trainer, tmp_path, finished):
    loop = open_loop(recipe.model_copy(update={"seed": 1}), prepared, tmp_path, trainer)
    assert loop.run().adapters != finished.latest_state().adapters


def test_clients_never_train_the_servers_tensors(recipe, prepared, trainer, tmp_path):
    """In the published code all share one model, and the server's old adapter is the last client's."""
    loop = open_loop(recipe, prepared, tmp_path, trainer)
    initial = loop.commits.store.get(loop.federation.initial)
    slot = {parameter.data_ptr() for parameter in trainer.selector.slot.parameters}
    for job in loop.bound.plan(loop.initial_state()):
        context = loop.contexts.open(job.client)
        start = context.load_adapter(job.adapter)
        trained = trainer.run(job, context).tensors
        after = context.load_adapter(job.adapter)
        assert not {tensor.data_ptr() for tensor in trained.values()} & slot
        for name, tensor in initial.items():
            assert torch.equal(start[name], tensor)
            assert torch.equal(after[name], tensor)


def test_a_round_is_the_mean_of_its_updates_by_pairs(recipe, prepared, trainer, tmp_path):
    loop = open_loop(recipe, prepared, tmp_path, trainer)
    state = loop.initial_state()
    jobs = loop.bound.plan(state)
    updates = [loop.run_job(job) for job in jobs]
    new, _ = loop.bound.close_step(state, jobs, updates, 1.0, loop.commits)
    weights = [state.federation.weights[job.client] for job in jobs]
    trained = [loop.commits.store.get(update.adapter) for update in updates]
    for name, tensor in loop.commits.store.get(new.adapters["selector"]).items():
        total = sum(weight * adapter[name] for weight, adapter in zip(weights, trained, strict=True))
        assert torch.allclose(tensor, total / sum(weights), atol=1e-6)


def test_the_backbone_is_loaded_once_for_all_clients_and_rounds(recipe, prepared, trainer, tmp_path):
    loop = open_loop(recipe, prepared, tmp_path, trainer)
    with mock.patch.object(selector_model, "load_backbone", wraps=selector_model.load_backbone) as load:
        state = run_federation(recipe, loop.federation, prepared / "pairs.parquet", loop.commits)
    assert state.round == 3
    load.assert_called_once()


def test_a_damaged_server_adapter_ends_the_run(recipe, prepared, trainer, tmp_path):
    loop = open_loop(recipe, prepared, tmp_path, trainer)
    loop.run()
    (loop.commits.folder / "commits" / "00003.json").unlink()
    loop.commits.store.path(loop.latest_state().adapters["selector"]).write_bytes(b"garbage")
    for path in (loop.commits.folder / "updates").iterdir():
        path.unlink()
    with pytest.raises(AdapterError, match="is damaged"):
        loop.run()


# --- the transport


class LossyTransport(InProcessTransport):
    """Loses the answer of one client, and delivers the others in reverse order."""

    def __init__(self, loop, lost):
        super().__init__(loop.recipe, loop.contexts, {"": loop.trainer})
        self.lost = lost
        self.steps = 0

    def run(self, jobs):
        self.steps += 1
        answers = super().run(jobs)
        return [Failure(self.lost, "no answer") if a.client == self.lost else a for a in answers[::-1]]


def test_the_rounds_ask_any_transport_for_the_answers_of_a_step(recipe, prepared, trainer, tmp_path):
    loop = open_loop(recipe, prepared, tmp_path, trainer)
    lost = loop.bound.plan(loop.initial_state())[0].client
    transport = LossyTransport(loop, lost)
    steps = []
    run = partial(run_rounds, loop.bound.method, loop.initial_state(), transport, loop.commits)
    state = run(recipe.federation, after_step=lambda new, record: steps.append((new.step, record)))
    assert state.round == transport.steps == 3
    assert steps == list(enumerate(loop.records, 1))
    assert loop.records[0].failed == {lost: "no answer"}
    assert len(loop.records[0].clients) == 1


def test_the_order_in_which_a_transport_delivers_does_not_change_the_bytes(
    recipe, prepared, trainer, tmp_path, finished
):
    loop = open_loop(recipe, prepared, tmp_path, trainer)
    transport = LossyTransport(loop, lost="nobody")
    state = run_rounds(loop.bound.method, loop.initial_state(), transport, loop.commits, recipe.federation)
    assert state.adapters == finished.latest_state().adapters


def test_in_one_process_an_error_of_a_client_ends_the_run(recipe, contexts, job):
    broken = mock.Mock(**{"run.side_effect": AdapterError("the adapter does not fit")})
    with pytest.raises(AdapterError, match="does not fit"):
        InProcessTransport(recipe, contexts, {"": broken}).run([job])
