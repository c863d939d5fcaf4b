"""Methods on pairs have the same number of gradients per round, the same decay, and rates of their own."""

import math

import pytest
import torch

from components.config import RecipeError
from components.config.modules import StageLength
from components.config.optimizer import RateDecay
from components.federation.clients.private import PrivateState, PrivateStore, private_root
from components.federation.clients.rates import RateMemory
from components.recipes import load_recipe
from tests.support.bare_loop import open_loop, prepare_rewards
from tests.support.long_tier import with_examples

PERSONAL = "lr: {shared}, personal: {{lr: {personal}}}"
OPTIONS = {
    "feddpo": "lr: {shared}",
    "fedamp": "lr: {shared}",
    "perfedavg": "outer_lr: {shared}, inner_steps: 2, inner_lr: 0.1",
    "fedper": f"{PERSONAL}, shared_layers: 1",
    "fedrep": PERSONAL,
    "fedpdpo": f"{PERSONAL}, bottleneck: {{{{width: 4}}}}, reward_head: {{{{width: 3}}}}",
}
"""Options of each method with learning rates."""
EXAMPLES = ("fedpdpo",)
"""With a personal and a shared step."""
BY_PPO = {
    "feddpo": "{objective: ppo}",
    "fedamp": "{objective: ppo}",
    "perfedavg": "{objective: ppo, inner_steps: 2}",
    "fedper": "{objective: ppo, shared_layers: 1}",
    "fedrep": "{objective: ppo}",
}
DECAY = "federation.rate_decay={factor: 0.5, min_lr: 1e-5}"
REWARD = "rewards={length: {kind: function, name: 'tests.support.reward_functions:score_length'}}"


def make_recipe(method, *overrides, shared=1e-2, personal=4e-3):
    options = OPTIONS[method].format(shared=shared, personal=personal)
    chosen = [f"federation.method={method}", f"federation.options={{{options}}}", "federation.rounds=1"]
    settings = ["federation.local_steps=6", "federation.batch_size=2", "federation.clients_per_round=4"]
    return load_recipe("debug", [*chosen, *settings, *overrides])


def count_gradients(loop):
    """Gradients of the first client's job, and its update.

    They are computed once for each forward pass that records a graph; those of the reference and of the
    rollout record none.
    """
    counted = []
    backbone = loop.trainer.resident.model.get_base_model().base_model
    hook = backbone.register_forward_pre_hook(lambda *_: counted.append(torch.is_grad_enabled()))
    try:
        update = loop.run_job(loop.bound.plan(loop.initial_state())[0])
    finally:
        hook.remove()
    return sum(counted), update


# --- gradients


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("method", OPTIONS)
def test_every_method_evaluates_as_many_gradients_in_a_round(method, accumulation, prepared, tmp_path):
    recipe = make_recipe(method, f"federation.optimizer.accumulation={accumulation}")
    gradients, update = count_gradients(open_loop(recipe, prepared, tmp_path))
    assert gradients == 6 * accumulation
    assert gradients == recipe.federation.options.local().gradient_evaluations(recipe.federation, update.rows)


@pytest.mark.parametrize("method", with_examples(OPTIONS, EXAMPLES))
def test_every_method_evaluates_as_many_gradients_in_an_epoch(method, prepared, tmp_path):
    recipe = make_recipe(method, "federation.local_epochs=2", "federation.batch_size=3")
    gradients, update = count_gradients(open_loop(recipe, prepared, tmp_path))
    assert gradients == math.ceil(2 * update.rows / 3)


@pytest.mark.parametrize("method", with_examples(BY_PPO, examples=["fedrep"]))
def test_every_baseline_by_ppo_evaluates_as_many_gradients_in_a_round(method, prepared, tmp_path):
    patient = "federation.options.objective.target_kl=1000"
    recipe = make_recipe(method, f"federation.options={BY_PPO[method]}", patient, REWARD)
    prepare_rewards(recipe, prepared, tmp_path, tmp_path / "judges")
    gradients, update = count_gradients(open_loop(recipe, prepared, tmp_path))
    assert gradients == 4 * math.ceil(update.rows / 4)
    assert update.metrics.scalars["pairs"] == update.rows


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [(8, 0.25, (2, 6)), (7, 0.5, (4, 3)), (2, 0.9, (1, 1)), (10, 0.01, (1, 9)), (1, 0.5, (1, 1))],
)
def test_a_round_is_divided_between_the_personal_and_the_shared_step(count, share, expected):
    assert StageLength(share=share).divide(count) == expected


