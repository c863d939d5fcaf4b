"""Whose adapters are averaged: all clients', those of a group, or nobody's; and rounds of fine-tuning."""

import pytest

from components.config import RecipeError
from components.federation.outcome import measure_jobs
from components.federation.protocol import build_federation
from components.recipes import load_recipe
from tests.support import prepared as prepared_data
from tests.support.bare_loop import run_bare_loop
from tests.support.bound_methods import bind_method, get_values, make_updates, play_round, put_values

PAIRS = {"ada": 6, "bea": 2, "cyd": 3, "dan": 1}
GROUPS = {"ada": "one", "bea": "one", "cyd": "two", "dan": "two"}
TRAINED = {"ada": [1.0, 0.0], "bea": [0.0, 4.0], "cyd": [2.0, 2.0], "dan": [6.0, -2.0]}


def federation(store, clients_per_round=4, groups=GROUPS):
    counts = {name: {"train": n, "validation": 1, "test": 1} for name, n in PAIRS.items()}
    return build_federation(counts, put_values(store, [0.5, -1.0]), clients_per_round, groups)


def values_by_client(store, state):
    return {name: get_values(store, digest) for name, digest in state.adapters.items()}


@pytest.mark.parametrize("method", ["feddpo", "fedavg", "fedbis", "fedprox", "fedper", "perfedavg"])
def test_clients_that_train_alone_keep_their_own_adapter_and_start_from_it(store, method):
    bound = bind_method(store, method, 2, average_over="self")
    start = bound.start(federation(store, 2), 7)
    jobs = bound.plan(start)
    state = play_round(store, bound, start, TRAINED)
    sampled = {job.client for job in jobs}
    assert len(sampled) == 2
    assert values_by_client(store, state) == {
        name: TRAINED[name] if name in sampled else [0.5, -1.0] for name in PAIRS
    }
    assert all(job.adapter == state.adapters[job.client] for job in bound.plan(state))


def test_they_have_the_clients_steps_and_seeds_of_averaged_ones(store):
    rounds = []
    for average_over in ("all", "self"):
        bound = bind_method(store, "feddpo", 2, average_over=average_over)
        state = bound.start(federation(store, 2), 3)
        drawn = []
        for _ in range(5):
            drawn.append([(job.client, job.round, job.seed) for job in bound.plan(state)])
            state = play_round(store, bound, state, TRAINED)
        rounds.append(drawn)
    assert rounds[0] == rounds[1]


def test_the_members_of_a_group_share_the_mean_of_those_that_trained(store):
    bound = bind_method(store, "feddpo", 4, average_over="group")
    state = play_round(store, bound, bound.start(federation(store), 0), TRAINED)
    one, two = [0.75, 1.0], [3.0, 1.0]  # (6 ada + 2 bea) / 8 and (3 cyd + dan) / 4
    expected = {"ada": one, "bea": one, "cyd": two, "dan": two}
    for name, own in values_by_client(store, state).items():
        assert own == pytest.approx(expected[name])
    assert state.adapters["ada"] == state.adapters["bea"] != state.adapters["cyd"] == state.adapters["dan"]
    assert state.metrics.scalars["one/server_step"] == pytest.approx((0.25**2 + 2.0**2) ** 0.5)
    bound = bind_method(store, "feddpo", 1, average_over="group")
    start = bound.start(federation(store, 1), 0)
    (job,) = bound.plan(start)
    state = play_round(store, bound, start, TRAINED)
    group = {name for name in PAIRS if GROUPS[name] == GROUPS[job.client]}
    assert {
        name for name, own in values_by_client(store, state).items() if own == TRAINED[job.client]
    } == group


def test_in_the_last_rounds_all_clients_train_alone_from_the_average(store):
    bound = bind_method(store, "feddpo", 2, rounds=3, finetune_rounds=2)
    state = bound.start(federation(store, 2), 0)
    sampled = [job.client for job in bound.plan(state)]
    state = play_round(store, bound, state, TRAINED)
    weights = {name: PAIRS[name] / sum(PAIRS[one] for one in sampled) for name in sampled}
    mean = [sum(weights[name] * TRAINED[name][n] for name in sampled) for n in range(2)]
    assert all(own == pytest.approx(mean) for own in values_by_client(store, state).values())
    for _ in range(2):
        jobs = bound.plan(state)
        assert [job.client for job in jobs] == sorted(PAIRS)
        state = play_round(store, bound, state, TRAINED)
        assert values_by_client(store, state) == TRAINED
    assert state.round == 3


