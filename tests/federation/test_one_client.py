"""One client with training pairs among clients without: rounds of every method give finite numbers."""

import math

import pytest

from components.recipes import load_recipe
from tests.support import prepared as prepared_data
from tests.support.bare_loop import run_bare_loop
from tests.support.registries import TRAINED_METHODS

SGD = ["federation.optimizer={name: sgd, lr: 0.1, clip: null}"]
OBJECTIVES = [
    "rewards={long: {kind: function, name: 'tests.support.reward_functions:score_length'},"
    " vowels: {kind: function, name: 'tests.support.reward_functions:score_vowels'}}",
    "federation.options.objectives={long: [long], vowels: [vowels]}",
    "policy.max_new_tokens=4",
]
SETTINGS = {
    "drift": ["federation.options={variant: sp, delta: 1}"],
    "fednova": SGD,
    "scaffold": SGD,
    "firm": OBJECTIVES,
    "fedcmoo": OBJECTIVES,
    "fedper": ["federation.options={shared_layers: 1}"],
    "fedpdpo": ["federation.options={bottleneck: {width: 4}, reward_head: {width: 3}}"],
    "perfedavg": ["federation.options={inner_steps: 1}"],
}
"""What methods need beside their defaults."""
SMALL = [
    "federation.clients_per_round=1",
    "federation.rounds=2",
    "federation.local_steps=2",
    "federation.batch_size=2",
]


@pytest.fixture(scope="module")
def one_client(tmp_path_factory):
    """Prepared data in which ada has training pairs, and three clients have none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared_data, "TRAINING_PAIRS", {"ada": 8, "bea": 0, "cyd": 0, "dan": 0})
        return prepared_data.write_prepared(tmp_path_factory.mktemp("one-client"))


@pytest.mark.parametrize("method", TRAINED_METHODS)
def test_rounds_of_one_client_give_finite_numbers(method, one_client, tmp_path):
    recipe = load_recipe("debug", [f"federation.method={method}", *SMALL, *SETTINGS.get(method, [])])
    records = run_bare_loop(recipe, one_client, tmp_path).records
    assert {name for record in records for name in record.clients} == {"ada"}
    for record in records:
        figures = [record.server.scalars, record.clients["ada"].metrics.scalars]
        assert all(math.isfinite(value) for scalars in figures for value in scalars.values())
