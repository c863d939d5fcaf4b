"""FedProx, FedOPT and FedCDA: FedDPO's rounds with another client loss, another server step, another choice of what is averaged."""

import itertools

import numpy as np
import pytest
import torch

from components.config import FederationConfig, OptimizerConfig, RecipeError
from components.federation import fedcda
from components.federation.aggregation import inner_products, mixtures, weighted_average
from components.federation.commits import Commits
from components.federation.rounds import close_step
from components.federation.strategy import Update, build_federation, build_strategy
from components.learning.policy import ResidentPolicy, pair_logprobs, train_dpo
from components.models.adapters import AdapterError, AdapterStore
from components.recipes import load_recipe

SHARES = {"ada": 2, "bea": 1, "cyd": 1}
START = [0.5, -1.0]


@pytest.fixture
def store(tmp_path):
    return AdapterStore(tmp_path / "adapters")


@pytest.fixture
def federation(store):
    return build_federation({n: {"train": k, "validation": 1, "test": 1} for n, k in SHARES.items()}, store.put({"a": torch.tensor(START)}), 3)


def method(store, name, clients=3, **options):
    return build_strategy(FederationConfig(method=name, clients_per_round=clients, options=options), store)


def answers(store, jobs, values):
    return [Update(job, store.put({"a": torch.tensor(values[job.client])}), (), {}) for job in jobs]


# --- FedProx

PAIRS = [{"pair_id": str(n), "prompt": f"question {n}", "chosen": "yes, that is so", "rejected": "no"} for n in range(4)]


def test_the_proximal_term_is_mu_over_two_times_the_squared_distance_to_the_received_adapter(debug):
    resident = ResidentPolicy(debug.policy, "cpu")
    start = {name: tensor + 0.01 for name, tensor in resident.slot.initial_adapter(0).items()}
    reference = pair_logprobs(resident, PAIRS, 4, reference=True)
    optimizer = OptimizerConfig(name="sgd", lr=0.1, clip=None)
    moved, losses = [], []
    for mu in (0.0, 3.0):
        trained, curve = train_dpo(resident, PAIRS, start, reference, 0.2, 2, 4, optimizer, seed=0, proximal=mu)
        moved.append(trained)
        losses.append(curve.losses)
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6), "nothing is added at the start"
    one = train_dpo(resident, PAIRS, start, reference, 0.2, 1, 4, optimizer, seed=0)[0]
    distance = sum(float((one[n] - start[n]).square().sum()) for n in start)
    assert losses[1][1] - losses[0][1] == pytest.approx(1.5 * distance, rel=1e-2)
    for name in start:  # the second step's gradient has mu (w - start) more
        assert torch.allclose(moved[1][name], moved[0][name] - 0.1 * 3.0 * (one[name] - start[name]), atol=1e-6)


def test_a_client_of_fedprox_is_held_back_and_one_of_feddpo_is_not(debug):
    from components.federation.clients import LEARNERS

    ends = {}
    for name, options in (("feddpo", {}), ("fedprox", {"proximal": 1e-9}), ("fedprox", {"proximal": 100.0})):
        config = debug.federation.model_copy(update={"method": name, "options": options, "local_steps": 3, "batch_size": 2, "optimizer": OptimizerConfig(name="sgd", lr=5e-3)})
        learner = LEARNERS["dpo"](debug.model_copy(update={"federation": config}), "cpu")
        start = {key: tensor + 0.02 for key, tensor in learner.initial_adapter(0).items()}
        trained, _ = learner.train(PAIRS, start, 1)
        ends[name, options.get("proximal")] = sum(float((trained[key] - start[key]).square().sum()) for key in start)
    assert ends["fedprox", 1e-9] == pytest.approx(ends["feddpo", None], rel=1e-4) and ends["fedprox", 100.0] < 0.7 * ends["feddpo", None]


# --- FedOPT

def by_hand(kind, deltas, b1=0.9, b2=0.99, tau=1e-3, lr=0.1):
    phi, m, v = np.array(START), np.zeros(2), np.full(2, tau**2)
    for delta in deltas:
        m = b1 * m + (1 - b1) * delta
        square = delta**2
        v = {"adam": b2 * v + (1 - b2) * square, "yogi": v - (1 - b2) * square * np.sign(v - square), "adagrad": v + square}[kind]
        phi = phi + lr * m / (np.sqrt(v) + tau)
    return phi


@pytest.mark.parametrize("kind", ["adam", "yogi", "adagrad"])
def test_two_rounds_of_fedopt_by_hand(tmp_path, store, federation, kind):
    strategy = method(store, "fedopt", server_optimizer=kind, server_lr=0.1)
    state, deltas = strategy.init(federation, 0), []
    commits = Commits(tmp_path, "x")
    for number in range(2):
        jobs = strategy.plan(state, number)
        here = np.array(store.get(state.adapters["policy"])["a"].tolist())
        moves = {"ada": np.array([0.1, -0.3]), "bea": np.array([0.0, 0.2 * number]), "cyd": np.array([-0.4, 0.0])}
        deltas.append(0.5 * moves["ada"] + 0.25 * moves["bea"] + 0.25 * moves["cyd"])
        updates = answers(store, jobs, {name: (here + move).tolist() for name, move in moves.items()})
        state, _ = close_step(strategy, state, jobs, updates, 1.0, commits)
        assert commits.latest()[0] == state, "the moments are remembered by the commit"
    assert store.get(state.adapters["policy"])["a"].tolist() == pytest.approx(by_hand(kind, deltas).tolist(), rel=1e-5)


