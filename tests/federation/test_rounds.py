"""A step's answers screened and committed, and a whole federation as a bare loop on the tiny backbone."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from components.data.records import read_clients
from components.federation import rounds
from components.federation.clients import LEARNERS, SelectorLearner, finished_update, run_job
from components.federation.commits import Commits
from components.federation.rounds import close_step, run_federation, shards
from components.federation.strategy import Failure, FederationError, Job, Update, build_federation, build_strategy, screen
from components.models.adapters import AdapterError, AdapterStore


@pytest.fixture
def recipe(debug):
    """Three rounds of two of the four clients of `prepared`."""
    return debug.model_copy(update={"federation": debug.federation.model_copy(update={"rounds": 3})})


@pytest.fixture(scope="module")
def learner(debug):
    torch.set_num_threads(1)
    return SelectorLearner(debug, "cpu")


def new_federation(recipe, prepared, commits, learner):
    return build_federation(read_clients(prepared), commits.store.put(learner.initial_adapter(recipe.seed)), recipe.federation.clients_per_round)


# --- screening

LIKE = {"a": torch.zeros(3), "b": torch.zeros(2)}


def trained(store, client, **tensors):
    job = Job("train", client, 0, "selector", (store.put(LIKE),), "selector", 1)
    ref = store.put({n: torch.as_tensor(t) for n, t in {"a": [1.0, 2.0, 3.0], "b": [0.0, 1.0], **tensors}.items() if t is not None})
    return Update(job, ref, (), {})


@pytest.mark.parametrize(("tensors", "sentence"), [
    ({"a": [1.0, math.nan, math.nan]}, "tensor 'a' has 2 values that are NaN or infinite"),
    ({"b": [math.inf, 0.0]}, "tensor 'b' has 1 values that are NaN or infinite"),
    ({"a": [1.0, 2.0]}, "tensor 'a' has shape (2,), expected (3,)"),
    ({"b": None}, "tensor 'b' is missing (1 of 2 are)"),
    ({"c": [1.0]}, "tensor 'c' is not part of the adapter (1 are not)")])
def test_an_update_that_cannot_be_aggregated_is_refused_by_its_tensor_and_the_others_are_kept(tmp_path, tensors, sentence):
    store = AdapterStore(tmp_path)
    good = [trained(store, name) for name in ("cyd", "ada")]
    accepted, refused = screen([good[0], trained(store, "bea", **tensors), good[1]], store, LIKE)
    assert accepted == [good[1], good[0]], "in the order of the names"
    assert refused == [Failure("bea", sentence)]


def test_an_update_whose_file_is_gone_or_damaged_is_refused(tmp_path):
    store = AdapterStore(tmp_path)
    updates = [trained(store, "ada", a=[1.0, 1.0, 1.0]), trained(store, "bea", a=[2.0, 2.0, 2.0])]
    Path(updates[0].adapter.path).unlink()
    Path(updates[1].adapter.path).write_bytes(b"garbage")
    accepted, refused = screen(updates, store, LIKE)
    assert not accepted and "is missing" in refused[0].reason and "is damaged" in refused[1].reason


def test_a_score_without_validation_data_is_an_answer(tmp_path):
    """No data, no vote: it is the method that says what NaN means."""
    store = AdapterStore(tmp_path)
    job = Job("score", "ada", 0, "", (store.put(LIKE),), "selector", 1)
    assert screen([Update(job, None, (math.nan,), {})], store, LIKE) == ([Update(job, None, (math.nan,), {})], [])


# --- closing a step

@pytest.fixture
def step(recipe, prepared, learner, tmp_path):
    """A round of all four clients: strategy, state, jobs, made-up updates, commits."""
    commits = Commits(tmp_path / "federation", "test")
    config = recipe.federation.model_copy(update={"clients_per_round": 4})
    strategy = build_strategy(config, commits.store)
    state = strategy.init(new_federation(recipe, prepared, commits, learner), 0)
    jobs = strategy.plan(state, 0)
    start = commits.store.get(state.adapters["selector"])
    updates = [Update(job, commits.store.put({n: t + i for n, t in start.items()}), (), {"loss": float(i)}) for i, job in enumerate(jobs)]
    return strategy, state, jobs, updates, commits


def damaged(update, store):
    adapter = store.get(update.adapter)
    adapter[sorted(adapter)[0]].view(-1)[0] = math.nan
    return replace(update, adapter=store.put(adapter))


def test_a_step_is_committed_with_who_took_part_who_failed_and_who_was_refused(step):
    strategy, state, jobs, updates, commits = step
    outcomes = [updates[3], damaged(updates[1], commits.store), Failure("cyd", "the device is lost"), updates[0]]
    new, record = close_step(strategy, state, jobs, outcomes, 0.5, commits)
    assert list(record["clients"]) == ["ada", "dan"] and record["failed"] == {"cyd": "the device is lost"}
    assert list(record["refused"]) == ["bea"] and "1 values that are NaN" in record["refused"]["bea"]
    assert record["clients"]["dan"]["loss"] == 3.0 and record["rounds_done"] == 1
    committed, records = commits.latest()
    assert committed == new and records == [json.loads(json.dumps(record))]
    expected = strategy.aggregate(state, [updates[0], updates[3]])
    assert new.adapters == expected.adapters, "what was refused weighs nothing"


@pytest.mark.parametrize(("quorum", "enough"), [(0.5, True), (0.51, False), (0.75, False), (0.01, True), (1.0, False)])
def test_a_round_needs_its_quorum(step, quorum, enough):
    strategy, state, jobs, updates, commits = step
    outcomes = [updates[0], updates[1], Failure("cyd", "lost"), Failure("dan", "late")]
    if enough:
        assert close_step(strategy, state, jobs, outcomes, quorum, commits)[0].round == 1
        return
    needed = math.ceil(quorum * 4)
    with pytest.raises(FederationError, match=f"round 0 has 2 usable updates of 4 clients, but {needed} are needed.*cyd: lost; dan: late"):
        close_step(strategy, state, jobs, outcomes, quorum, commits)
    assert commits.latest() is None, "nothing is committed"


def test_a_round_without_any_update_fails_whatever_the_quorum_is(step):
    strategy, state, jobs, updates, commits = step
    outcomes = [Failure(job.client, "lost") for job in jobs[:3]] + [damaged(updates[3], commits.store)]
    with pytest.raises(FederationError, match=r"0 usable updates of 4 clients, but 1 are needed.*ada: lost; bea: lost; cyd: lost; dan: tensor"):
        close_step(strategy, state, jobs, outcomes, 0.01, commits)


def test_shards_keep_all_jobs_in_their_order():
    assert shards([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]] and shards([1, 2], 5) == [[1, 2]] and shards([], 3) == []


# --- a client's job

def test_a_job_reads_the_rows_of_its_client_and_split_alone(prepared, tmp_path):
    seen = []

    class Learner:
        def train(self, rows, adapter, seed, home=None, job=None):
            seen.append(("train", rows, seed))
            return adapter, {"loss": 1.0}

        def score(self, rows, adapters):
            seen.append(("score", rows, None))
            return [0.5 + u for u in range(len(adapters))]

    store = AdapterStore(tmp_path / "adapters")
    ref = store.put(LIKE)
    train = run_job(Job("train", "bea", 0, "selector", (ref,), "selector", 7), Learner(), prepared / "pairs.parquet", store)
    score = run_job(Job("score", "dan", 0, "", (ref, ref), "selector", 8), Learner(), prepared / "pairs.parquet", store)
    assert [(kind, {r["client_id"] for r in rows}, {r["split"] for r in rows}, len(rows), seed) for kind, rows, seed in seen] == [
        ("train", {"bea"}, {"train"}, 6, 7), ("score", {"dan"}, {"validation"}, 2, None)]
    size = len(Path(ref.path).read_bytes())
    assert train.adapter == ref and train.metrics == {"rows": 6, "loss": 1.0, "bytes_received": size, "bytes_sent": size, "bytes_kept": 0}
    assert score.adapter is None and score.losses == (0.5, 1.5)


def test_a_job_that_was_done_is_not_done_twice(prepared, learner, tmp_path):
    store, calls = AdapterStore(tmp_path / "adapters"), []

    class Counting:
        def train(self, *arguments):
            calls.append(1)
            return learner.train(*arguments)

    job = Job("train", "ada", 0, "selector", (store.put(learner.initial_adapter(0)),), "selector", 3)
    first = run_job(job, Counting(), prepared / "pairs.parquet", store)
    assert run_job(job, Counting(), prepared / "pairs.parquet", store) == first == finished_update(job, store) and len(calls) == 1
    run_job(replace(job, round=1), Counting(), prepared / "pairs.parquet", store)
    assert len(calls) == 2
    Path(first.adapter.path).unlink()
    assert finished_update(job, store) is None
    assert run_job(job, Counting(), prepared / "pairs.parquet", store) == replace(first, metrics=pytest.approx(first.metrics, abs=10)) and len(calls) == 3


@pytest.mark.parametrize("left_over", ["", '{"adapter": "ab', "[]garbage"])
def test_a_half_written_answer_is_no_answer(prepared, learner, tmp_path, left_over):
    store = AdapterStore(tmp_path / "adapters")
    job = Job("train", "ada", 0, "selector", (store.put(learner.initial_adapter(0)),), "selector", 3)
    record = tmp_path / "updates" / f"{job.key()}.json"
    record.parent.mkdir()
    record.write_text(left_over)
    assert finished_update(job, store) is None
    run_job(job, learner, prepared / "pairs.parquet", store)
    assert finished_update(job, store) is not None


def test_scores_survive_their_record_also_where_they_are_nan(prepared, tmp_path):
    class Silent:
        def score(self, rows, adapters):
            return [math.nan] * len(adapters)

    store = AdapterStore(tmp_path / "adapters")
    job = Job("score", "ada", 0, "", (store.put(LIKE),), "selector", 3)
    run_job(job, Silent(), prepared / "pairs.parquet", store)
    assert math.isnan(finished_update(job, store).losses[0])


# --- whole federations

def final_bytes(state) -> bytes:
    return Path(state.adapters["selector"].path).read_bytes()


def run(recipe, prepared, folder, learner, until=None):
    commits = Commits(folder, "test")
    rounds_ = until or recipe.federation.rounds
    short = recipe.model_copy(update={"federation": recipe.federation.model_copy(update={"rounds": rounds_})})
    return run_federation(short, new_federation(recipe, prepared, commits, learner), prepared / "pairs.parquet", commits, learner), commits


def test_a_federation_runs_all_rounds_and_its_adapter_moves_and_is_finite(recipe, prepared, learner, tmp_path):
    state, commits = run(recipe, prepared, tmp_path / "f", learner)
    assert (state.round, state.step) == (3, 3)
    records = commits.latest()[1]
    assert [r["rounds_done"] for r in records] == [1, 2, 3] and all(len(r["clients"]) == 2 for r in records)
    assert all(r["server"]["server_step"] > 0 for r in records)
    final = commits.store.get(state.adapters["selector"])
    assert all(t.isfinite().all() and t.dtype == torch.float32 for t in final.values())
    assert len({r["adapters"]["selector"] for r in records}) == 3


@pytest.mark.parametrize("kept", [0, 2])
def test_a_federation_that_lost_its_last_commits_ends_with_the_same_bytes(recipe, prepared, learner, tmp_path, kept):
    whole, _ = run(recipe, prepared, tmp_path / "whole", learner)
    run(recipe, prepared, tmp_path / "cut", learner)
    for path in (tmp_path / "cut" / "commits").iterdir():
        if int(path.stem) > kept:
            path.unlink()
    for path in (tmp_path / "cut" / "updates").iterdir():
        path.unlink()                                   # so that all is trained again
    again, _ = run(recipe, prepared, tmp_path / "cut", learner)
    assert again.round == 3 and final_bytes(again) == final_bytes(whole)


def test_a_federation_stopped_within_a_round_trains_only_the_clients_that_are_left(recipe, prepared, learner, tmp_path, monkeypatch):
    whole, _ = run(recipe, prepared, tmp_path / "whole", learner)
    calls, real = [], learner.train

    class Killed(BaseException):
        pass

    def train(rows, adapter, seed, home=None, job=None):
        calls.append(rows[0]["client_id"])
        if len(calls) == 4:
            raise Killed
        return real(rows, adapter, seed)

    monkeypatch.setattr(learner, "train", train)
    with pytest.raises(Killed):
        run(recipe, prepared, tmp_path / "cut", learner)
    again, _ = run(recipe, prepared, tmp_path / "cut", learner)
    assert len(calls) == 6 + 1, "the one that was killed is the only one that is repeated"
    assert final_bytes(again) == final_bytes(whole)


def test_a_finished_federation_trains_nobody(recipe, prepared, learner, tmp_path, monkeypatch):
    state, _ = run(recipe, prepared, tmp_path / "f", learner)
    monkeypatch.setattr(learner, "train", lambda *_: pytest.fail("trained again"))
    assert run(recipe, prepared, tmp_path / "f", learner)[0] == state


def test_the_bytes_do_not_depend_on_what_the_resident_model_did_before(recipe, prepared, learner, tmp_path, debug):
    one, _ = run(recipe, prepared, tmp_path / "one", learner)
    torch.manual_seed(99)
    two, _ = run(recipe, prepared, tmp_path / "two", SelectorLearner(debug, "cpu"))
    other, _ = run(recipe.model_copy(update={"seed": 1}), prepared, tmp_path / "other", learner)
    assert final_bytes(one) == final_bytes(two) != final_bytes(other)


def test_clients_never_train_the_servers_object(recipe, prepared, learner, tmp_path, monkeypatch):
    """In the reference all share one model, and the server's old adapter is the last client's."""
    given, real = [], SelectorLearner.train

    def train(self, rows, adapter, seed, home=None, job=None):
        kept = {n: t.clone() for n, t in adapter.items()}
        trained_one, metrics = real(self, rows, adapter, seed)
        assert all(torch.equal(adapter[n], kept[n]) for n in kept), "what the client was sent is not changed"
        assert not {t.data_ptr() for t in trained_one.values()} & {p.data_ptr() for p in self.selector.slot.parameters}
        given.append((kept, trained_one))
        return trained_one, metrics

    monkeypatch.setattr(SelectorLearner, "train", train)
    state, commits = run(recipe, prepared, tmp_path / "f", learner, until=1)
    start = commits.store.get(state.federation.initial)
    assert len(given) == 2 and all(torch.equal(kept[n], start[n]) for kept, _ in given for n in start), "both start from the server's adapter"
    cohort = sorted(commits.latest()[1][0]["clients"])
    weights = [state.federation.weights[name] for name in cohort]
    final = commits.store.get(state.adapters["selector"])
    for n in final:
        by_hand = sum(w * new[n] for w, (_, new) in zip(weights, given, strict=True)) / sum(weights)
        assert torch.allclose(final[n], by_hand, atol=1e-6)


def test_the_backbone_is_loaded_once_for_all_clients_and_rounds(recipe, prepared, learner, tmp_path, monkeypatch):
    from components.models import selector

    loads, optimisers, real = [], [], selector.load_backbone
    monkeypatch.setattr(selector, "load_backbone", lambda *a: (loads.append(1), real(*a))[1])
    build = LEARNERS["selector"]
    monkeypatch.setitem(rounds.LEARNERS, "selector", lambda *a: (optimisers.append(1), build(*a))[1])
    commits = Commits(tmp_path / "f", "test")
    run_federation(recipe, new_federation(recipe, prepared, commits, learner), prepared / "pairs.parquet", commits)
    assert len(loads) == len(optimisers) == 1
    assert len(commits.latest()[1]) == 3


def test_a_damaged_server_adapter_stops_the_round_by_name(recipe, prepared, learner, tmp_path):
    state, _ = run(recipe, prepared, tmp_path / "f", learner, until=2)
    Path(state.adapters["selector"].path).write_bytes(b"garbage")
    with pytest.raises(AdapterError, match="is damaged"):
        run(recipe, prepared, tmp_path / "f", learner)
