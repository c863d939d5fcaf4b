"""Aggregators on tensors small enough for hand-computed results, and for the full matrix."""

import itertools
from unittest import mock

import pytest
import torch

from components.config import RecipeError
from components.config.federation import AGGREGATORS
from components.federation.aggregators import (
    Aggregator,
    Contributions,
    ExactMean,
    PaperMean,
    ParticipationMean,
    UniformMean,
    sum_updates,
    truncated_mean,
)
from components.federation.protocol import TrainJob
from components.models.store import AdapterError
from components.recipes import load_recipe
from tests.support.bound_methods import bind_method, make_update, play_round, small_federation

SERVER = [1.0, 1.0]
TRAINED = {"ada": [2.0, 0.0], "bea": [0.0, 4.0], "cyd": [4.0, 4.0]}
WEIGHTS = {"ada": 0.2, "bea": 0.1, "cyd": 0.1}
"""Shares of the training pairs. Three of the federation's five clients have sent an update."""
CLIENTS = 5

A = "layer.lora_A.weight"
B = "layer.lora_B.weight"


def contribute(store, adapters, weights=WEIGHTS, clients=CLIENTS):
    """Contributions of clients, by name."""
    received = store.put(next(iter(adapters.values())))
    updates = []
    for name, adapter in adapters.items():
        job = TrainJob(client=name, round=0, seed=1, adapters=(received,))
        updates.append(make_update(job, store.put(adapter)))
    return Contributions(store, updates, [weights[name] for name in adapters], clients)


@pytest.fixture
def contributions(store):
    return contribute(store, {name: {"a": torch.tensor(values)} for name, values in TRAINED.items()})


def combine(aggregator, contributions, server=None):
    return aggregator.combine(server or {"a": torch.tensor(SERVER)}, contributions)


# --- weighted means


@pytest.mark.parametrize(
    ("aggregator", "weights"),
    [
        (ParticipationMean(), [0.5, 0.25, 0.25]),  # by the shares of those that took part
        (PaperMean(), [1 / 3, 1 / 6, 1 / 6]),  # M / A = 5 / 3 times the shares
        (UniformMean(), [1 / 3, 1 / 3, 1 / 3]),  # 1 / A
    ],
    ids=["participation", "paper", "uniform"],
)
def test_a_linear_aggregator_is_the_sum_by_its_weights(contributions, aggregator, weights):
    combined, metrics = combine(aggregator, contributions)
    expected = torch.tensor(weights) @ torch.tensor(list(TRAINED.values()))
    assert combined["a"].tolist() == pytest.approx(expected.tolist())
    assert metrics == {"weight_sum": pytest.approx(sum(weights))}


@pytest.mark.parametrize("aggregator", [ParticipationMean(), PaperMean(), UniformMean()])
def test_a_client_that_was_asked_for_a_sum_and_failed_counts_as_not_sampled(contributions, aggregator):
    shares = dict(zip(contributions.names, contributions.weights, strict=True))
    asked = aggregator.client_weights({**shares, "of no answer": 0.1}, CLIENTS)
    combined, metrics = aggregator.finish({}, sum_updates(contributions.store, contributions.updates, asked))
    expected, expected_metrics = combine(aggregator, contributions)
    assert combined["a"].tolist() == pytest.approx(expected["a"].tolist())
    assert metrics == pytest.approx(expected_metrics)


# --- clusters (eq. 6)


@pytest.mark.parametrize(
    ("aggregator", "expected", "weight_sum"),
    [(PaperMean(), [0.6 + 0.8, 0.6 + 0.8], 0.4), (UniformMean(), [2 / 5 + 6 / 5, 2 / 5 + 8 / 5], 3 / 5)],
    ids=["paper", "uniform"],
)
def test_in_clusters_paper_and_uniform_are_equation_6_by_pairs_or_one_over_all_clients(
    contributions, aggregator, expected, weight_sum
):
    combined, metrics = combine(aggregator.for_clusters(), contributions)
    assert combined["a"].tolist() == pytest.approx(expected)
    assert metrics["weight_sum"] == pytest.approx(weight_sum)


@pytest.mark.parametrize("aggregator", [ParticipationMean(), ExactMean()], ids=["participation", "exact"])
def test_in_clusters_other_aggregators_are_the_mean_of_the_members(aggregator):
    assert aggregator.for_clusters() is aggregator


