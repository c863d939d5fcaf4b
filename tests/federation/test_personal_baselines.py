"""FedAMP with hand-computed mixtures, Per-FedAvg, and baselines that train by PPO on pairs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open

from components.config import RecipeError
from components.data.records import DataError, read_pairs
from components.federation.aggregation import attention, movement_cosines
from components.federation.clients.context import ClientContexts
from components.federation.clients.policy_client import PolicyClient
from components.federation.clients.private import PrivateStore, private_root
from components.learning.pair_ppo import Critic
from components.models.store import AdapterStore
from components.recipes import load_recipe
from tests.support.adapters import random_tensors
from tests.support.bare_loop import open_loop, prepare_rewards
from tests.support.bound_methods import bind_method, get_values, make_updates, small_federation
from tests.support.long_tier import with_examples

SMALL = ["federation.rounds=1", "federation.clients_per_round=3", "federation.batch_size=2"]


def make_recipe(method, options, *overrides):
    return load_recipe(
        "debug", [f"federation.method={method}", f"federation.options={options}", *SMALL, *overrides]
    )


def differs(first, second):
    return any(not torch.equal(first[name], second[name]) for name in first)


# --- FedAMP


@pytest.fixture
def origin():
    return {"a": torch.tensor([100.0, 100.0]), "b": torch.tensor([[100.0]])}


def move(adapter, first, second):
    return {"a": adapter["a"] + torch.tensor([first, second]), "b": adapter["b"].clone()}


def test_cosines_are_those_of_the_movements_from_the_common_start(origin):
    movements = [(1.0, 0.0), (0.0, 2.0), (-3.0, 0.0), (1.0, 1.0)]
    cosines = movement_cosines([move(origin, *movement) for movement in movements], origin)
    half = math.sqrt(0.5)
    assert np.allclose(
        cosines, [[1, 0, -1, half], [0, 1, 0, half], [-1, 0, 1, -half], [half, half, -half, 1]]
    )


def test_adapters_that_have_not_moved_are_similar_to_each_other_alone(origin):
    cosines = movement_cosines([origin, move(origin, 1.0, 0.0), origin], origin)
    assert cosines.tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]


SIMILARITIES = np.array([[1.0, 0.0, -1.0], [0.0, 1.0, 0.5], [-1.0, 0.5, 1.0]])


def test_attention_is_a_softmax_of_each_row():
    weights = attention(SIMILARITIES, temperature=0.5, floor=0.0)
    assert weights[0] == pytest.approx(np.exp([2, 0, -2]) / np.exp([2, 0, -2]).sum())
    assert weights.sum(axis=1) == pytest.approx(1)


def test_weights_below_the_floor_are_raised_to_it_before_the_weights_are_normalized():
    first, second, third = attention(SIMILARITIES, 0.5, 0.0)[0]
    assert third < 0.05
    expected = np.array([first, second, 0.05]) / (first + second + 0.05)
    floored = attention(SIMILARITIES, 0.5, 0.05)
    assert floored[0] == pytest.approx(expected)
    assert floored.sum(axis=1) == pytest.approx(1)


def test_a_low_temperature_selects_the_client_itself_and_a_high_one_averages():
    assert attention(SIMILARITIES, 1e-3, 0.0).argmax(axis=1).tolist() == [0, 1, 2]
    assert attention(SIMILARITIES, 1e9, 0.0) == pytest.approx(1 / 3, abs=1e-6)


TRAINED = {"ada": [1.0, 0.0], "bea": [0.0, 1.0], "cyd": [1.0, 1.0]}


@pytest.fixture
def fedamp_round(tmp_path):
    """A store, the bound, its state, and the updates of three of four clients."""
    store = AdapterStore(tmp_path / "adapters")
    federation = small_federation(store, dict.fromkeys(("ada", "bea", "cyd", "dan"), 1), [0.0, 0.0], 4)
    bound = bind_method(store, "fedamp", 4, temperature=0.5, floor=0.0)
    state = bound.start(federation, 0)
    jobs = [job for job in bound.plan(state) if job.client != "dan"]
    return store, bound, state, make_updates(store, jobs, TRAINED)


def test_each_client_is_sent_a_hand_computed_mixture_by_similarity_from_which_its_next_job_starts(
    fedamp_round,
):
    store, bound, state, updates = fedamp_round
    new = bound.aggregate(state, updates)
    scores = np.exp(np.array([1.0, 0.0, 1 / math.sqrt(2)]) / 0.5)
    ada, bea, cyd = scores / scores.sum()
    assert new.memory.weights["ada"] == pytest.approx({"ada": ada, "bea": bea, "cyd": cyd})
    mixture = get_values(store, new.memory.sent["ada"])
    assert mixture == pytest.approx([ada + cyd, bea + cyd], rel=1e-6)
    assert new.metrics.scalars["ada/own_weight"] == pytest.approx(ada)
    jobs = {job.client: job.adapter for job in bound.plan(new)}
    assert jobs["ada"] == new.memory.sent["ada"] != new.adapters["ada"]


def test_each_client_ends_with_the_adapter_that_it_trained(fedamp_round):
    store, bound, state, updates = fedamp_round
    new = bound.aggregate(state, updates)
    outcome = bound.outcome(new)
    assert outcome.has_client_policies
    for name, values in TRAINED.items():
        assert get_values(store, outcome.adapters[name]) == values
    assert outcome.adapters["dan"] == state.federation.initial
    assert new.memory.sent["dan"] == state.federation.initial


def test_mixtures_do_not_depend_on_the_order_of_arrival(fedamp_round):
    _, bound, state, updates = fedamp_round
    assert bound.aggregate(state, updates[::-1]) == bound.aggregate(state, updates)


# --- Per-FedAvg


@pytest.fixture(scope="module")
def perfedavg(prepared, tmp_path_factory):
    """A federation of Per-FedAvg after one round of all four clients."""
    sizes = ["federation.local_steps=7", "federation.clients_per_round=4"]
    recipe = make_recipe("perfedavg", "{inner_lr: 0.5, inner_steps: 2, outer_lr: 1e-2}", *sizes)
    loop = open_loop(recipe, prepared, tmp_path_factory.mktemp("perfedavg"))
    loop.run()
    return loop


@pytest.fixture(scope="module")
def server_adapter(perfedavg):
    return perfedavg.commits.store.get(perfedavg.latest_state().adapters["policy"])


@pytest.fixture(scope="module")
def held_out_rows(prepared):
    return read_pairs(prepared / "pairs.parquet", "ada", "test")


def client_margins(loop, client, adapter, rows):
    return loop.trainer.score_pairs(rows, adapter, loop.context(client)).margins


def test_the_budget_of_a_round_counts_gradients_and_a_client_keeps_no_modules(perfedavg):
    """7 gradients are three meta-steps: one of 2 inner minibatches and an outer one, two of 1 and 1."""
    (record,) = perfedavg.records
    for client in record.clients.values():
        assert client.metrics.scalars["steps"] == 7
        assert client.traffic.kept == 0
    outcome = perfedavg.bound.outcome(perfedavg.latest_state())
    assert (outcome.own, outcome.has_client_policies) == ("modules", False)
    assert set(outcome.job_keys.values()) == {""}


def test_a_clients_scores_are_those_of_its_own_adaptation_repeatable_and_never_stored(
    perfedavg, server_adapter, held_out_rows
):
    before = sorted(perfedavg.commits.store.root.iterdir())
    ada, bea, again = (
        client_margins(perfedavg, name, server_adapter, held_out_rows) for name in ("ada", "bea", "ada")
    )
    reference = PolicyClient(perfedavg.recipe, "cpu")
    assert ada.shape == (1, 2)
    assert np.array_equal(ada, again)
    assert not np.allclose(ada, bea, atol=1e-5)
    plain = reference.score_pairs(held_out_rows, server_adapter, None).margins
    assert not np.allclose(ada, plain, atol=1e-5)
    assert sorted(perfedavg.commits.store.root.iterdir()) == before


def test_a_clients_policy_is_its_adaptation_whichever_client_was_loaded_before(perfedavg, server_adapter):
    trainer = perfedavg.trainer
    trainer.load_client(server_adapter, perfedavg.context("ada"))
    adapted = trainer.resident.slot.read()
    trainer.load_client(server_adapter, perfedavg.context("bea"))
    trainer.load_client(server_adapter, perfedavg.context("ada"))
    assert differs(adapted, server_adapter)
    assert not differs(adapted, trainer.resident.slot.read())


# --- each with PPO

BY_PPO = {
    "feddpo": "{objective: ppo}",
    "perfedavg": "{objective: ppo, inner_lr: 0.5, inner_steps: 1, outer_lr: 1e-2}",
    "fedamp": "{objective: ppo}",
    "fedper": "{objective: ppo, shared_layers: 1}",
    "fedrep": "{objective: ppo, personal: {lr: 1e-2}}",
}


REWARD = "rewards={length: {kind: function, name: 'tests.support.reward_functions:score_length'}}"


def open_scored(recipe, prepared, folder):
    """A federation whose clients' pairs are scored by the reward."""
    prepare_rewards(recipe, prepared, folder, folder / "judges")
    return open_loop(recipe, prepared, folder)


