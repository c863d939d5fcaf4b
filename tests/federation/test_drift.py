"""DRIFT's rounds on adapters of three values: each client's own adapter, its graph, its neighbours' weights; and no others'."""

import itertools
import json

import numpy as np
import pytest
import torch

from components.config import FederationConfig, RecipeError
from components.federation import drift, graph
from components.federation.commits import Commits
from components.federation.rounds import close_step
from components.federation.strategy import Update, build_federation, build_strategy
from components.models.adapters import AdapterError, AdapterStore

NAMES = ("ada", "bea", "cyd", "dan", "eve")
START = torch.zeros(3)
# two groups: ada, bea, cyd near (1, 0, 0); dan, eve near (0, 0, 2)
TRAINED = {"ada": [1.0, 0.0, 0.0], "bea": [1.1, 0.1, 0.0], "cyd": [0.9, 0.0, 0.1], "dan": [0.0, 0.1, 2.0], "eve": [0.1, 0.0, 2.2]}


@pytest.fixture
def store(tmp_path):
    return AdapterStore(tmp_path / "adapters")


@pytest.fixture
def federation(store):
    return build_federation({n: {"train": 10 * (k + 1), "validation": 1, "test": 1} for k, n in enumerate(NAMES)}, store.put({"a": START}), 5)


def strategy(store, clients=5, **options):
    return build_strategy(FederationConfig(method="drift", clients_per_round=clients, options=options), store)


def answers(store, jobs, trained=TRAINED):
    return [Update(job, store.put({"a": torch.tensor(trained[job.client])}), (), {}) for job in jobs]


def round_of(method, store, state, trained=TRAINED):
    return method.aggregate(state, answers(store, method.plan(state, state.round), trained))


def test_everybody_starts_from_the_same_adapter_and_trains_its_own(store, federation):
    method = strategy(store)
    state = method.init(federation, 3)
    assert method.personal and method.trains == "dpo" and state.assigned == {name: name for name in NAMES} and set(state.adapters.values()) == {federation.initial}
    new = round_of(method, store, state)
    for job in method.plan(new, 1):
        assert job.adapters == (new.adapters[job.client],) and job.slot == job.client and job.objective == "dpo"
    assert len({ref.hash for ref in new.adapters.values()}) == 5


@pytest.mark.parametrize("options", [{"variant": "mst"}, {"variant": "sp", "delta": 0.0}, {"variant": "sp", "delta": 0.3, "divergence": "histogram"}])
def test_each_client_gets_equation_14_over_its_own_neighbours(store, federation, options):
    method = strategy(store, **options)
    new = round_of(method, store, method.init(federation, 0))
    divergences = graph.divergence_matrix([{"a": torch.tensor(TRAINED[name])} for name in NAMES], options.get("divergence", "softmax"))
    clients = graph.client_graph(divergences, NAMES)
    for name in NAMES:
        weights = graph.mst_weights(clients, name) if options["variant"] == "mst" else graph.shortest_path_weights(clients, name, options["delta"])
        expected = sum(weight * np.array(TRAINED[member]) for member, weight in weights.items())
        assert store.get(new.adapters[name])["a"].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
        assert new.log[f"{name}/members"] == len(weights) >= 2 and new.memory["weights"][name] == pytest.approx(weights)


def test_with_the_shortest_path_groups_do_not_mix(store, federation):
    method = strategy(store, variant="sp", delta=0.0)
    new = round_of(method, store, method.init(federation, 0))
    for name, weights in new.memory["weights"].items():
        assert {(member in ("dan", "eve")) for member in weights} == {name in ("dan", "eve")}
        assert (store.get(new.adapters[name])["a"][2] > 1) == (name in ("dan", "eve"))