def test_residual_weights_above_one_are_refused(store):
    adapters = {name: {"a": torch.ones(2)} for name in ("ada", "bea")}
    contributions = contribute(store, adapters, weights={"ada": 0.7, "bea": 0.6})
    with pytest.raises(AdapterError, match="more than one"):
        combine(PaperMean().for_clusters(), contributions)


# --- the exact mean

RANK = 2
OUT = 5
IN = 4


def random_factors(seed, rank=RANK):
    numbers = torch.Generator().manual_seed(seed)
    return {A: torch.randn(rank, IN, generator=numbers), B: torch.randn(OUT, rank, generator=numbers)}


def product(adapter):
    return adapter[B].double() @ adapter[A].double()


def mean_product(adapters, weights):
    total = sum(weights[name] for name in adapters)
    return sum(weights[name] / total * product(adapter) for name, adapter in adapters.items())


@pytest.fixture
def three_clients():
    return {name: random_factors(seed) for seed, name in enumerate(TRAINED)}


def combine_exactly(store, adapters):
    return ExactMean().combine(random_factors(9), contribute(store, adapters))


def test_the_exact_mean_is_the_truncated_svd_of_the_mean_of_the_products_and_spans_its_subspaces(
    store, three_clients
):
    combined, _ = combine_exactly(store, three_clients)
    u, values, v_transposed = torch.linalg.svd(mean_product(three_clients, WEIGHTS))
    expected = u[:, :RANK] @ torch.diag(values[:RANK]) @ v_transposed[:RANK]
    basis, _ = torch.linalg.qr(combined[B].double())
    rows = combined[A].double()
    assert torch.allclose(product(combined), expected, atol=1e-5)
    assert torch.allclose(basis @ basis.T, u[:, :RANK] @ u[:, :RANK].T, atol=1e-5)
    assert torch.allclose(rows.T @ rows, v_transposed[:RANK].T @ v_transposed[:RANK], atol=1e-5)


def test_the_exact_mean_has_orthonormal_rows_of_a_and_the_shapes_of_the_server_in_fp32(store, three_clients):
    combined, _ = combine_exactly(store, three_clients)
    assert torch.allclose(combined[A] @ combined[A].T, torch.eye(RANK), atol=1e-5)
    assert combined[A].shape == (RANK, IN)
    assert combined[B].shape == (OUT, RANK)
    assert {tensor.dtype for tensor in combined.values()} == {torch.float32}


def test_truncation_is_the_share_of_the_squared_norm_that_is_lost_less_than_by_the_plain_mean(
    store, three_clients
):
    combined, metrics = combine_exactly(store, three_clients)
    plain, _ = ParticipationMean().combine(random_factors(9), contribute(store, three_clients))
    full = mean_product(three_clients, WEIGHTS)
    lost = (full - product(combined)).square().sum()
    assert metrics["truncation"] == pytest.approx((lost / full.square().sum()).item(), abs=1e-6)
    assert metrics["weight_sum"] == 1.0
    assert lost < (full - product(plain)).square().sum()


def test_with_equal_a_the_exact_mean_is_the_plain_mean_of_b(store, three_clients):
    """Then the product of the means is the mean of the products, of the adapters' own rank."""
    shared = random_factors(7)[A]
    adapters = {name: {A: shared, B: adapter[B]} for name, adapter in three_clients.items()}
    combined, metrics = combine_exactly(store, adapters)
    plain, _ = ParticipationMean().combine(random_factors(9), contribute(store, adapters))
    assert torch.allclose(product(combined), product(plain), atol=1e-5)
    assert metrics["truncation"] == pytest.approx(0, abs=1e-9)


def test_the_exact_mean_of_one_client_is_its_product(store):
    adapters = {"ada": random_factors(0)}
    combined, metrics = combine_exactly(store, adapters)
    assert torch.allclose(product(combined), product(adapters["ada"]), atol=1e-5)
    assert metrics["truncation"] == pytest.approx(0, abs=1e-9)


def test_the_exact_mean_of_untrained_adapters_is_zero_with_usable_rows_of_a(store):
    adapters = {name: random_factors(0) | {B: torch.zeros(OUT, RANK)} for name in TRAINED}
    combined, metrics = combine_exactly(store, adapters)
    assert not combined[B].any()
    assert torch.allclose(combined[A] @ combined[A].T, torch.eye(RANK), atol=1e-5)
    assert metrics["truncation"] == 0


