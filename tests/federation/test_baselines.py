"""FedAvg and FedDPO: the rounds of FedBis with another local objective, on the policy."""

import pytest

from components.config import DpoObjective, FederationConfig, RecipeError
from components.config.local_objectives import SelectorObjective, SftObjective
from components.recipes import load_recipe
from tests.support.bound_methods import bind_method, get_values, play_round, small_federation

METHODS = {
    "fedavg": (SftObjective, "policy"),
    "feddpo": (DpoObjective, "policy"),
    "fedbis": (SelectorObjective, "selector"),
}
TRAINED = {"ada": [1.0, 0.0], "bea": [0.0, 4.0]}


@pytest.fixture
def federation(store):
    return small_federation(store, {"ada": 3, "bea": 1}, [0.0, 0.0], clients_per_round=2)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_names_its_local_objective_and_the_model_that_it_trains_on_which_alone_it_depends(
    name, debug
):
    objective, model = METHODS[name]
    federation = FederationConfig(method=name)
    assert isinstance(federation.options.local().objective, objective)
    assert federation.options.trained_model == model
    recipe = debug.model_copy(update={"federation": federation})
    assert recipe.rounds_sections == [model, "federation"]


@pytest.mark.parametrize("name", METHODS)
def test_each_client_trains_the_servers_adapter(name, store, federation):
    bound = bind_method(store, name, clients_per_round=2)
    jobs = bound.plan(bound.start(federation, 0))
    assert [job.client for job in jobs] == ["ada", "bea"]
    assert {job.kind for job in jobs} == {"train"}
    assert {job.adapter_name for job in jobs} == {METHODS[name][1]}
    assert {job.received for job in jobs} == {(federation.initial,)}


@pytest.mark.parametrize("name", METHODS)
def test_adapters_are_averaged_by_the_clients_shares_of_the_pairs(name, store, federation):
    bound = bind_method(store, name, clients_per_round=2)
    new = play_round(store, bound, bound.start(federation, 0), TRAINED)
    adapter_name = METHODS[name][1]
    assert list(new.adapters) == [adapter_name]
    assert get_values(store, new.adapters[adapter_name]) == [0.75, 1.0]


@pytest.mark.parametrize("name", METHODS)
def test_all_clients_use_the_one_adapter_that_the_rounds_end_with(name, store, federation):
    bound = bind_method(store, name, clients_per_round=2)
    outcome = bound.outcome(bound.start(federation, 0))
    assert (outcome.votes, outcome.clients) == (METHODS[name][1] == "selector", [])
    assert list(outcome.adapters.values()) == [federation.initial]
    assert outcome.assignment == {}
    assert outcome.job_keys == {}


@pytest.mark.parametrize("name", METHODS)
def test_an_ensemble_is_refused_by_a_method_that_trains_one_adapter(name):
    with pytest.raises(RecipeError, match=r"unknown key 'federation\.options\.selectors'"):
        load_recipe("debug", [f"federation.method={name}", "federation.options={selectors: 3}"])
