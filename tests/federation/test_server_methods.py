"""FedProx, FedOPT and FedCDA, with hand-computed server steps and choices of adapters."""

import itertools

import numpy as np
import pytest
import torch

from components.config import DpoObjective, FederationConfig, OptimizerConfig, RecipeError
from components.data.records import Pair
from components.federation.aggregation import inner_products, mixtures, weighted_average
from components.federation.clients.context import ClientContexts
from components.federation.clients.worker import build_trainer
from components.federation.closeness import Candidates, choose_closest, spread
from components.federation.commits import Commits
from components.federation.methods.fedopt import OptimizerMemory
from components.federation.protocol import TrainJob
from components.learning.loop import Training
from components.models.store import AdapterError, AdapterStore
from components.recipes import load_recipe
from tests.support.bound_methods import bind_method, get_values, make_updates, play_round, small_federation
from tests.support.training import train_pairs

PAIRS = {"ada": 2, "bea": 1, "cyd": 1}
START = [0.5, -1.0]


@pytest.fixture
def federation(store):
    return small_federation(store, PAIRS, START, clients_per_round=3)


def squared_distance(first, second):
    return sum(float((first[name] - second[name]).square().sum()) for name in first)


# --- FedProx

QUESTIONS = [Pair(f"question {n}", "yes, that is so", "no", pair_id=str(n)) for n in range(4)]
SGD = OptimizerConfig(name="sgd", lr=0.1, clip=None)


@pytest.fixture
def train_two_steps(resident_policy):
    """A maker of trainings of two steps: mu to (start, adapter, losses)."""
    start = {name: tensor + 0.01 for name, tensor in resident_policy.slot.initial_adapter(0).items()}

    def train(mu, steps=2):
        training = Training(steps, 4, SGD, seed=0)
        method = FederationConfig.model_validate(
            {"method": "fedprox", "options": {"proximal": mu}} if mu else {"method": "feddpo"}
        ).options
        objective = DpoObjective(beta=0.2)
        trained = train_pairs(
            resident_policy, QUESTIONS, start, objective, training, wrap=method.local().wrapped
        )
        return start, trained.adapter, trained.figures.losses

    return train


def test_the_proximal_term_is_mu_over_two_times_the_squared_distance_and_its_gradient_mu_times_it(
    train_two_steps,
):
    start, after_one_step, _ = train_two_steps(0.0, steps=1)
    _, plain, plain_losses = train_two_steps(0.0)
    _, proximal, losses = train_two_steps(3.0)
    expected = 3.0 / 2 * squared_distance(after_one_step, start)
    assert losses[0] == pytest.approx(plain_losses[0], rel=1e-6)
    assert losses[1] - plain_losses[1] == pytest.approx(expected, rel=1e-2)
    for name in start:
        moved = plain[name] - 0.1 * 3.0 * (after_one_step[name] - start[name])
        assert torch.allclose(proximal[name], moved, atol=1e-6)


def test_a_client_of_fedprox_moves_less_than_one_of_feddpo(prepared, tmp_path):
    contexts = ClientContexts(AdapterStore(tmp_path / "adapters"), prepared / "pairs.parquet")
    sgd = "federation.optimizer={name: sgd, lr: 5e-3}"

    def distance(method, options="{}"):
        chosen = [f"federation.method={method}", f"federation.options={options}", sgd]
        recipe = load_recipe("debug", [*chosen, "federation.local_steps=3", "federation.batch_size=2"])
        trainer = build_trainer(recipe, "cpu")
        start = {name: tensor + 0.02 for name, tensor in trainer.initial_adapter(0).items()}
        job = TrainJob(client="ada", round=0, seed=1, adapters=(contexts.adapters.put(start),))
        return squared_distance(trainer.run(job, contexts.open("ada")).tensors, start)

    feddpo = distance("feddpo")
    assert distance("fedprox", "{proximal: 1e-9}") == pytest.approx(feddpo, rel=1e-4)
    assert distance("fedprox", "{proximal: 100}") < 0.7 * feddpo


# --- FedOPT


