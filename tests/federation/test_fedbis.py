"""FedBis on adapters of three values: FedBiscuit appendix A.1 with hand-computed results."""

import itertools

import pytest
import torch
from pydantic import ValidationError

from components.config import RecipeError
from components.federation.method import AveragingMethod
from components.federation.protocol import build_federation, sent_adapters
from components.federation.sampling import sample_clients
from components.models.store import AdapterStore
from components.recipes import load_recipe
from tests.support.bound_methods import (
    bind_method,
    get_values,
    make_update,
    make_updates,
    play_round,
    put_values,
    small_federation,
)

PAIRS = {"ada": 40, "bea": 30, "cyd": 20, "dan": 10}
START = [1.0, 0.0, -1.0]
TRAINED = {"ada": [2.0, 0.0, 0.0], "bea": [0.0, 4.0, 0.0], "cyd": [1.0, 1.0, 1.0], "dan": [0.0, 0.0, 8.0]}
WEIGHTINGS = ("paper", "participation", "uniform")


@pytest.fixture
def federation(store):
    return small_federation(store, PAIRS, START, clients_per_round=2)


def fedbis(store, aggregator="participation", clients=2):
    return bind_method(store, "fedbis", clients, aggregator=aggregator)


def weighted_values(clients, factor):
    """factor * sum of p_m phi_m over some clients."""
    return [factor * sum(PAIRS[name] / 100 * TRAINED[name][i] for name in clients) for i in range(3)]


def aggregate(store, bound, federation, clients=None):
    """The state after the first round, in which all planned clients, or only some, have answered."""
    state = bound.start(federation, seed=0)
    jobs = [job for job in bound.plan(state) if clients is None or job.client in clients]
    return jobs, bound.aggregate(state, make_updates(store, jobs, TRAINED))


def test_a_clients_weight_is_its_share_of_the_training_pairs_and_without_any_it_does_not_participate(store):
    counts = {name: {"train": pairs, "validation": 1} for name, pairs in PAIRS.items()}
    counts["eve"] = {"train": 0, "validation": 5}
    federation = build_federation(counts, put_values(store, START), 1)
    assert federation.weights == {"ada": 0.4, "bea": 0.3, "cyd": 0.2, "dan": 0.1}


def test_a_round_of_more_clients_than_participate_is_refused(store):
    with pytest.raises(RecipeError, match=r"federation\.clients_per_round is 5.*only 4 clients.*at most 4"):
        small_federation(store, PAIRS, START, clients_per_round=5)


def test_equation_8_weights_the_sampled_clients_by_m_over_a_times_p(store, federation):
    jobs, new = aggregate(store, fedbis(store, "paper"), federation)
    sampled = [job.client for job in jobs]
    assert len(sampled) == 2
    expected = weighted_values(sampled, 4 / 2)
    assert get_values(store, new.adapters["selector"]) == pytest.approx(expected)
    weight_sum = 2 * sum(PAIRS[name] for name in sampled) / 100
    assert new.metrics.scalars["weight_sum"] == pytest.approx(weight_sum)


def test_participation_weights_sum_to_one_over_the_sampled_clients(store, federation):
    jobs, new = aggregate(store, fedbis(store), federation)
    sampled = [job.client for job in jobs]
    expected = weighted_values(sampled, 100 / sum(PAIRS[name] for name in sampled))
    assert get_values(store, new.adapters["selector"]) == pytest.approx(expected)
    assert new.metrics.scalars["weight_sum"] == 1.0


def test_uniform_weights_are_one_over_the_number_of_clients_that_answered(store, federation):
    jobs, new = aggregate(store, fedbis(store, "uniform", clients=4), federation, ("ada", "dan", "bea"))
    expected = [sum(TRAINED[job.client][i] for job in jobs) / 3 for i in range(3)]
    assert get_values(store, new.adapters["selector"]) == pytest.approx(expected)
    assert new.metrics.scalars["weight_sum"] == 1.0


@pytest.mark.parametrize("aggregator", ["paper", "participation"])
def test_with_all_clients_both_normalizations_are_fedavg(store, federation, aggregator):
    _, new = aggregate(store, fedbis(store, aggregator, clients=4), federation)
    assert get_values(store, new.adapters["selector"]) == pytest.approx(weighted_values(PAIRS, 1.0))


def test_equation_8_is_the_mean_of_all_clients_in_expectation_over_the_samples(store, federation):
    bound = fedbis(store, "paper")
    state = bound.start(federation, seed=0)
    jobs = fedbis(store, clients=4).plan(state)
    results = []
    for sampled in itertools.combinations(jobs, 2):
        new = bound.aggregate(state, make_updates(store, sampled, TRAINED))
        results.append(get_values(store, new.adapters["selector"]))
    assert torch.tensor(results).mean(0).tolist() == pytest.approx(weighted_values(PAIRS, 1.0))