@pytest.mark.parametrize("rank", [1, 4, 6])
def test_any_rank_up_to_and_above_the_width_of_the_layer_gives_its_shapes(rank):
    factors = [(f[B].double(), f[A].double()) for f in (random_factors(seed, rank) for seed in range(3))]
    b, a, singular_values = truncated_mean(factors, [0.5, 0.25, 0.25])
    full = 0.5 * factors[0][0] @ factors[0][1] + 0.25 * sum(b_m @ a_m for b_m, a_m in factors[1:])
    expected = torch.linalg.svdvals(full)
    assert b.shape == (OUT, rank)
    assert a.shape == (rank, IN)
    assert torch.allclose(singular_values[: len(expected)][:IN], expected[: len(singular_values)], atol=1e-9)
    if rank >= IN:
        assert torch.allclose(b.double() @ a.double(), full, atol=1e-5)


def test_the_exact_mean_never_forms_the_full_matrix():
    """The SVD of a layer of 3000 x 2000 is that of a K r x K r matrix."""
    torch.manual_seed(0)
    factors = [(torch.randn(3000, 2).double(), torch.randn(2, 2000).double()) for _ in range(3)]
    with mock.patch.object(torch.linalg, "svd", wraps=torch.linalg.svd) as svd:
        truncated_mean(factors, [1 / 3] * 3)
    assert [call.args[0].shape for call in svd.call_args_list] == [(6, 6)]


# --- all of them


@pytest.mark.parametrize("kind", AGGREGATORS.names())
def test_a_result_does_not_depend_on_the_order_of_arrival_to_the_byte(kind, store, three_clients):
    """The round loop sorts updates by the names of their clients."""
    federation = small_federation(store, {"ada": 2, "bea": 1, "cyd": 1}, [0.0], 3)
    federation = federation.model_copy(update={"initial": store.put(random_factors(9))})
    bound = bind_method(store, "feddpo", 3, aggregator=kind)
    state = bound.start(federation, 0)
    updates = contribute(store, three_clients).updates
    hashes = {bound.aggregate(state, order).adapters["policy"] for order in itertools.permutations(updates)}
    assert len(hashes) == 1
    assert hashes != {federation.initial}


@pytest.mark.parametrize("kind", AGGREGATORS.names())
def test_the_inputs_are_not_changed(kind, store, three_clients):
    server = random_factors(9)
    contributions = contribute(store, three_clients)
    AGGREGATORS.load(kind)().combine(server, contributions)
    for name, tensor in random_factors(9).items():
        assert torch.equal(server[name], tensor)
    for adapter, expected in zip(contributions.adapters(), three_clients.values(), strict=True):
        assert torch.equal(adapter[A], expected[A])


@pytest.mark.parametrize("kind", AGGREGATORS.names())
def test_a_recipe_names_an_aggregator_by_its_kind(kind, store):
    recipe = load_recipe("debug", ["federation.method=feddpo", f"federation.options.aggregator={kind}"])
    assert recipe.federation.options.aggregator.kind == kind
    assert type(recipe.federation.options.aggregator) is AGGREGATORS.load(kind)


def test_an_unknown_aggregator_is_refused_with_the_nearest_name():
    overrides = ["federation.method=feddpo", "federation.options.aggregator=unifrom"]
    with pytest.raises(RecipeError, match=r"federation\.options\.aggregator.*'unifrom'.*'uniform'"):
        load_recipe("debug", overrides)


def test_an_aggregator_is_a_value_that_a_method_is_built_with(store):
    """A new aggregator needs neither a change of a method nor one of the registry."""

    class LastClient(Aggregator):
        kind: str = "last"

        def combine(self, server, contributions):
            *_, last = contributions.adapters()
            return last, {"clients": float(len(contributions))}

    federation = small_federation(store, {"ada": 2, "bea": 1, "cyd": 1}, SERVER, 3)
    bound = bind_method(store, "feddpo", 3, aggregator=LastClient())
    new = play_round(store, bound, bound.start(federation, 0), TRAINED)
    assert store.get(new.adapters["policy"])["a"].tolist() == TRAINED["cyd"]
    assert new.metrics.scalars["clients"] == 3


def test_contributions_are_opened_without_reading_all_adapters(contributions):
    adapters = contributions.open()
    assert len(adapters) == len(contributions) == 3
    assert adapters[1]["a"].tolist() == TRAINED["bea"]
