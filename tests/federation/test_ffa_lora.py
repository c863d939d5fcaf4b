"""FFA-LoRA: the factors A stay at their initial values, and averaging B is averaging the products."""

import pytest
import torch

from components.config import RecipeError
from components.federation.clients.worker import build_trainer
from components.models.store import AdapterStore
from components.recipes import load_recipe
from tests.support.bare_loop import run_bare_loop

RECIPE = ["federation.method=ffa_lora", "federation.rounds=2", "federation.clients_per_round=3"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """The initial adapter, and all that clients and server stored in two rounds of the recipe debug."""
    from components.data.prepare import prepare

    folder = tmp_path_factory.mktemp("ffa-lora")
    recipe = load_recipe("debug", RECIPE)
    prepare(recipe.data, recipe.seed, folder / "prepared")
    trainer = build_trainer(recipe, "cpu")
    initial = trainer.initial_adapter(recipe.seed)
    stored = {}
    put = AdapterStore.put

    def record(self, adapter):
        digest = put(self, adapter)
        stored[digest] = dict(adapter)
        return digest

    with pytest.MonkeyPatch.context() as patch:  # those of clients are deleted after their round
        patch.setattr(AdapterStore, "put", record)
        run_bare_loop(recipe, folder / "prepared", folder, trainer)
    return initial, list(stored.values())


def factors(adapter: dict[str, torch.Tensor], factor: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in adapter.items() if f".lora_{factor}." in name}


def test_all_adapters_keep_the_initial_factors_a(adapters):
    initial, stored = adapters
    assert len(stored) == 1 + 2 * (3 + 1)
    for adapter in stored:
        for name, tensor in factors(adapter, "A").items():
            assert torch.equal(tensor, initial[name])


def test_the_factors_b_are_trained(adapters):
    _, stored = adapters
    trained = [adapter for adapter in stored if any(b.any() for b in factors(adapter, "B").values())]
    assert len(trained) == len(stored) - 1


@pytest.mark.parametrize("aggregator", ["participation", "paper", "uniform", "trimmed"])
def test_every_aggregator_of_the_factors_b_is_accepted(aggregator):
    recipe = load_recipe("debug", [*RECIPE, f"federation.options.aggregator={aggregator}"])
    assert recipe.federation.options.aggregator.kind == aggregator


def test_the_exact_aggregator_is_refused():
    with pytest.raises(RecipeError, match=r"federation\.options\.aggregator 'exact'.*'participation'"):
        load_recipe("debug", [*RECIPE, "federation.options.aggregator=exact"])
