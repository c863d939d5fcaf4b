"""DRIFT on adapters of three values: each client's own adapter, its neighbors, and their weights."""

import itertools

import numpy as np
import pytest
import torch

from components.config import RecipeError
from components.federation import graph
from components.federation.commits import Commits
from components.federation.methods.drift import GraphMemory
from components.models.store import AdapterError
from components.recipes import load_recipe
from tests.support.bound_methods import bind_method, get_values, make_updates, play_round, small_federation

NAMES = ("ada", "bea", "cyd", "dan", "eve")
TRAINED = {
    "ada": [1.0, 0.0, 0.0],
    "bea": [1.1, 0.1, 0.0],
    "cyd": [0.9, 0.0, 0.1],
    "dan": [0.0, 0.1, 2.0],
    "eve": [0.1, 0.0, 2.2],
}
"""Two groups: ada, bea and cyd are close to (1, 0, 0), dan and eve to (0, 0, 2)."""
SECOND_GROUP = {"dan", "eve"}
CHAIN = {name: [0.2 * place, -0.1 * place, 0.0] for place, name in enumerate(NAMES)}
SHIFTED = {name: [value + 1 for value in values] for name, values in TRAINED.items()}


@pytest.fixture
def federation(store):
    pairs = {name: 10 * (place + 1) for place, name in enumerate(NAMES)}
    return small_federation(store, pairs, [0.0, 0.0, 0.0], clients_per_round=5)


def drift(store, clients=5, **options):
    return bind_method(store, "drift", clients, **options)


def first_round(store, bound, federation, trained=TRAINED):
    return play_round(store, bound, bound.start(federation, 0), trained)


def mix(weights, trained=TRAINED):
    """The hand-computed eq. 14."""
    return sum(weight * np.array(trained[member]) for member, weight in weights.items()).tolist()


def test_all_clients_start_from_the_same_adapter(store, federation):
    state = drift(store).start(federation, 3)
    assert list(state.adapters) == list(NAMES)
    assert set(state.adapters.values()) == {federation.initial}


def test_each_client_trains_its_own_adapter_and_ends_with_it(store, federation):
    bound = drift(store)
    new = first_round(store, bound, federation)
    jobs = bound.plan(new)
    assert {job.client: job.adapter for job in jobs} == new.adapters
    assert all(job.adapter_name == job.client for job in jobs)
    assert len(set(new.adapters.values())) == 5
    outcome = bound.outcome(new)
    assert outcome.has_client_policies
    assert outcome.adapters == new.adapters


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "mst"},
        {"variant": "sp", "delta": 0.0},
        {"variant": "sp", "delta": 0.3, "divergence": "histogram"},
    ],
    ids=["mst", "shortest path", "longer path"],
)
def test_each_client_gets_equation_14_over_its_own_neighbors(store, federation, options):
    new = first_round(store, drift(store, **options), federation)
    adapters = [{"a": torch.tensor(TRAINED[name])} for name in NAMES]
    divergences = graph.divergence_matrix(adapters, options.get("divergence", "softmax"))
    clients = graph.client_graph(divergences, NAMES)
    for name in NAMES:
        if options["variant"] == "mst":
            weights = graph.mst_weights(clients, name)
        else:
            weights = graph.shortest_path_weights(clients, name, options["delta"])
        assert sum(weights.values()) == pytest.approx(1)
        assert len(weights) >= 2
        assert get_values(store, new.adapters[name]) == pytest.approx(mix(weights), abs=1e-6)
        assert new.memory.weights[name] == pytest.approx(weights)
        assert new.metrics.scalars[f"{name}/members"] == len(weights)


def test_with_the_shortest_path_groups_do_not_mix(store, federation):
    new = first_round(store, drift(store, variant="sp", delta=0.0), federation)
    for name, weights in new.memory.weights.items():
        assert {member in SECOND_GROUP for member in weights} == {name in SECOND_GROUP}
        assert (get_values(store, new.adapters[name])[2] > 1) == (name in SECOND_GROUP)