# --- FedCDA

def test_one_cached_adapter_each_is_fedavg(store, federation):
    trained = {"ada": [1.0, 0.0], "bea": [0.0, 4.0], "cyd": [2.0, 2.0]}
    results = []
    for name, options in (("fedcda", {"cached": 1}), ("feddpo", {})):
        strategy = method(store, name, **options)
        state = strategy.init(federation, 0)
        results.append(store.get(strategy.aggregate(state, answers(store, strategy.plan(state, 0), trained)).adapters["policy"])["a"].tolist())
    assert results[0] == pytest.approx(results[1]) and results[0] == pytest.approx([1.0, 1.5])


def test_an_older_adapter_that_lies_with_the_others_is_taken_and_the_rest_of_the_cache_is_kept(store, federation):
    strategy = method(store, "fedcda", cached=2)
    state = strategy.init(federation, 0)
    rounds = [{"ada": [1.0, 1.0], "bea": [1.4, 1.0], "cyd": [9.0, 0.0]}, {"ada": [-8.0, 0.0], "bea": [1.0, 1.1], "cyd": [1.0, 0.9]}, {"ada": [7.0, 7.0], "bea": [0.0, 8.0], "cyd": [5.0, -5.0]}]
    for number, trained in enumerate(rounds):
        jobs = strategy.plan(state, number)
        state = strategy.aggregate(state, answers(store, jobs, trained))
        if number == 1:
            chosen = {name: store.get(store.ref(digest))["a"].tolist() for name, digest in state.memory["chosen"].items()}
            assert chosen == {"ada": [1.0, 1.0], "bea": pytest.approx([1.0, 1.1]), "cyd": pytest.approx([1.0, 0.9])} and state.log["older_chosen"] == 1
            assert store.get(state.adapters["policy"])["a"].tolist() == pytest.approx([1.0, 1.0]) and state.log["divergence"] < 0.02 < 10 < state.log["divergence_of_newest"]
    assert {len(hashes) for hashes in state.memory["cache"].values()} == {2}
    assert store.get(store.ref(state.memory["cache"]["ada"][0]))["a"].tolist() == [-8.0, 0.0], "the oldest is forgotten"


def test_in_the_warm_up_the_newest_adapters_are_aggregated_and_the_cache_is_filled(store, federation):
    rounds = [{"ada": [1.0, 1.0], "bea": [1.0, 1.0], "cyd": [1.0, 1.0]}, {"ada": [8.0, 0.0], "bea": [0.0, 8.0], "cyd": [-8.0, -8.0]}, {"ada": [4.0, 0.0], "bea": [0.0, 4.0], "cyd": [-4.0, -4.0]}]
    older = {}
    for warmup in (0, 2):
        strategy = method(store, "fedcda", cached=3, warmup_rounds=warmup)
        state = strategy.init(federation, 0)
        for number, trained in enumerate(rounds):
            state = strategy.aggregate(state, answers(store, strategy.plan(state, number), trained))
            older[warmup, number] = state.log["older_chosen"]
    assert [older[0, n] for n in range(3)] == [0, 3, 3] and [older[2, n] for n in range(3)] == [0, 0, 3]


def test_clients_that_are_not_sampled_stay_with_what_was_chosen_last_be_it_neither_the_newest_nor_the_oldest(store, federation):
    everybody, two = method(store, "fedcda", cached=3), method(store, "fedcda", clients=2, cached=3)
    state = everybody.init(federation, 0)
    present = {job.client for job in two.plan(state, 3)}
    (absent,) = set(SHARES) - present
    for number, (its, others) in enumerate([([9.0, -9.0], [1.0, 0.9]), ([1.0, 1.0], [1.0, 1.1]), ([-8.0, 0.0], [1.1, 1.0])]):
        state = everybody.aggregate(state, answers(store, everybody.plan(state, number), dict.fromkeys(present, others) | {absent: its}))
    assert store.get(store.ref(state.memory["chosen"][absent]))["a"].tolist() == [1.0, 1.0] and state.log["older_chosen"] >= 1
    new = two.aggregate(state, answers(store, two.plan(state, 3), {name: [-8.0, 0.0] for name in present}))
    assert new.memory["chosen"][absent] == state.memory["chosen"][absent], "though its newest one is where the others have gone"
    assert new.memory["cache"][absent] == state.memory["cache"][absent] and set(new.memory["chosen"]) == set(SHARES)
    assert all(store.get(store.ref(new.memory["chosen"][name]))["a"].tolist() == pytest.approx([1.0, 1.0], abs=0.2) for name in SHARES), "the sampled ones go back to it"