@pytest.mark.parametrize("method", ["fedrep", "fedpdpo"])
def test_a_round_of_one_step_cannot_be_divided(method):
    refusal = r"federation\.local_steps is 1, which .* cannot divide.*at least 2"
    with pytest.raises(RecipeError, match=refusal):
        make_recipe(method, "federation.local_steps=1")


def test_a_round_without_a_complete_meta_step_is_refused():
    with pytest.raises(RecipeError, match=r"inner_steps is 2, but a round has 2 gradient.*at most 1 inner"):
        make_recipe("perfedavg", "federation.local_steps=2")


# --- learning rates


def first_step(method, prepared, folder, **rates):
    """How far one step of each kind of SGD moves the shared adapter and the private modules."""
    recipe = make_recipe(
        method,
        "federation.optimizer={name: sgd, lr: 123.0, weight_decay: 0, clip: 1.0e-3}",
        "federation.local_steps=1" if method == "fedper" else "federation.local_steps=2",
        "policy.lora.dropout=0",
        **rates,
    )
    loop = open_loop(recipe, prepared, folder)
    job = loop.bound.plan(loop.initial_state())[0]
    slot = loop.trainer.resident.personal
    before = slot.initial_modules(recipe.seed)
    update = loop.run_job(job)
    after = PrivateStore(private_root(loop.commits.folder), job.client).load(job.key()).tensors
    store = loop.commits.store
    initial = store.get(loop.federation.initial)
    return distance(store.get(update.adapter), initial), distance(after, before)


def distance(first, second):
    return float(torch.cat([(first[name] - second[name]).double().reshape(-1) for name in first]).norm())


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedpdpo"])
def test_private_modules_have_the_personal_rate_and_the_shared_adapter_the_methods_own(
    method, prepared, tmp_path
):
    """A step of plain gradient descent is as long as the rate times the clipped gradient's norm."""
    shared, personal = first_step(method, prepared, tmp_path, shared=0.5, personal=2.0)
    assert shared == pytest.approx(0.5 * 1e-3, rel=1e-2)
    assert personal == pytest.approx(2.0 * 1e-3, rel=1e-2)


@pytest.mark.parametrize("method", OPTIONS)
def test_the_methods_own_rate_counts_and_not_the_optimizers(method):
    recipe = make_recipe(method, "federation.optimizer.lr=123", shared=0.25)
    assert recipe.federation.options.local().learning_rate(recipe.federation) == 0.25


def test_without_a_rate_of_its_own_a_method_has_that_of_the_optimizer():
    recipe = make_recipe("feddpo", "federation.options={}", "federation.optimizer.lr=0.125")
    assert recipe.federation.options.local().learning_rate(recipe.federation) == 0.125


def test_the_default_rates_of_private_modules_are_the_same():
    recipes = [make_recipe(method, "federation.options={}") for method in ("fedper", "fedrep", "fedpdpo")]
    assert len({recipe.federation.options.local().personal_lr for recipe in recipes}) == 1


# --- the decay


def test_rates_fall_after_a_round_whose_loss_rose_and_not_below_their_minimum():
    config = RateDecay(factor=0.5, min_lr=3e-4)
    memory = RateMemory()
    rates = []
    for loss in (0.5, 0.7, 0.6, 0.9, 0.95):
        rates.append((memory.learning_rate(1e-3, config), memory.learning_rate(1e-4, config)))
        memory = memory.after_round(loss, config)
    assert [high for high, _ in rates] == pytest.approx([1e-3, 1e-3, 5e-4, 5e-4, 3e-4])
    assert [low for _, low in rates] == [1e-4] * 5
    assert RateMemory.of(memory.numbers()) == memory