@pytest.mark.parametrize(("aggregator", "factor"), [("paper", 4 / 2), ("participation", 1 / 0.6)])
def test_a_client_without_an_update_counts_as_not_sampled(store, federation, aggregator, factor):
    _, new = aggregate(store, fedbis(store, aggregator, clients=4), federation, ("ada", "cyd"))
    expected = weighted_values(("ada", "cyd"), factor)
    assert get_values(store, new.adapters["selector"]) == pytest.approx(expected)


@pytest.mark.parametrize("aggregator", WEIGHTINGS)
def test_the_result_does_not_depend_on_the_order_of_arrival_to_the_byte(store, federation, aggregator):
    """fp32 sums differ in the last bits by their order, which is that of the clients' names."""
    numbers = torch.Generator().manual_seed(0)
    bound = fedbis(store, aggregator, clients=4)
    state = bound.start(federation.model_copy(update={"initial": put_values(store, [0.0] * 400)}), seed=0)
    updates = [
        make_update(job, put_values(store, torch.randn(400, generator=numbers).tolist()))
        for job in bound.plan(state)
    ]
    orders = itertools.permutations(updates)
    hashes = {bound.aggregate(state, order).adapters["selector"] for order in orders}
    assert len(hashes) == 1


def later_rounds(bound, federation, seed, rounds):
    """The jobs of several rounds, in which the server's adapter stays as it is."""
    state = bound.start(federation, seed)
    jobs = []
    for _ in range(rounds):
        jobs.append(bound.plan(state))
        state = state.end_round(state.adapters, {})
    return jobs


def test_a_plan_is_a_function_of_seed_and_round(store, federation):
    first = later_rounds(fedbis(store), federation, seed=3, rounds=6)
    assert first == later_rounds(fedbis(store), federation, seed=3, rounds=6)
    for number, jobs in enumerate(first):
        assert [job.client for job in jobs] == sample_clients(list(PAIRS), 2, 3, number)


def test_each_client_has_other_random_numbers_and_another_key_in_each_round(store, federation):
    jobs = []
    for seed in (3, 4):
        jobs += itertools.chain(*later_rounds(fedbis(store, clients=4), federation, seed, rounds=10))
    assert len({job.seed for job in jobs}) == len({job.key() for job in jobs}) == len(jobs) == 2 * 10 * 4


def test_all_jobs_of_a_round_start_from_the_servers_adapter_of_that_round(store, federation):
    bound = fedbis(store)
    state = bound.start(federation, seed=0)
    assert {job.adapter for job in bound.plan(state)} == {federation.initial}
    new = play_round(store, bound, state, TRAINED)
    assert {job.adapter for job in bound.plan(new)} == {new.adapters["selector"]}
    assert new.adapters["selector"] != federation.initial


def test_aggregation_changes_neither_the_state_nor_stored_adapters(store, federation):
    bound = fedbis(store)
    state = bound.start(federation, seed=0)
    updates = make_updates(store, bound.plan(state), TRAINED)
    paths = [store.path(digest) for digest in (federation.initial, *sent_adapters(updates).values())]
    content = [path.read_bytes() for path in paths]
    new = bound.aggregate(state, updates)
    assert state == bound.start(federation, seed=0)
    assert [path.read_bytes() for path in paths] == content
    assert (new.round, new.step, new.phase, new.seed) == (1, 1, "train", 0)
    assert new.federation == federation


def test_a_state_is_immutable(store, federation):
    state = fedbis(store).start(federation, seed=0)
    with pytest.raises(ValidationError, match="frozen"):
        state.round = 3


def test_the_servers_step_is_the_distance_that_its_adapter_moved(store, federation):
    _, new = aggregate(store, fedbis(store, clients=4), federation)
    expected = torch.tensor(weighted_values(PAIRS, 1.0))
    moved = (expected - torch.tensor(START)).norm().item()
    assert new.metrics.scalars["server_step"] == pytest.approx(moved, rel=1e-5)
    assert new.metrics.scalars["server_norm"] == pytest.approx(expected.norm().item(), rel=1e-5)


def test_a_jobs_key_depends_on_the_content_of_its_adapter_and_not_on_the_path(store, federation, tmp_path):
    bound = fedbis(store)
    elsewhere = AdapterStore(tmp_path / "elsewhere")
    moved = federation.model_copy(update={"initial": put_values(elsewhere, START)})
    changed = federation.model_copy(update={"initial": put_values(store, [1.0, 0.0, -1.5])})
    plans = (bound.plan(bound.start(place, seed=0)) for place in (federation, moved, changed))
    keys, same, other = ([job.key() for job in plan] for plan in plans)
    assert keys == same
    assert not set(keys) & set(other)


def test_fedbis_is_federated_averaging_of_one_selector(store):
    bound = bind_method(store, "fedbis", 2, aggregator={"kind": "paper"})
    assert isinstance(bound.method, AveragingMethod)
    assert bound.method.trained_model == "selector"
    assert bound.method.aggregator.kind == "paper"


def test_an_unknown_method_is_refused_with_the_nearest_name():
    with pytest.raises(RecipeError, match=r"federation\.method 'fedbi' is not known.*'fedbis'"):
        load_recipe("debug", ["federation.method=fedbi"])
