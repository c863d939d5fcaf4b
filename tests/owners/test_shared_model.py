"""The model that a host of simulated owners loads once."""

import pytest
import torch

from components.federation.clients import worker
from components.owners import shared_model
from components.owners.shared_model import SharedModel
from components.recipes import load_recipe


@pytest.fixture
def built(monkeypatch):
    """The threads of each trainer that was built."""
    threads = []

    def build(recipe, device, name):
        threads.append(torch.get_num_threads())
        return worker.build_trainer(recipe, device, name)

    monkeypatch.setattr(shared_model, "build_trainer", build)
    return threads


def test_a_trainer_is_built_once_for_a_recipe_with_one_thread_and_taken_once(debug, built, two_threads):
    shared = SharedModel()
    values = debug.model_dump(mode="json")
    shared.load(values, "")
    shared.load(values, "")
    assert built == [1] and torch.get_num_threads() == 2
    trainer = shared.take(worker.trainer_key(debug), "cpu")
    assert trainer is not None
    assert shared.take(worker.trainer_key(debug), "cpu") is None


@pytest.mark.parametrize(("key", "device"), [("other", "cpu"), (None, "cuda:0")])
def test_a_trainer_of_another_recipe_or_device_is_not_taken(debug, built, key, device):
    shared = SharedModel()
    shared.load(debug.model_dump(mode="json"), "")
    assert shared.take(key or worker.trainer_key(debug), device) is None


def test_a_recipe_that_cannot_be_built_here_is_left_to_the_owners_process(debug, built):
    shared = SharedModel()
    shared.load({"name": "no recipe"}, "")
    shared.load(debug.model_dump(mode="json"), "no trainer")
    assert shared.take(worker.trainer_key(debug, "no trainer"), "cpu") is None
    recipe = load_recipe("debug", ["federation.method=feddpo"])
    shared.load(recipe.model_dump(mode="json"), "")
    assert shared.take(worker.trainer_key(recipe), "cpu") is not None
