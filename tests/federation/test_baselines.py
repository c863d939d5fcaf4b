"""FedAvg and FedDPO: FedBis's rounds (tests/federation/test_fedbis.py) with another objective, on the policy."""

import pytest
import torch

from components.config import FederationConfig, RecipeError
from components.federation import fedavg, fedbis, feddpo
from components.federation.strategy import Update, build_federation, build_strategy, federated_sections
from components.models.adapters import AdapterStore


@pytest.fixture
def store(tmp_path):
    return AdapterStore(tmp_path / "adapters")


@pytest.fixture
def federation(store):
    return build_federation({n: {"train": k, "validation": 1, "test": 1} for n, k in (("ada", 3), ("bea", 1))}, store.put({"a": torch.zeros(2)}), 2)


@pytest.mark.parametrize(("method", "trains", "slot"), [("fedavg", "sft", "policy"), ("feddpo", "dpo", "policy"), ("fedbis", "selector", "selector")])
def test_each_method_asks_for_its_objective_and_averages_by_the_clients_shares(store, federation, method, trains, slot):
    strategy = build_strategy(FederationConfig(method=method, clients_per_round=2), store)
    state = strategy.init(federation, 0)
    jobs = strategy.plan(state, 0)
    assert strategy.trains == trains and {(job.objective, job.slot, job.kind) for job in jobs} == {(trains, slot, "train")}
    answers = [Update(job, store.put({"a": torch.tensor([1.0, 0.0] if job.client == "ada" else [0.0, 4.0])}), (), {}) for job in jobs]
    new = strategy.aggregate(state, answers)
    assert set(new.adapters) == {slot} and store.get(new.adapters[slot])["a"].tolist() == [0.75, 1.0] and new.assigned == {}


def test_the_rounds_of_a_policy_depend_on_the_policys_section_and_those_of_a_selector_on_the_selectors(debug):
    for method, section in (("fedavg", "policy"), ("feddpo", "policy"), ("fedbis", "selector")):
        recipe = debug.model_copy(update={"federation": debug.federation.model_copy(update={"method": method})})
        assert federated_sections(recipe) == (section, "federation")


@pytest.mark.parametrize("module", [fedavg, fedbis, feddpo])
def test_an_ensemble_is_refused_by_a_method_that_trains_one_adapter(store, module):
    with pytest.raises(RecipeError, match="federation.selectors is 3, but .* trains 1 adapter: set it to 1"):
        module.build(FederationConfig(method=module.__name__.rsplit(".", 1)[-1], selectors=3), module.Options(), store)