def train_by_ppo(method, prepared, folder, options=None, *overrides):
    steps = ["federation.local_steps=2", "federation.optimizer.lr=1e-2"]
    recipe = make_recipe(method, options or BY_PPO[method], REWARD, *steps, *overrides)
    loop = open_scored(recipe, prepared, folder)
    loop.run()
    return loop


@pytest.mark.parametrize("method", with_examples(BY_PPO, examples=["fedamp"]))
def test_each_baseline_trains_by_ppo_on_its_clients_own_pairs(method, prepared, tmp_path):
    loop = train_by_ppo(method, prepared, tmp_path)
    (record,) = loop.records
    store = loop.commits.store
    initial = store.get(loop.federation.initial)
    assert len(record.clients) == 3
    for name, client in record.clients.items():
        scalars = client.metrics.scalars
        assert client.rows > 0
        assert math.isfinite(scalars["loss"])
        assert scalars["steps"] > 0
        adapters = loop.latest_state().adapters
        assert differs(store.get(adapters[name if method == "fedamp" else "policy"]), initial)
        assert scalars["kl"] >= 0
        assert scalars["stopped"] in (0, 1)
        assert 0 < scalars["pairs"] <= client.rows


def test_perfedavg_adapts_by_ppo_without_dropout(prepared, tmp_path):
    options = "{objective: ppo, inner_lr: 0.5, inner_steps: 2, outer_lr: 1e-2}"
    adapted = []
    for dropout in (0.0, 0.5):
        setting = f"policy.lora.dropout={dropout}"
        loop = train_by_ppo("perfedavg", prepared, tmp_path / str(dropout), options, setting)
        (client, *_) = loop.records[0].clients
        trainer = loop.trainer
        server = random_tensors(trainer.resident.slot, seed=0, scale=0.3)
        trainer.load_client(server, loop.context(client))
        adapted.append(trainer.resident.slot.read())
        assert differs(adapted[-1], server)
    assert not differs(*adapted)


