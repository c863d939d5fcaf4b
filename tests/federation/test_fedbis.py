"""FedBis on adapters of one tensor of size 3: FedBiscuit, appendix A.1, replayed by hand."""

import itertools
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch

from components.config import FederationConfig, RecipeError
from components.federation.fedbis import FedBis, Options, build
from components.federation.sampling import sample_clients
from components.federation.strategy import Federation, Update, build_federation, build_strategy
from components.models.adapters import AdapterStore

SHARES = {"ada": 40, "bea": 30, "cyd": 20, "dan": 10}
START = [1.0, 0.0, -1.0]
TRAINED = {"ada": [2.0, 0.0, 0.0], "bea": [0.0, 4.0, 0.0], "cyd": [1.0, 1.0, 1.0], "dan": [0.0, 0.0, 8.0]}


@pytest.fixture
def store(tmp_path):
    return AdapterStore(tmp_path / "adapters")


@pytest.fixture
def federation(store) -> Federation:
    return build_federation({n: {"train": k, "validation": 1, "test": 1} for n, k in SHARES.items()}, store.put({"a": torch.tensor(START)}), 2)


def fedbis(store, weighting="participation", clients=2) -> FedBis:
    return build(FederationConfig(clients_per_round=clients), Options(weighting=weighting), store)


def answers(store, jobs):
    return [Update(job, store.put({"a": torch.tensor(TRAINED[job.client])}), (), {}) for job in jobs]


def by_hand(cohort, factor):
    return [factor * sum(SHARES[m] / 100 * TRAINED[m][i] for m in cohort) for i in range(3)]


def test_weights_are_the_shares_of_the_training_pairs_and_clients_without_any_stay_away(store):
    counts = {n: {"train": k, "validation": 0, "test": 0} for n, k in SHARES.items()} | {"eve": {"train": 0, "validation": 5, "test": 5}}
    federation = build_federation(counts, store.put({"a": torch.tensor(START)}), 2)
    assert federation.weights == {"ada": 0.4, "bea": 0.3, "cyd": 0.2, "dan": 0.1}
    with pytest.raises(RecipeError, match="clients_per_round is 5, but only 4 of the data set's clients hold training pairs: use at most 4"):
        build_federation(counts, federation.initial, 5)


def test_equation_8_weights_the_cohort_by_m_over_a_times_p(store, federation):
    strategy = fedbis(store, "paper")
    state = strategy.init(federation, seed=0)
    jobs = strategy.plan(state, 0)
    new = strategy.aggregate(state, answers(store, jobs))
    cohort = [job.client for job in jobs]
    assert len(cohort) == 2
    assert store.get(new.adapters["selector"])["a"].tolist() == pytest.approx(by_hand(cohort, 4 / 2))
    assert new.log["weight_sum"] == pytest.approx(2 * sum(SHARES[m] for m in cohort) / 100)


def test_participation_weights_are_normalised_over_the_cohort(store, federation):
    strategy = fedbis(store)
    state = strategy.init(federation, seed=0)
    jobs = strategy.plan(state, 0)
    new = strategy.aggregate(state, answers(store, jobs))
    cohort = [job.client for job in jobs]
    assert store.get(new.adapters["selector"])["a"].tolist() == pytest.approx(by_hand(cohort, 100 / sum(SHARES[m] for m in cohort)))
    assert new.log["weight_sum"] == 1.0


def test_with_all_clients_both_weightings_are_fedavg(store, federation):
    expected = by_hand(SHARES, 1.0)
    for weighting in ("paper", "participation"):
        strategy = fedbis(store, weighting, clients=4)
        state = strategy.init(federation, seed=0)
        new = strategy.aggregate(state, answers(store, strategy.plan(state, 0)))
        assert store.get(new.adapters["selector"])["a"].tolist() == pytest.approx(expected)


def test_equation_8_is_the_full_average_on_average_over_the_cohorts(store, federation):
    strategy = fedbis(store, "paper")
    state = strategy.init(federation, seed=0)
    jobs = fedbis(store, clients=4).plan(state, 0)
    results = [store.get(strategy.aggregate(state, answers(store, cohort)).adapters["selector"])["a"] for cohort in itertools.combinations(jobs, 2)]
    assert torch.stack(results).mean(0).tolist() == pytest.approx(by_hand(SHARES, 1.0))


def test_a_client_left_out_of_the_round_counts_as_not_sampled(store, federation):
    for weighting, factor in (("paper", 4 / 2), ("participation", 1 / 0.6)):
        strategy = fedbis(store, weighting, clients=3)
        state = strategy.init(federation, seed=0)
        jobs = fedbis(store, clients=4).plan(state, 0)
        kept = [job for job in jobs if job.client in ("ada", "cyd")]
        new = strategy.aggregate(state, answers(store, kept))
        assert store.get(new.adapters["selector"])["a"].tolist() == pytest.approx(by_hand(("ada", "cyd"), factor))