def test_delta_decides_how_far_along_a_chain_a_client_is_aggregated(store, federation):
    chain = {name: [0.2 * place, -0.1 * place, 0.0] for place, name in enumerate(NAMES)}
    members = {}
    for delta in (0.0, 0.25, 1.0):  # of ada's paths, of 1, 2, 3 and 4 edges, 0.1, 0.2, 0.3 and 0.4 of all
        method = strategy(store, variant="sp", delta=delta)
        new = round_of(method, store, method.init(federation, 0), chain)
        members[delta] = list(new.memory["weights"]["ada"])
        mixed = sum(weight * np.array(chain[name]) for name, weight in new.memory["weights"]["ada"].items())
        assert store.get(new.adapters["ada"])["a"].tolist() == pytest.approx(mixed.tolist(), abs=1e-6)
    assert members == {0.0: ["ada", "bea"], 0.25: ["ada", "bea", "cyd"], 1.0: list(NAMES)}


def test_clients_that_are_not_sampled_or_do_not_answer_keep_what_they_have_and_are_nobodys_neighbour(store, federation):
    method = strategy(store, clients=4)
    state = round_of(strategy(store), store, method.init(federation, 0))
    jobs = method.plan(state, 1)
    _, *present = answers(store, jobs, {name: [v + 1 for v in values] for name, values in TRAINED.items()})
    new = method.aggregate(state, present)
    here = {update.job.client for update in present}
    assert len(here) == 3
    for name in NAMES:
        assert (new.adapters[name] == state.adapters[name]) == (name not in here)
    assert set(new.memory["weights"]) == here == {node["id"] for node in new.memory["graph"]["nodes"]} and {m for w in new.memory["weights"].values() for m in w} <= here


def test_one_answer_is_that_clients_own_adapter(store, federation):
    method = strategy(store, clients=1)
    state = method.init(federation, 0)
    (only,) = answers(store, method.plan(state, 0))
    new = method.aggregate(state, [only])
    assert store.get(new.adapters[only.job.client])["a"].tolist() == pytest.approx(TRAINED[only.job.client]) and new.memory["tree"] == []


def test_identical_adapters_stay_what_they_are(store, federation):
    method = strategy(store, variant="sp", delta=1.0)
    new = round_of(method, store, method.init(federation, 0), {name: [1.0, 2.0, 3.0] for name in NAMES})
    assert all(store.get(ref)["a"].tolist() == pytest.approx([1.0, 2.0, 3.0]) for ref in new.adapters.values()) and new.log["divergence"] == 0


def test_the_order_of_the_answers_has_no_say_and_a_commit_gives_the_state_back(tmp_path, store, federation):
    method = strategy(store)
    state = method.init(federation, 0)
    updates = answers(store, method.plan(state, 0))
    results = [method.aggregate(state, order) for order in itertools.islice(itertools.permutations(updates), 0, 120, 23)]
    assert all(result == results[0] for result in results)
    commits = Commits(tmp_path, "x")
    new, record = close_step(method, state, method.plan(state, 0), updates, 1.0, commits)
    again, records = commits.latest()
    assert again == new == results[0] and json.loads(json.dumps(record)) == records[0] and record["memory"]["graph"] == new.memory["graph"] and record["seconds"] > 0
    assert method.plan(again, 1) == method.plan(new, 1)


def test_a_damaged_adapter_is_not_aggregated(store, federation):
    method = strategy(store)
    state = method.init(federation, 0)
    updates = answers(store, method.plan(state, 0))
    path = store.root / f"{updates[2].adapter.hash}.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(AdapterError, match="is damaged"):
        method.aggregate(state, updates)
    path.unlink()
    with pytest.raises(AdapterError, match="is missing"):
        method.aggregate(state, updates)


def test_adapters_that_are_opened_are_read_from_their_files(store):
    refs = [store.put({"a": torch.tensor([1.0]), "b": torch.tensor([[2.0]])}), store.put({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])})]
    with store.opened(refs) as adapters:
        assert [dict(adapter) for adapter in adapters] == [store.get(ref) for ref in refs] and len(adapters[0]) == 2
        with pytest.raises(KeyError):
            adapters[0]["c"]


def test_an_ensemble_is_refused_and_so_is_a_delta_that_is_no_share(store):
    with pytest.raises(RecipeError, match="drift trains 1 adapter"):
        drift.build(FederationConfig(method="drift", selectors=3), drift.Options(), store)
    with pytest.raises(ValueError, match="less than or equal to 1"):
        strategy(store, delta=1.5)
