"""Clients that took part in no round: what the server sends them, and what they choose and train."""

import json

import pytest
from datasets import Dataset

from components.config import UserError
from components.data.records import read_clients
from components.federation.clients.context import ClientContexts
from components.federation.methods.fedbiscuit import GroupingMemory
from components.federation.outcome import measure_jobs
from components.federation.protocol import Client
from components.federation.transport import InProcessTransport
from components.federation.unseen import join_clients, plan_joining, unseen_clients
from components.learning.pair_scores import PairFigures
from components.recipes import load_recipe
from tests.support.bare_loop import open_loop
from tests.support.bound_methods import (
    bind_method,
    get_values,
    make_update,
    play_round,
    put_values,
    small_federation,
)
from tests.support.prepared import pairs_by_owner

PAIRS = {"ada": 6, "bea": 2}
TRAINED = {"ada": [1.0, 0.0], "bea": [0.0, 4.0]}
UNSEEN = [
    Client(name=name, training_pairs=2, validation_pairs=0, weight=0.0, group=group)
    for name, group in (("eve", "one"), ("fay", "three"))
]


def after_rounds(store, method, rounds=1, **options):
    """The method, and its state after one round of two clients."""
    bound = bind_method(store, method, 2, rounds, **options)
    start = bound.start(small_federation(store, PAIRS, [0.5, -1.0], 2), 0)
    return bound, play_round(store, bound, start, TRAINED)


def joined(store, bound, state, values):
    """What unseen clients end with, where they train to these values and keep state."""
    method = bound.method
    admitted = method.admit(state, UNSEEN)
    sent = []
    for _ in range(method.joining(bound.config, 16).steps):
        jobs = plan_joining(method, admitted, bound.config, store)
        sent.append({job.client: get_values(store, job.adapter) for job in jobs})
        updates = [make_update(job, put_values(store, values[job.client]), kept=1) for job in jobs]
        admitted = method.join(admitted, updates)
    return method.outcome(admitted), sent


def test_a_shared_model_is_that_of_the_server_and_no_pair_is_used(store):
    bound, state = after_rounds(store, "feddpo")
    record, sent = joined(store, bound, state, {})
    assert sent == []
    assert record == bound.outcome(state)
    assert bound.method.joining(bound.config, 16).note == "the server's model as it is"


OWN = {"eve": [7.0, 7.0], "fay": [8.0, 8.0]}


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedpdpo"])
def test_private_modules_are_trained_from_the_servers_adapter_which_the_client_keeps_using(store, method):
    bound, state = after_rounds(store, method)
    record, sent = joined(store, bound, state, OWN)
    mean = [0.75, 1.0]  # (6 ada + 2 bea) / 8
    assert sent == [{"eve": mean, "fay": mean}]
    assert (record.own, record.clients) == ("modules", ["eve", "fay"])
    assert get_values(store, *record.adapters_of("eve")) == mean
    assert all(record.job_keys.values())


@pytest.mark.parametrize("method", ["drift", "fedamp"])
def test_where_the_server_has_adapters_of_clients_alone_an_unseen_one_starts_from_the_initial(store, method):
    bound, state = after_rounds(store, method)
    record, sent = joined(store, bound, state, OWN)
    assert sent == [{"eve": [0.5, -1.0], "fay": [0.5, -1.0]}]
    assert {name: get_values(store, digest) for name, digest in record.adapters.items()} == OWN
    assert record.assignment == {"eve": "eve", "fay": "fay"}
    assert (
        "from the initial adapter: the server has no shared one" in bound.method.joining(bound.config, 8).note
    )


def test_clients_that_train_alone_start_from_the_initial_adapter(store):
    for method in ("feddpo", "fedbis"):
        bound, state = after_rounds(store, method, average_over="self")
        record, sent = joined(store, bound, state, OWN)
        assert sent == [{"eve": [0.5, -1.0], "fay": [0.5, -1.0]}]
        assert (record.votes, record.clients) == (False, ["eve", "fay"])
        assert {name: get_values(store, digest) for name, digest in record.adapters.items()} == OWN


def test_a_client_fine_tunes_the_average_for_as_many_rounds_as_the_others(store):
    bound, state = after_rounds(store, "feddpo", rounds=3, finetune_rounds=2)
    assert bound.method.joining(bound.config, 8).after == state.round == 1
    record, sent = joined(store, bound, state, OWN)
    mean = [0.75, 1.0]
    assert sent == [{"eve": mean, "fay": mean}, OWN]
    assert {name: get_values(store, digest) for name, digest in record.adapters.items()} == OWN


def test_a_client_of_a_group_has_the_mean_of_its_group_and_that_of_another_one_the_initial(store):
    bound = bind_method(store, "feddpo", 2, 1, average_over="group")
    federation = small_federation(store, PAIRS, [0.5, -1.0], 2)
    groups = {"ada": "one", "bea": "two"}
    clients = tuple(one.model_copy(update={"group": groups[one.name]}) for one in federation.clients)
    federation = federation.model_copy(update={"clients": clients})
    state = play_round(store, bound, bound.start(federation, 0), TRAINED)
    record, sent = joined(store, bound, state, {})
    assert sent == []
    values = {name: get_values(store, digest) for name, digest in record.adapters.items()}
    assert values == {"eve": [1.0, 0.0], "fay": [0.5, -1.0]}