@pytest.mark.parametrize(
    ("delta", "members"), [(0.0, ["ada", "bea"]), (0.25, ["ada", "bea", "cyd"]), (1.0, [*NAMES])]
)
def test_delta_sets_how_far_along_a_chain_a_client_is_aggregated(store, federation, delta, members):
    """ada's paths have 1, 2, 3 and 4 edges: 0.1, 0.2, 0.3 and 0.4 of all edges."""
    new = first_round(store, drift(store, variant="sp", delta=delta), federation, CHAIN)
    weights = new.memory.weights["ada"]
    assert list(weights) == members
    assert get_values(store, new.adapters["ada"]) == pytest.approx(mix(weights, CHAIN), abs=1e-6)


def test_clients_that_are_not_sampled_or_fail_keep_their_adapter_and_are_no_neighbors(store, federation):
    state = first_round(store, drift(store), federation)
    bound = drift(store, clients=4)
    _, *updates = make_updates(store, bound.plan(state), SHIFTED)
    new = bound.aggregate(state, updates)
    present = {update.client for update in updates}
    assert len(present) == 3
    for name in NAMES:
        assert (new.adapters[name] == state.adapters[name]) == (name not in present)
    assert set(new.memory.weights) == present
    assert {node["id"] for node in new.memory.graph["nodes"]} == present
    for weights in new.memory.weights.values():
        assert set(weights) <= present


def test_a_single_update_becomes_that_clients_adapter_unchanged(store, federation):
    bound = drift(store, clients=1)
    state = bound.start(federation, 0)
    (job,) = bound.plan(state)
    new = bound.aggregate(state, make_updates(store, [job], TRAINED))
    assert get_values(store, new.adapters[job.client]) == pytest.approx(TRAINED[job.client])
    assert new.memory.tree == []
    assert "divergence" not in new.metrics.scalars


def test_equal_adapters_stay_as_they_are(store, federation):
    equal = dict.fromkeys(NAMES, (1.0, 2.0, 3.0))
    new = first_round(store, drift(store, variant="sp", delta=1.0), federation, equal)
    for digest in new.adapters.values():
        assert get_values(store, digest) == pytest.approx([1.0, 2.0, 3.0])
    assert new.metrics.scalars["divergence"] == 0


def test_the_result_does_not_depend_on_the_order_of_arrival(store, federation):
    bound = drift(store)
    state = bound.start(federation, 0)
    updates = make_updates(store, bound.plan(state), TRAINED)
    orders = itertools.islice(itertools.permutations(updates), 0, 120, 23)
    results = [bound.aggregate(state, order) for order in orders]
    assert all(result == results[0] for result in results)


def test_a_commit_restores_the_state_and_its_graph(tmp_path, store, federation):
    bound = drift(store)
    state = bound.start(federation, 0)
    jobs = bound.plan(state)
    commits = Commits(tmp_path, "x")
    new, record = bound.close_step(state, jobs, make_updates(store, jobs, TRAINED), 1.0, commits)
    restored, records = commits.latest(GraphMemory)
    assert restored == new
    assert records == [record]
    assert record.memory["graph"] == new.memory.graph
    assert record.aggregation_seconds > 0
    assert bound.plan(restored) == bound.plan(new)


@pytest.mark.parametrize("damage", ["damaged", "missing"])
def test_a_damaged_adapter_is_not_aggregated(store, federation, damage):
    bound = drift(store)
    state = bound.start(federation, 0)
    updates = make_updates(store, bound.plan(state), TRAINED)
    path = store.path(updates[2].adapter)
    if damage == "damaged":
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    else:
        path.unlink()
    with pytest.raises(AdapterError, match=f"is {damage}"):
        bound.aggregate(state, updates)


def test_opened_adapters_read_their_tensors_from_the_files(store):
    hashes = [store.put({"a": torch.tensor([n]), "b": torch.tensor([[n + 1]])}) for n in (1.0, 3.0)]
    assert store.open(hashes) == [store.get(digest) for digest in hashes]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{delta: 1.5}", r"federation\.options\.delta' is 1\.5.*less than or equal to 1"),
        ("{selectors: 3}", r"unknown key 'federation\.options\.selectors'"),
        ("{variant: ring}", r"federation\.options\.variant' is 'ring'"),
    ],
)
def test_options_that_drift_does_not_have_are_refused(options, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe("debug", ["federation.method=drift", f"federation.options={options}"])