def test_without_a_decay_rates_stay():
    memory = RateMemory(dpo=0.1).after_round(0.9, None)
    assert memory.decay == 1.0
    assert memory.learning_rate(1e-3, None) == 1e-3


def run_after(loop, **numbers):
    """Run the first client's job after a job that left these numbers; the update, and the state."""
    first = loop.bound.plan(loop.initial_state())[0]
    slot = loop.trainer.resident.personal
    modules = slot.initial_modules(loop.recipe.seed) if slot else {}
    store = PrivateStore(private_root(loop.commits.folder), first.client)
    store.save("earlier", "", PrivateState(modules, {"scale": 1.0} | numbers))
    job = first.model_copy(update={"previous_job_key": "earlier"})
    return loop.run_job(job), store, job


@pytest.mark.parametrize("method", with_examples(OPTIONS, EXAMPLES))
@pytest.mark.parametrize(("loss", "expected"), [(0.0, 0.5), (100.0, 1.0)])
def test_every_methods_rate_falls_after_a_round_whose_loss_rose(method, loss, expected, prepared, tmp_path):
    loop = open_loop(make_recipe(method, DECAY), prepared, tmp_path)
    update, store, job = run_after(loop, decay=1.0, dpo=loss)
    numbers = store.load(job.key()).numbers
    assert update.metrics.scalars["decay"] == numbers["decay"] == expected
    assert 0.0 < numbers["dpo"] < 100.0


@pytest.mark.parametrize("method", with_examples(OPTIONS, EXAMPLES))
def test_a_decay_of_one_half_trains_as_rates_of_one_half_do(method, prepared, tmp_path):
    decayed = open_loop(make_recipe(method, DECAY), prepared, tmp_path / "decayed")
    halved = open_loop(make_recipe(method, shared=5e-3, personal=2e-3), prepared, tmp_path / "halved")
    first, *_ = run_after(decayed, decay=0.5, dpo=100.0)
    second, *_ = run_after(halved, decay=1.0, dpo=100.0)
    assert first.adapter == second.adapter


@pytest.mark.parametrize("method", with_examples(OPTIONS, EXAMPLES))
def test_a_client_finds_its_decay_again_in_the_next_round(method, prepared, tmp_path):
    recipe = make_recipe(method, DECAY, "federation.rounds=2", "federation.local_steps=3")
    loop = open_loop(recipe, prepared, tmp_path)
    loop.run()
    stores = private_root(loop.commits.folder)
    for name, key in loop.latest_state().memory.job_keys.items():
        first, second = (record.clients[name].metrics.scalars["decay"] for record in loop.records)
        assert first == 1.0
        assert second in (0.5, 1.0)
        assert PrivateStore(stores, name).load(key).numbers["decay"] == second
    assert len(loop.latest_state().memory.job_keys) == 4


def test_the_loss_that_the_decay_follows_is_that_of_dpo_without_the_proximal_term(prepared, tmp_path):
    """The first step is at the reference, whose DPO loss is log 2; a later one has a proximal term."""
    recipe = make_recipe("fedamp", "federation.options={lr: 0.05, proximal: 100.0}")
    loop = open_loop(recipe, prepared, tmp_path)
    update = loop.run_job(loop.bound.plan(loop.initial_state())[0])
    assert update.metrics.scalars["loss"] > 1.5 * update.metrics.scalars["dpo"]


@pytest.mark.parametrize(
    ("method", "options", "overrides"),
    [
        ("fedavg", "{}", []),
        ("fedbis", "{}", []),
        ("drift", "{}", []),
        ("fedrep", "{objective: ppo}", [REWARD]),
    ],
)
def test_a_decay_that_cannot_apply_is_refused(method, options, overrides):
    settings = [f"federation.method={method}", f"federation.options={options}", DECAY, *overrides]
    with pytest.raises(RecipeError, match=r"federation\.rate_decay.*set it to null"):
        load_recipe("debug", settings)
