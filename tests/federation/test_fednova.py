"""FedNova: hand-computed server steps, and a run whose clients take different numbers of steps."""

import math

import pytest
import torch

from components.config import RecipeError
from components.recipes import load_recipe
from tests.support.bare_loop import open_loop, run_bare_loop
from tests.support.bound_methods import TENSOR, bind_method, get_values, make_update, small_federation

START = [1.0, 0.0, -2.0]
PAIRS = {"ada": 6, "bea": 2}
TRAINED = {"ada": [3.0, 3.0, -2.0], "bea": [1.0, -2.0, 0.0]}
STEPS = {"ada": 3, "bea": 1}
SGD = "federation.optimizer={name: sgd, lr: 0.1}"


def play(store, method, steps, clients=("ada", "bea"), **options):
    """The server's values after a round with these answers, and the metrics of the round.

    A client of FedNova sends its movement divided by its steps, and their number.
    """
    bound = bind_method(store, method, 2, **options)
    state = bound.start(small_federation(store, PAIRS, START, 2), 0)
    updates = []
    for job in bound.plan(state):
        if job.client in clients:
            sent = torch.tensor(TRAINED[job.client])
            tensors = {TENSOR: sent}
            if method == "fednova":
                count = torch.tensor([float(steps[job.client])])
                movement = (sent - torch.tensor(START)) / count
                tensors = {f"movement/{TENSOR}": movement, "count/steps": count}
            updates.append(make_update(job, store.put(tensors)))
    state = bound.aggregate(state, updates)
    return get_values(store, state.adapters["policy"]), state.metrics.scalars


def test_movements_are_divided_by_the_steps_and_multiplied_by_their_mean(store):
    """p = 3/4, 1/4; tau_eff = 2.5; sum of p_m d_m = 3/4 (-2, -3, 0) / 3 + 1/4 (0, 2, -2)."""
    values, metrics = play(store, "fednova", STEPS)
    assert metrics["effective_steps"] == 2.5
    assert values == pytest.approx([1 + 2.5 * 0.5, 0 + 2.5 * (0.75 - 0.5), -2 + 2.5 * 0.5])
    assert metrics["server_step"] == pytest.approx(math.dist(values, START))


def test_clients_of_equal_weight_differ_by_their_steps_alone(store):
    """p = 1/2, 1/2; tau_eff = 2; sum of p_m d_m = 1/2 (-2, -3, 0) / 3 + 1/2 (0, 2, -2)."""
    values, metrics = play(store, "fednova", STEPS, weights="uniform")
    assert metrics["effective_steps"] == 2.0
    assert values == pytest.approx([1 + 2 / 3, 0 + 2 * (0.5 - 1), -2 + 2 * 1.0])


def test_with_equal_steps_it_is_feddpo(store):
    values, _ = play(store, "fednova", {"ada": 4, "bea": 4})
    assert values == pytest.approx(play(store, "feddpo", {"ada": 4, "bea": 4})[0], rel=1e-6)


def test_the_weights_are_those_of_the_clients_that_took_part(store):
    values, metrics = play(store, "fednova", STEPS, clients=["bea"])
    assert metrics["effective_steps"] == 1.0
    assert values == pytest.approx(TRAINED["bea"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("federation.optimizer.name=adamw", r"optimizer\.name is adamw.*set federation\.optimizer\.name=sgd"),
        ("federation.optimizer.scheduler=cosine", r"scheduler is cosine.*optimizer\.scheduler=constant"),
        ("federation.optimizer.warmup_steps=1", r"warmup_steps is 1.*optimizer\.warmup_steps=0"),
        ("federation.rate_decay={factor: 0.5}", r"rate_decay is .*set federation\.rate_decay=null"),
    ],
)
def test_what_is_no_gradient_descent_at_a_constant_rate_is_refused(override, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe("debug", ["federation.method=fednova", SGD, override])


def test_clients_of_a_run_take_different_numbers_of_steps_and_a_stopped_run_is_resumed(prepared, tmp_path):
    def recipe(rounds):
        settings = ["federation.local_epochs=1", "federation.batch_size=2", "federation.clients_per_round=4"]
        chosen = ["federation.method=fednova", SGD, f"federation.rounds={rounds}"]
        return load_recipe("debug", [*chosen, *settings])

    whole = run_bare_loop(recipe(2), prepared, tmp_path / "whole")
    run_bare_loop(recipe(1), prepared, tmp_path / "stopped")
    resumed = run_bare_loop(recipe(2), prepared, tmp_path / "stopped")
    assert resumed.hashes == whole.hashes
    weights = open_loop(recipe(2), prepared, tmp_path / "whole").federation.weights
    for record in whole.records:
        steps = {name: client.metrics.scalars["steps"] for name, client in record.clients.items()}
        assert len(set(steps.values())) > 1
        expected = sum(weights[name] * count for name, count in steps.items())
        assert record.server.scalars["effective_steps"] == pytest.approx(expected)