def test_aggregation_does_not_depend_on_the_order_of_arrival_to_the_byte(store, federation):
    """Sums in fp32 differ in the last bits by their order; so the order is that of the names."""
    numbers = torch.Generator().manual_seed(0)
    for weighting in ("paper", "participation"):
        strategy = fedbis(store, weighting, clients=4)
        state = strategy.init(Federation(federation.clients, store.put({"a": torch.zeros(400)})), seed=0)
        updates = [Update(job, store.put({"a": torch.randn(400, generator=numbers)}), (), {}) for job in strategy.plan(state, 0)]
        hashes = {strategy.aggregate(state, order).adapters["selector"].hash for order in itertools.permutations(updates)}
        assert len(hashes) == 1


def test_a_plan_is_a_function_of_seed_and_round(store, federation):
    strategy = fedbis(store)
    state, other = strategy.init(federation, seed=3), strategy.init(federation, seed=4)
    assert strategy.plan(state, 5) == strategy.plan(state, 5) == fedbis(store).plan(strategy.init(federation, seed=3), 5)
    assert [j.client for j in strategy.plan(state, 5)] == sample_clients(list(SHARES), 2, 3, 5)
    seeds = [job.seed for round in range(10) for s in (state, other) for job in strategy.plan(s, round)]
    assert len(set(seeds)) == len(seeds), "each client trains with other random numbers in each round"


def test_every_job_of_a_round_starts_from_the_servers_adapter_of_that_round(store, federation):
    strategy = fedbis(store)
    state = strategy.init(federation, seed=0)
    assert all(job.adapters == (federation.initial,) and job.kind == "train" for job in strategy.plan(state, 0))
    new = strategy.aggregate(state, answers(store, strategy.plan(state, 0)))
    assert all(job.adapters == (new.adapters["selector"],) for job in strategy.plan(new, 1))


def test_aggregation_leaves_the_state_and_the_stored_adapters_as_they_were(store, federation):
    strategy = fedbis(store)
    state = strategy.init(federation, seed=0)
    jobs = strategy.plan(state, 0)
    updates = answers(store, jobs)
    kept = {u.adapter.path: Path(u.adapter.path).read_bytes() for u in updates} | {federation.initial.path: Path(federation.initial.path).read_bytes()}
    new = strategy.aggregate(state, updates)
    assert state == strategy.init(federation, seed=0) and state.adapters["selector"] == federation.initial
    assert (new.round, new.step, new.phase, new.seed) == (1, 1, "train", 0) and new.federation == federation
    assert all(Path(path).read_bytes() == data for path, data in kept.items())
    with pytest.raises(FrozenInstanceError):
        state.round = 3


def test_the_servers_step_is_the_distance_that_its_adapter_moved(store, federation):
    strategy = fedbis(store, clients=4)
    state = strategy.init(federation, seed=0)
    new = strategy.aggregate(state, answers(store, strategy.plan(state, 0)))
    moved = torch.tensor(by_hand(SHARES, 1.0)) - torch.tensor(START)
    assert new.log["server_step"] == pytest.approx(moved.norm().item(), rel=1e-5)
    assert new.log["server_norm"] == pytest.approx(torch.tensor(by_hand(SHARES, 1.0)).norm().item(), rel=1e-5)


def test_a_jobs_key_follows_the_adapters_content_the_seed_and_the_round_and_not_the_path(store, federation, tmp_path):
    strategy = fedbis(store)
    jobs = strategy.plan(strategy.init(federation, seed=0), 0)
    elsewhere = AdapterStore(tmp_path / "elsewhere").put({"a": torch.tensor(START)})
    moved = Federation(federation.clients, elsewhere)
    assert [j.key() for j in jobs] == [j.key() for j in strategy.plan(strategy.init(moved, seed=0), 0)]
    keys = {j.key() for seed in (0, 1) for round in range(3) for j in fedbis(store, clients=4).plan(strategy.init(federation, seed), round)}
    assert len(keys) == 24


def test_fedbis_is_found_by_its_name_and_trains_one_selector(store):
    assert isinstance(build_strategy(FederationConfig(method="fedbis", options={"weighting": "paper"}), store), FedBis)
    with pytest.raises(RecipeError, match=r"federation.selectors is 3, but fedbis trains 1"):
        build_strategy(FederationConfig(method="fedbis", selectors=3), store)
    with pytest.raises(RecipeError, match=r"federation.method 'fedbi' is not known.*Did you mean 'fedbis'\?"):
        build_strategy(FederationConfig(method="fedbi"), store)