def server_steps(kind, movements, betas=(0.9, 0.99), tau=1e-3, lr=0.1):
    """The hand-computed adapter after steps of a server optimizer (Reddi et al. algorithm 2)."""
    phi = np.array(START)
    first = np.zeros(2)
    second = np.full(2, tau**2)
    for movement in movements:
        first = betas[0] * first + (1 - betas[0]) * movement
        square = movement**2
        match kind:
            case "adam":
                second = betas[1] * second + (1 - betas[1]) * square
            case "yogi":
                second = second - (1 - betas[1]) * square * np.sign(second - square)
            case "adagrad":
                second = second + square
        phi = phi + lr * first / (np.sqrt(second) + tau)
    return phi.tolist()


@pytest.mark.parametrize("kind", ["adam", "yogi", "adagrad"])
def test_two_rounds_of_fedopt_as_computed_by_hand(tmp_path, store, federation, kind):
    bound = bind_method(store, "fedopt", 3, server_optimizer=kind, server_lr=0.1)
    state = bound.start(federation, 0)
    commits = Commits(tmp_path, "x")
    movements = []
    for number in range(2):
        jobs = bound.plan(state)
        server = np.array(get_values(store, state.adapters["policy"]))
        moves = np.array([[0.1, -0.3], [0.0, 0.2 * number], [-0.4, 0.0]])
        movements.append(np.array([0.5, 0.25, 0.25]) @ moves)
        trained = dict(zip(PAIRS, (server + moves).tolist(), strict=True))
        state, _ = bound.close_step(state, jobs, make_updates(store, jobs, trained), 1.0, commits)
        assert commits.latest(OptimizerMemory)[0] == state
    expected = server_steps(kind, movements)
    assert get_values(store, state.adapters["policy"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("aggregator", ["paper", "participation", "uniform"])
def test_clients_that_do_not_move_do_not_move_the_server_of_fedopt(store, federation, aggregator):
    options = {"server_lr": 1.0, "server_betas": [0.0, 0.0], "tau": 1.0, "aggregator": aggregator}
    bound = bind_method(store, "fedopt", 2, **options)
    new = play_round(store, bound, bound.start(federation, 0), dict.fromkeys(PAIRS, START))
    assert get_values(store, new.adapters["policy"]) == pytest.approx(START)
    assert new.metrics.scalars["mean_movement"] == pytest.approx(0, abs=1e-6)


# --- FedCDA


def test_fedcda_with_one_cached_adapter_is_fedavg(store, federation):
    trained = {"ada": [1.0, 0.0], "bea": [0.0, 4.0], "cyd": [2.0, 2.0]}
    for name, options in (("fedcda", {"cached": 1}), ("feddpo", {})):
        bound = bind_method(store, name, 3, **options)
        new = play_round(store, bound, bound.start(federation, 0), trained)
        assert get_values(store, new.adapters["policy"]) == pytest.approx([1.0, 1.5])


def play_rounds(store, bound, federation, rounds):
    """The states after each of some rounds, by what the clients have trained in them."""
    state = bound.start(federation, 0)
    states = []
    for trained in rounds:
        state = play_round(store, bound, state, trained)
        states.append(state)
    return states


def chosen_values(store, state):
    return {name: get_values(store, digest) for name, digest in state.memory.chosen.items()}


def test_an_earlier_adapter_that_is_close_to_the_others_is_chosen_and_the_oldest_dropped(store, federation):
    rounds = [
        {"ada": [1.0, 1.0], "bea": [1.4, 1.0], "cyd": [9.0, 0.0]},
        {"ada": [-8.0, 0.0], "bea": [1.0, 1.1], "cyd": [1.0, 0.9]},
        {"ada": [7.0, 7.0], "bea": [0.0, 8.0], "cyd": [5.0, -5.0]},
    ]
    bound = bind_method(store, "fedcda", 3, cached=2)
    _, state, last = play_rounds(store, bound, federation, rounds)
    chosen = chosen_values(store, state)
    assert chosen["ada"] == [1.0, 1.0]
    assert chosen["bea"] == pytest.approx([1.0, 1.1])
    assert chosen["cyd"] == pytest.approx([1.0, 0.9])
    assert get_values(store, state.adapters["policy"]) == pytest.approx([1.0, 1.0])
    scalars = state.metrics.scalars
    assert scalars["older_chosen"] == 1
    assert scalars["divergence"] < 0.02
    assert scalars["divergence_of_newest"] > 10
    assert [get_values(store, digest) for digest in last.memory.cache["ada"]] == [[-8.0, 0.0], [7.0, 7.0]]
    assert {len(hashes) for hashes in last.memory.cache.values()} == {2}


@pytest.mark.parametrize(("warmup", "older"), [(0, [0, 3, 3]), (2, [0, 0, 3])])
def test_in_the_warm_up_the_newest_adapters_are_averaged_and_the_cache_is_filled(
    store, federation, warmup, older
):
    rounds = [
        {"ada": [1.0, 1.0], "bea": [1.0, 1.0], "cyd": [1.0, 1.0]},
        {"ada": [8.0, 0.0], "bea": [0.0, 8.0], "cyd": [-8.0, -8.0]},
        {"ada": [4.0, 0.0], "bea": [0.0, 4.0], "cyd": [-4.0, -4.0]},
    ]
    bound = bind_method(store, "fedcda", 3, cached=3, warmup_rounds=warmup)
    states = play_rounds(store, bound, federation, rounds)
    assert [state.metrics.scalars["older_chosen"] for state in states] == older
    assert len(states[-1].memory.cache["ada"]) == 3


def test_clients_that_are_not_sampled_keep_their_chosen_adapter(store, federation):
    """It is neither the newest nor the oldest one, though the others move to the newest."""
    all_clients = bind_method(store, "fedcda", 3, cached=3)
    two_clients = bind_method(store, "fedcda", 2, cached=3)
    state = all_clients.start(federation, 0)
    for _ in range(3):
        state = state.end_round(state.adapters, {})
    present = {job.client for job in two_clients.plan(state)}
    (absent,) = set(PAIRS) - present
    rounds = [
        dict.fromkeys(present, (1.0, 0.9)) | {absent: [9.0, -9.0]},
        dict.fromkeys(present, (1.0, 1.1)) | {absent: [1.0, 1.0]},
        dict.fromkeys(present, (1.1, 1.0)) | {absent: [-8.0, 0.0]},
    ]
    *_, state = play_rounds(store, all_clients, federation, rounds)
    assert chosen_values(store, state)[absent] == [1.0, 1.0]
    assert state.metrics.scalars["older_chosen"] >= 1

    new = play_round(store, two_clients, state, dict.fromkeys(present, (-8.0, 0.0)))
    assert new.memory.chosen[absent] == state.memory.chosen[absent]
    assert new.memory.cache[absent] == state.memory.cache[absent]
    assert set(new.memory.chosen) == set(PAIRS)
    for values in chosen_values(store, new).values():
        assert values == pytest.approx([1.0, 1.0], abs=0.2)


def test_of_equally_close_combinations_the_newest_is_chosen(store, federation):
    rounds = [dict.fromkeys(PAIRS, values) for values in ([0.0, 0.0], [5.0, 5.0])]
    *_, state = play_rounds(store, bind_method(store, "fedcda", 3, cached=2, group=1), federation, rounds)
    assert get_values(store, state.adapters["policy"]) == [5.0, 5.0]
    assert state.metrics.scalars["older_chosen"] == 0


@pytest.fixture(params=range(4))
def search(request):
    """Random candidates of four clients, and their spread computed from the points themselves."""
    numbers = np.random.default_rng(request.param)
    rows = [[0, 1, 2], [3, 4], [5, 6, 7], [8]]
    points = numbers.normal(size=(9, 5))
    weights = numbers.dirichlet(np.ones(4))

    def objective(places):
        members = np.array([points[row[place]] for row, place in zip(rows, places, strict=True)])
        mean = weights @ members
        return float(weights @ np.square(members - mean).sum(axis=1))

    return Candidates(points @ points.T, rows, weights), objective


NEWEST = [2, 1, 2, 0]


def test_the_spread_follows_from_inner_products_and_the_search_is_exact_with_one_group(search):
    candidates, objective = search
    newest = [row[-1] for row in candidates.rows]
    assert spread(candidates.products, newest, candidates.weights) == pytest.approx(objective(NEWEST))
    combinations = itertools.product(*(range(len(row)) for row in candidates.rows))
    best = min(objective(places) for places in combinations)
    chosen = choose_closest(candidates, NEWEST, [0, 1, 2, 3], block_size=4)
    assert objective(chosen) == pytest.approx(best)


@pytest.mark.parametrize("group", [1, 2, 3])
def test_the_search_by_groups_never_ends_with_a_larger_spread_than_the_newest(search, group):
    candidates, objective = search
    chosen = choose_closest(candidates, NEWEST, [0, 1, 2, 3], group)
    assert objective(chosen) <= objective(NEWEST) + 1e-12


def test_the_search_changes_only_the_choice_of_free_clients(search):
    first, *_, last = choose_closest(search[0], NEWEST, [1, 2], block_size=2)
    assert (first, last) == (NEWEST[0], NEWEST[3])


# --- shared computations


@pytest.fixture
def adapters():
    """Three random adapters of two tensors, and a fourth one as their origin."""
    torch.manual_seed(0)
    return [{"b": torch.randn(3, 2), "a": torch.randn(4)} for _ in range(4)]


def flatten(adapter):
    return np.concatenate([adapter[name].double().numpy().ravel() for name in sorted(adapter)])


def test_inner_products_are_those_of_the_flattened_movements(adapters):
    *members, origin = adapters
    flat = np.array([flatten(member) - flatten(origin) for member in members])
    assert np.allclose(inner_products(members, origin), flat @ flat.T, rtol=1e-5)


def test_mixtures_are_the_weighted_means_of_each_row(adapters):
    weights = np.array([[0.2, 0.3, 0.5], [0.0, 0.6, 0.4]])
    for mixture, row in zip(mixtures(adapters[:3], weights), weights, strict=True):
        expected = weighted_average(zip(adapters[:3], row.tolist(), strict=True))
        assert set(mixture) == {"a", "b"}
        for name, tensor in mixture.items():
            assert tensor.dtype == torch.float32
            assert tensor.shape == expected[name].shape
            assert torch.allclose(tensor, expected[name], atol=1e-6)


def test_a_mixture_of_one_adapter_is_that_adapter(adapters):
    (mixture,) = mixtures(adapters[:3], np.array([[1.0, 0.0, 0.0]]))
    for name, tensor in mixture.items():
        assert torch.equal(tensor, adapters[0][name])


@pytest.mark.parametrize("weight", [-0.1, np.nan, np.inf])
def test_a_weight_of_a_mixture_that_is_negative_or_not_finite_is_refused(adapters, weight):
    with pytest.raises(AdapterError, match="weights must be finite and not negative"):
        mixtures(adapters[:3], np.array([[weight, 1.0, 0.0]]))


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("fedopt", "{aggregator: exact}", r"'exact' is not known.*paper, participation, uniform"),
        ("fedopt", "{server_betas: [0.9, 1.5]}", r"federation\.options\.server_betas"),
        ("fedopt", "{server_betas: [0.9]}", r"federation\.options\.server_betas.*at least 2"),
        ("fedcda", "{aggregator: paper}", r"unknown key 'federation\.options\.aggregator'"),
        ("fedprox", "{proximal: 0}", r"federation\.options\.proximal' is 0.*greater than 0"),
    ],
)
def test_options_that_cannot_be_used_are_refused_with_the_recipe(method, options, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe("debug", [f"federation.method={method}", f"federation.options={options}"])


def test_options_of_the_server_optimizer_are_read():
    overrides = ["federation.method=fedopt", "federation.options={server_betas: [0.8, 0.95]}"]
    assert load_recipe("debug", overrides).federation.options.server_betas == [0.8, 0.95]