def test_private_modules_are_trained_by_ppo_too(prepared, tmp_path):
    loop = train_by_ppo("fedrep", prepared, tmp_path)
    (record,) = loop.records
    initial = loop.trainer.resident.personal.initial_modules(loop.recipe.seed)
    for name, client in record.clients.items():
        assert differs(loop.context(name).private_state().tensors, initial)
        assert {"personal/kl", "shared/kl"} <= set(client.metrics.scalars)


PATIENT = "objective: {kind: ppo, target_kl: 1000}"
IN_EPOCHS = {
    "feddpo": f"{{{PATIENT}}}",
    "fedamp": f"{{{PATIENT}}}",
    "fedper": f"{{{PATIENT}, shared_layers: 1}}",
    "perfedavg": f"{{{PATIENT}, inner_steps: 1}}",
}


@pytest.mark.parametrize("method", with_examples(IN_EPOCHS, examples=["perfedavg"]))
def test_a_client_takes_all_its_pairs_in_each_of_four_epochs_whatever_local_steps_says(
    method, prepared, tmp_path
):
    loop = train_by_ppo(method, prepared, tmp_path, IN_EPOCHS[method])
    (record,) = loop.records
    for client in record.clients.values():
        scalars = client.metrics.scalars
        assert scalars["steps"] == 4 * math.ceil(client.rows / 4)
        assert scalars["pairs"] == client.rows
        assert scalars["stopped"] == 0


BY_CRITIC = "objective: {kind: ppo, advantage: critic, target_kl: 1000}"
WITH_CRITIC = dict.fromkeys(("feddpo", "ffa_lora", "fedamp", "fedcda", "fedopt"), f"{{{BY_CRITIC}}}")
WITH_CRITIC["fedrep"] = f"{{{BY_CRITIC}, personal: {{lr: 1e-2}}}}"


@pytest.mark.parametrize("method", with_examples(WITH_CRITIC, examples=["fedrep"]))
def test_a_critic_stays_in_the_clients_private_store_from_round_to_round(method, prepared, tmp_path):
    options = WITH_CRITIC[method]
    loop = train_by_ppo(method, prepared, tmp_path, options, "federation.rounds=2")
    state = loop.latest_state()
    root = private_root(loop.commits.folder)
    for name, client in loop.records[-1].clients.items():
        store = PrivateStore(root, name)
        kept = store.load(state.memory.job_keys[name])
        assert kept.tensors["loss.critic.bias"].item() != 0.0
        assert kept.tensors["loss.critic.weight"].abs().max() > 0
        assert client.traffic.kept == kept.size > 0
    jobs = loop.bound.plan(state)
    assert {job.previous_job_key for job in jobs} <= set(state.memory.job_keys.values()) | {""}
    assert any(job.previous_job_key for job in jobs)
    for path in loop.commits.folder.rglob("*.safetensors"):
        with safe_open(path, framework="pt") as content:
            assert not any("critic" in name for name in set(content.keys()))