def test_of_combinations_that_are_as_good_the_newest_is_kept(store, federation):
    strategy = method(store, "fedcda", cached=2, group=1)
    state = strategy.init(federation, 0)
    for number, place in enumerate(([0.0, 0.0], [5.0, 5.0])):
        state = strategy.aggregate(state, answers(store, strategy.plan(state, number), dict.fromkeys(SHARES, place)))
    assert store.get(state.adapters["policy"])["a"].tolist() == [5.0, 5.0] and state.log["older_chosen"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_the_search_never_does_worse_than_the_newest_and_with_one_group_it_is_exact(seed):
    numbers = np.random.default_rng(seed)
    rows, at = [], 0
    for size in (3, 2, 3, 1):
        rows.append(list(range(at, at + size)))
        at += size
    points = numbers.normal(size=(at, 5))
    weights = numbers.dirichlet(np.ones(4))
    products = points @ points.T

    def objective(places):
        members = np.array([points[row[place]] for row, place in zip(rows, places, strict=True)])
        mean = weights @ members
        return float(weights @ np.square(members - mean).sum(axis=1))

    newest = [len(row) - 1 for row in rows]
    best = min(objective(places) for places in itertools.product(*(range(len(row)) for row in rows)))
    assert fedcda.spread(products, [row[-1] for row in rows], weights) == pytest.approx(objective(newest))
    exact = fedcda.least_divergent(products, rows, weights, newest, [0, 1, 2, 3], group=4)
    assert objective(exact) == pytest.approx(best)
    for group in (1, 2, 3):
        found = fedcda.least_divergent(products, rows, weights, newest, [0, 1, 2, 3], group)
        assert best - 1e-12 <= objective(found) <= objective(newest) + 1e-12
    held = fedcda.least_divergent(products, rows, weights, newest, [1, 2], group=2)
    assert held[0] == newest[0] and held[3] == newest[3]


def test_inner_products_are_those_of_the_flattened_movements():
    numbers = torch.Generator().manual_seed(0)
    origin = {"b": torch.randn(3, 2, generator=numbers), "a": torch.randn(4, generator=numbers)}
    adapters = [{name: tensor + 0.1 * torch.randn(tensor.shape, generator=numbers) for name, tensor in origin.items()} for _ in range(3)]
    flat = np.array([np.concatenate([(adapter[name] - origin[name]).double().numpy().ravel() for name in sorted(origin)]) for adapter in adapters])
    assert np.allclose(inner_products(adapters, origin), flat @ flat.T, rtol=1e-5)


def test_mixtures_are_the_weighted_averages_of_each_row():
    numbers = torch.Generator().manual_seed(0)
    adapters = [{"b": torch.randn(3, 2, generator=numbers), "a": torch.randn(4, generator=numbers)} for _ in range(3)]
    weights = np.array([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
    for mixed, row in zip(mixtures(adapters, weights), weights, strict=True):
        expected = weighted_average(zip(adapters, row.tolist(), strict=True))
        assert set(mixed) == {"a", "b"} and all(mixed[n].dtype == torch.float32 and mixed[n].shape == expected[n].shape and torch.allclose(mixed[n], expected[n], atol=1e-6) for n in mixed)
    assert all(torch.equal(mixtures(adapters, weights)[1][name], adapters[0][name]) for name in ("a", "b"))
    for bad in (np.array([[-0.1, 1.1, 0.0]]), np.array([[np.nan, 1.0, 0.0]])):
        with pytest.raises(AdapterError, match="weights must be finite and not negative"):
            mixtures(adapters, bad)


def test_fedopts_movement_is_that_of_the_clients_whichever_the_weights_sum_to(store, federation):
    moved = {}
    for weighting in ("paper", "participation"):
        strategy = method(store, "fedopt", clients=2, weighting=weighting, server_lr=1.0, server_betas=[0.0, 0.0], tau=1.0)
        state = strategy.init(federation, 0)
        new = strategy.aggregate(state, answers(store, strategy.plan(state, 0), dict.fromkeys(SHARES, START)))
        moved[weighting] = store.get(new.adapters["policy"])["a"].tolist()
    assert moved == {"paper": pytest.approx(START), "participation": pytest.approx(START)}, "clients that did not move do not move the server"


@pytest.mark.parametrize(("options", "sentence"), [
    ("{server_betas: [0.9, 1.5]}", "both must lie in"), ("{server_betas: [0.9]}", "at least 2"), ("{weighting: paper, cached: 2}", "use 'participation'")])
def test_options_that_cannot_be_used_are_refused_with_the_recipe(options, sentence):
    name = "fedcda" if "cached" in options else "fedopt"
    with pytest.raises(RecipeError, match=sentence):
        load_recipe("debug", [f"federation.method={name}", f"federation.options={options}"])
    assert load_recipe("debug", ["federation.method=fedopt", "federation.options={server_betas: [0.8, 0.95]}"]).federation.options["server_betas"] == [0.8, 0.95]