@pytest.mark.parametrize("aggregator", ["participation", "paper", "exact", "trimmed"])
def test_an_adapter_of_one_client_is_the_clients_with_every_aggregator(store, aggregator):
    bound = bind_method(store, "feddpo", 4, average_over="self", aggregator={"kind": aggregator})
    start = bound.start(federation(store), 0)
    updates = make_updates(store, bound.plan(start), TRAINED)
    state = bound.aggregate(start, updates)
    assert state.adapters == {update.client: update.adapter for update in updates}


def test_the_outcome_has_each_clients_adapter_and_equal_selectors_once(store):
    bound = bind_method(store, "feddpo", 4, average_over="group")
    state = play_round(store, bound, bound.start(federation(store), 0), TRAINED)
    outcome = bound.outcome(state)
    assert outcome.has_client_policies
    assert outcome.clients == sorted(PAIRS)
    assert outcome.adapters_of("bea") == (state.adapters["ada"],)
    bound = bind_method(store, "fedbis", 4, average_over="group")
    state = play_round(store, bound, bound.start(federation(store), 0), TRAINED)
    record = bound.outcome(state)
    assert not record.votes
    jobs = measure_jobs(record, "test", {"bea": None, "dan": None})
    assert [job.adapters for job in jobs] == [(state.adapters["ada"],), (state.adapters["cyd"],)]
    assert record.assignment == {"ada": "ada", "bea": "ada", "cyd": "cyd", "dan": "cyd"}
    assert record.adapters == {name: state.adapters[name] for name in ("ada", "cyd")}
    bound = bind_method(store, "fedper", 4, average_over="self")
    state = play_round(store, bound, bound.start(federation(store), 0), TRAINED)
    outcome = bound.outcome(state)
    assert (outcome.has_client_policies, outcome.own, outcome.clients) == (True, "modules", sorted(PAIRS))


def test_groups_that_the_data_do_not_have_are_refused(store):
    bound = bind_method(store, "feddpo", 4, average_over="group")
    with pytest.raises(RecipeError, match=r"the groups of 1 of 4 clients \(such as dan\)"):
        bound.start(federation(store, groups=GROUPS | {"dan": None}), 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["federation.method=fedbiscuit", "federation.options.average_over=self"],
            "'fedbiscuit' averages over",
        ),
        (
            ["federation.method=feddpo", "federation.options.finetune_rounds=3"],
            "leaves no round that averages",
        ),
        (
            ["federation.method=feddpo", "federation.options={average_over: self, finetune_rounds: 1}"],
            "leave out finetune_rounds",
        ),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, words):
    with pytest.raises(RecipeError, match=words):
        load_recipe("debug", settings)


@pytest.mark.parametrize("method", ["feddpo", "fedbis"])
def test_alone_a_client_ends_with_the_bytes_of_a_federation_of_itself(method, tmp_path, monkeypatch):
    settings = [f"federation.method={method}", "federation.rounds=2", "federation.batch_size=2"]
    ends = []
    for others, clients, average_over in ((8, 4, "self"), (0, 1, "all")):
        monkeypatch.setattr(
            prepared_data, "TRAINING_PAIRS", {"ada": 8} | dict.fromkeys(("bea", "cyd", "dan"), others)
        )
        prepared = prepared_data.write_prepared(tmp_path / f"data-{others}")
        own = [f"federation.clients_per_round={clients}", f"federation.options.average_over={average_over}"]
        loop = run_bare_loop(load_recipe("debug", [*settings, *own]), prepared, tmp_path / f"runs-{others}")
        ends.append(loop.records[-1].adapters)
    alone, federated = ends
    assert [alone["ada"]] == list(federated.values())
    assert len(set(alone.values())) == 4