def test_an_adaptation_and_examples_need_no_step(store):
    bound, state = after_rounds(store, "perfedavg")
    record, sent = joined(store, bound, state, {})
    assert (sent, record.own, record.clients) == ([], "modules", ["eve", "fay"])
    few_shot = bind_method(store, "few_shot", 2, shots=4)
    method = few_shot.method
    start = method.start(small_federation(store, PAIRS, [0.5], 2), 0)
    assert sorted(method.outcome(method.admit(start, UNSEEN)).job_keys) == ["eve", "fay"]
    assert method.joining(few_shot.config, 2).note == "the base policy with at most 2 own pairs as examples"


def test_an_unseen_client_chooses_the_selector_with_the_least_loss_on_its_training_pairs(store):
    bound = bind_method(store, "fedbiscuit", 2, 8, selectors=3, warmup_rounds=1)
    start = bound.start(small_federation(store, {"ada": 6, "bea": 2, "cyd": 2}, [0.5], 2), 0)
    adapters = {f"selector-{n}": put_values(store, [float(n)]) for n in range(3)}
    memory = GroupingMemory(assignment=dict.fromkeys(("ada", "bea", "cyd"), "selector-0"))
    state = start.model_copy(update={"round": 8, "adapters": adapters, "memory": memory})
    admitted = bound.method.admit(state, UNSEEN)
    jobs = plan_joining(bound.method, admitted, bound.config, store)
    assert [(job.client, job.adapters) for job in jobs] == [
        (name, tuple(adapters.values())) for name in ("eve", "fay")
    ]
    assert all((job.losses, job.split) == (True, "train") for job in jobs)
    # A selector has diverged, and two of fay's losses are equal.
    losses = {"eve": [float("nan"), 0.2, 0.5], "fay": [0.6, 0.9, 0.6]}
    record = bound.outcome(
        bound.method.join(admitted, [make_update(job, losses=losses[job.client]) for job in jobs])
    )
    assert record.assignment == {"eve": "selector-1", "fay": "selector-0"}
    measured = measure_jobs(record, "test", {"eve": None, "fay": None})
    assert [job.assigned for job in measured] == [1, 0]


# --- on a tiny model


@pytest.fixture(scope="module")
def unseen_pairs(tmp_path_factory):
    """A prepared folder of two clients that take part in no round."""
    folder = tmp_path_factory.mktemp("prepared") / "unseen"
    folder.mkdir()
    owners = {name: {"train": 4, "validation": 0, "test": 2} for name in ("eve", "fay")}
    Dataset.from_list(pairs_by_owner(owners)).to_parquet(folder / "pairs.parquet")
    (folder / "clients.json").write_text(
        json.dumps({name: {**counts, "group": None} for name, counts in owners.items()})
    )
    return folder / "pairs.parquet"


METHODS = {
    "fedbis": ["federation.method=fedbis"],
    "fedbiscuit": [
        "federation.method=fedbiscuit",
        "federation.options={selectors: 3, warmup_rounds: 1}",
        "federation.rounds=4",
    ],
    "alone": ["federation.method=fedbis", "federation.options.average_over=self"],
    "rule": ["federation.method=rule"],
    "few_shot_selector": ["federation.method=few_shot_selector", "federation.options.shots=1"],
    "feddpo": ["federation.method=feddpo"],
    "fedpdpo": ["federation.method=fedpdpo"],
    "drift": ["federation.method=drift"],
    "few_shot": ["federation.method=few_shot", "federation.options.shots=1"],
    "perfedavg": ["federation.method=perfedavg", "federation.options.inner_steps=1"],
}


@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS)
def test_unseen_clients_are_measured_and_no_round_knows_them(settings, prepared, unseen_pairs, tmp_path):
    recipe = load_recipe("debug", [*settings, "federation.batch_size=2"])
    loop = open_loop(recipe, prepared, tmp_path)
    state = loop.run()
    contexts = ClientContexts(loop.commits.store, unseen_pairs)
    transport = InProcessTransport(recipe, contexts, {"": loop.trainer})
    clients = unseen_clients(read_clients(unseen_pairs.parent), {})
    committed = loop.commits.latest(loop.bound.memory_type)
    trained = {name for record in (committed[1] if committed else []) for name in record.clients}
    assert trained <= set(read_clients(prepared))
    figures = []
    for _ in range(2):
        record = join_clients(
            loop.bound.method, state, clients, transport, recipe.federation, loop.commits.store
        )
        jobs = measure_jobs(record, "test", {"eve": None, "fay": None}, state.round)
        figures.append([PairFigures.model_validate(update.output) for update in transport.run(jobs)])
    assert [one.pairs for one in figures[0]] == [2, 2]
    assert figures[0] == figures[1]
    assert loop.commits.latest(loop.bound.memory_type) == committed
    loop.commits.discard(keep_every=1)
    assert not list((loop.commits.folder / "updates").glob("*.json"))


def test_a_client_without_an_answer_ends_the_measurement(store):
    bound, state = after_rounds(store, "fedper")

    class Silent:
        def run(self, jobs):
            return []

    with pytest.raises(UserError, match="2 of 2 clients have no answer to a job 'train'"):
        join_clients(bound.method, state, UNSEEN, Silent(), bound.config, store)