def test_a_client_continues_with_the_critic_that_it_kept_after_its_last_accepted_job(
    prepared, tmp_path, monkeypatch
):
    starts = []

    class Recording(Critic):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            starts.append(self.read())

    monkeypatch.setattr("components.learning.pair_ppo.Critic", Recording)
    loop = open_scored(make_recipe("feddpo", f"{{{BY_CRITIC}}}", REWARD), prepared, tmp_path)
    first = loop.bound.plan(loop.initial_state())[0]
    loop.run_job(first)
    loop.run_job(first.model_copy(update={"round": 1, "previous_job_key": first.key()}))
    kept = PrivateStore(private_root(loop.commits.folder), first.client).load(first.key()).tensors
    assert not any(value.any() for value in starts[0].values())
    assert {f"loss.{name}" for name in starts[1]} == set(kept)
    assert all(torch.equal(value, kept[f"loss.{name}"]) for name, value in starts[1].items())
    assert differs(*starts)


def test_a_client_that_trains_by_ppo_ends_with_another_adapter_than_by_dpo(prepared, tmp_path):
    ppo = train_by_ppo("feddpo", prepared, tmp_path / "ppo")
    recipe = make_recipe("feddpo", "{}", "federation.local_steps=2", "federation.optimizer.lr=1e-2")
    dpo = open_loop(recipe, prepared, tmp_path / "dpo")
    assert dpo.run().adapters != ppo.latest_state().adapters


@pytest.fixture
def scored_context(prepared, tmp_path):
    """ada's context in a federation whose pairs are scored."""
    recipe = make_recipe("feddpo", BY_PPO["feddpo"], REWARD)
    prepare_rewards(recipe, prepared, tmp_path, tmp_path / "judges")
    store = AdapterStore(tmp_path / "federation" / "adapters")
    return ClientContexts(store, prepared / "pairs.parquet").open("ada")


def test_a_client_reads_the_scores_of_its_pairs(scored_context):
    rows = scored_context.rows("train")
    lengths = [[len(row.chosen), len(row.rejected)] for row in rows]
    assert scored_context.pair_scores(rows, "length").tolist() == lengths
    assert len(rows) == 8


def test_a_pair_without_a_score_is_refused_by_client_reward_and_pair(scored_context):
    rows = scored_context.rows("train")
    refusal = r"client ada has no scores of 1 pairs by reward 'length' \(such as new\): resume"
    with pytest.raises(DataError, match=refusal):
        scored_context.pair_scores([*rows, replace(rows[0], pair_id="new")], "length")


def test_a_reward_that_has_not_scored_any_pairs_is_refused_by_its_name(scored_context):
    with pytest.raises(DataError, match="no scores of 8 pairs by reward 'other'"):
        scored_context.pair_scores(scored_context.rows("train"), "other")


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("feddpo", "{objective: {kind: dpo, clip: 0.1}}", r"unknown key '{}\.objective\.clip'"),
        (
            "feddpo",
            "{objective: {kind: ppo, advantage: gae}}",
            r"{}\.objective\.advantage' is 'gae'.*there are: critic, sequence",
        ),
        (
            "feddpo",
            "{objective: {kind: ppo, advantage: {kind: sequence, gae_lambda: 0.9}}}",
            r"unknown key '{}\.objective\.advantage\.gae_lambda'",
        ),
        ("fedamp", "{aggregator: paper}", r"unknown key '{}\.aggregator'"),
        ("fedpdpo", "{objective: ppo}", r"{}\.objective"),
        (
            "perfedavg",
            "{objective: {kind: ppo, advantage: critic}}",
            r"unknown key '{}\.objective\.advantage'",
        ),
    ],
)
def test_options_that_would_have_no_effect_are_refused(method, options, message):
    rewards = ["rewards={mine: {kind: judge}}"] if "ppo" in options else []
    with pytest.raises(RecipeError, match=message.replace("{}", r"federation\.options")):
        make_recipe(method, options, *rewards)


def test_ppo_without_its_one_reward_is_refused_with_an_example():
    with pytest.raises(RecipeError, match=r"federation\.options\.objective 'ppo' needs one reward.*rewards:"):
        make_recipe("feddpo", "{objective: ppo}")


def test_a_reward_that_the_objective_does_not_use_is_refused():
    with pytest.raises(RecipeError, match=r"rewards names mine.*'feddpo'.*leave the section out"):
        make_recipe("feddpo", "{}", "rewards={mine: {kind: judge}}")
