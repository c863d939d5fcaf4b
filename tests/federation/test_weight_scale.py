"""The product of the weights of eq. 8 over the rounds: computed by hand, logged, and warned of."""

import logging
import math
from dataclasses import replace

import pytest

from components.federation.sampling import sample_clients
from components.federation.weight_scale import planned_weight_sums
from components.recipes import load_recipe
from tests.support.bare_loop import open_loop
from tests.support.bound_methods import bind_method, play_round, small_federation

UNEQUAL = {"ada": 97, "bea": 1, "cyd": 1, "dan": 1}
EQUAL = {"ada": 5, "bea": 5, "cyd": 5, "dan": 5}
TRAINED = {name: [1.0] for name in UNEQUAL}


def warnings_of(store, method, pairs, rounds, **options):
    bound = bind_method(store, method, 1, rounds, **options)
    return bound.warnings(small_federation(store, pairs, [0.0], 1), seed=0)


def test_the_planned_sums_are_those_of_the_sampled_clients_and_one_of_all_clients():
    weights = {"ada": 0.7, "bea": 0.2, "cyd": 0.1}
    sums = planned_weight_sums(weights, 2, 5, range(4))
    samples = [sample_clients(list(weights), 2, 5, number) for number in range(4)]
    assert sums == pytest.approx([3 / 2 * sum(weights[name] for name in names) for names in samples])
    assert planned_weight_sums(weights, 3, 0, range(3)) == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("method", ["fedbis", "feddpo", "ffa_lora"])
def test_weights_that_shrink_the_adapter_are_warned_of_with_their_product(store, method):
    (warning,) = warnings_of(store, method, UNEQUAL, 20, aggregator="paper")
    sums = planned_weight_sums({name: n / 100 for name, n in UNEQUAL.items()}, 1, 0, range(20))
    assert f"{math.prod(sums):.1e}" in warning
    assert "'uniform'" in warning


@pytest.mark.parametrize("aggregator", ["participation", "uniform", "trimmed"])
def test_neither_a_mean_nor_clients_of_equal_size_are_warned_of(store, aggregator):
    assert not warnings_of(store, "fedbis", UNEQUAL, 20, aggregator=aggregator)
    assert not warnings_of(store, "fedbis", EQUAL, 20, aggregator="paper")


def test_each_selectors_own_warm_up_is_warned_of(store):
    options = {"selectors": 3, "warmup_rounds": 10, "aggregator": "paper"}
    warnings = warnings_of(store, "fedbiscuit", UNEQUAL, 40, **options)
    weights = {name: n / 100 for name, n in UNEQUAL.items()}
    for number, warning in enumerate(warnings):
        sums = planned_weight_sums(weights, 1, 0, range(10 * number, 10 * number + 10))
        assert f"'selector-{number}' by {math.prod(sums):.1e} over its 10 rounds" in warning
    assert len(warnings) == 3


def test_the_product_up_to_each_round_is_logged(store):
    bound = bind_method(store, "fedbis", 1, 3, aggregator="paper")
    federation = small_federation(store, UNEQUAL, [0.0], 1)
    state = bound.start(federation, seed=0)
    sums = planned_weight_sums(federation.weights, 1, 0, range(3))
    for number in range(3):
        state = play_round(store, bound, state, TRAINED)
        assert state.metrics.scalars["weight_sum"] == pytest.approx(sums[number])
        assert state.metrics.scalars["weight_product"] == pytest.approx(math.prod(sums[: number + 1]))


def test_the_product_of_a_selector_begins_with_its_own_warm_up(store):
    options = {"selectors": 3, "warmup_rounds": 2, "aggregator": "paper"}
    bound = bind_method(store, "fedbiscuit", 1, 8, **options)
    federation = small_federation(store, UNEQUAL, [0.0], 1)
    sums = planned_weight_sums(federation.weights, 1, 0, range(4))
    state = bound.start(federation, seed=0)
    products = []
    for number in range(4):
        state = play_round(store, bound, state, TRAINED)
        products.append(state.metrics.scalars[f"selector-{number // 2}/weight_product"])
    assert products == pytest.approx([sums[0], sums[0] * sums[1], sums[2], sums[2] * sums[3]])


def test_the_rounds_log_the_warning_before_they_begin(prepared, tmp_path, caplog):
    overrides = ["federation.clients_per_round=1", "federation.rounds=3", "federation.local_steps=1"]
    recipe = load_recipe("debug", [*overrides, "federation.options={aggregator: paper}"])
    loop = open_loop(recipe, prepared, tmp_path)
    expected: list[str] = []
    seed = 0
    while not expected:  # until three rounds sample small clients
        seed += 1
        expected = loop.bound.warnings(loop.federation, seed)
    loop = replace(loop, recipe=recipe.model_copy(update={"seed": seed}))
    with caplog.at_level(logging.WARNING):
        loop.run()
    assert expected[0] in caplog.text
