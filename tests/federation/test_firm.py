"""FIRM and FedCMOO-A: rounds on a tiny model, what clients remember, what goes up, and the server's part by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from components.config import RecipeError
from components.data.records import read_clients, read_rows
from components.federation import fedcmoo
from components.federation import firm as firm_method
from components.federation.clients import LEARNERS, run_job
from components.federation.commits import Commits
from components.federation.fedcmoo import gram_of
from components.federation.firm import mean_distance
from components.federation.private import home_of
from components.federation.rewards_client import packed, prompts_of, unpacked
from components.federation.rounds import close_step, run_federation
from components.federation.strategy import Client, Federation, Job, Update, build_federation, build_strategy
from components.learning import mgda
from components.learning.local import minibatches
from components.learning.multi_objective import ClientState, Moments, objective_gradients, roll_out
from components.models.adapters import AdapterStore
from components.recipes import load_recipe
from components.seeding import derive
from tests.learning.test_multi_objective import long, vowels

OBJECTIVES = "{long: [long], vowels: [vowels]}"
REWARDS = "rewards={long: {kind: function, name: 'tests.learning.test_multi_objective:long'}, vowels: {kind: function, name: 'tests.learning.test_multi_objective:vowels'}}"


def recipe_of(method="firm", options="", *more):
    return load_recipe("debug", [
        f"federation.method={method}", f"federation.options={{objectives: {OBJECTIVES}, ppo: {{minibatch: 2}}{options}}}", REWARDS, "federation.clients_per_round=3", "federation.batch_size=4",
        "federation.local_steps=1", "federation.rounds=2", "policy.max_new_tokens=8", "policy.lora={r: 2, alpha: 4, dropout: 0.0}", *more])


def run(recipe, prepared, folder):
    torch.set_num_threads(1)
    learner, commits = LEARNERS["rewards"](recipe, "cpu"), Commits(folder / "federation", "test")
    federation = build_federation(read_clients(prepared), commits.store.put(learner.initial_adapter(recipe.seed)), recipe.federation.clients_per_round)
    return run_federation(recipe, federation, prepared / "pairs.parquet", commits, learner), commits, learner


@pytest.fixture(scope="module")
def firm(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("firm")
    return *run(recipe_of(), prepared, folder), folder


def test_one_adapter_goes_up_whatever_the_objectives_and_the_clients_weights_are_in_the_record(firm):
    state, commits, *_ = firm
    _, records = commits.latest()
    assert state.round == 2 and len(records) == 2
    for record in records:
        assert len(record["clients"]) == 3
        for metrics in record["clients"].values():
            assert metrics["lambda/long"] + metrics["lambda/vowels"] == pytest.approx(1) and metrics["bytes_sent"] == metrics["bytes_received"] and metrics["bytes_kept"] > 0
            assert metrics["steps"] == 3 * 2 and {"kl", "kl_coefficient", "score/long", "score/vowels"} <= set(metrics)
        steps = np.array([[m["lambda_steps"]["long"], m["lambda_steps"]["vowels"]] for m in record["clients"].values()])
        weights = steps.mean(axis=2)
        assert steps.shape == (3, 2, 6) and np.allclose(weights[:, 0], [m["lambda/long"] for m in record["clients"].values()])
        assert record["server"]["lambda_drift"] == pytest.approx(np.mean([mean_distance(steps[:, :, n]) for n in range(6)]))
        assert record["server"]["mean_lambda_drift"] == pytest.approx(mean_distance(weights)) and record["server"]["mean_lambda_drift"] < record["server"]["lambda_drift"] and record["server"]["update_drift"] > 0
        assert record["server"]["lambda/long"] == pytest.approx(weights[:, 0].mean())


def test_options_are_what_the_clients_train_by():
    given = {"objectives": {"long": ["long"], "vowels": ["vowels"]}, "ppo": {"temperature": 0.7, "clip": 0.3, "lam": 0.9, "epochs": 2, "minibatch": 5, "target_kl": 4.0, "horizon": 9, "normalise": False}}
    wanted = {"temperature": 0.7, "clip": 0.3, "lam": 0.9, "epochs": 2, "minibatch": 5, "target_kl": 4.0, "horizon": 9, "normalise": False}
    for options, more in (
            (firm_method.Options(**given), {"beta": 0.1, "weights": None, "preference": None}), (firm_method.Options(**given, beta=0), {"beta": 0}),
            (firm_method.Options(**given, beta=2, preference={"long": 3}), {"beta": 2, "preference": {"long": 3}}), (firm_method.Options(**given, beta=None, weights={"long": 3, "vowels": 1}), {"weights": {"long": 0.75, "vowels": 0.25}}),
            (fedcmoo.Options(**given), {}), (fedcmoo.Options(**given, beta=None), {})):
        found = options.coefficients()
        assert {key: getattr(found, key) for key in (*wanted, *more)} == wanted | more
    assert fedcmoo.Options(**given, beta=3).coefficients([0.2, 0.8]).weights == {"long": 0.2, "vowels": 0.8}


def test_the_drift_is_the_mean_distance_of_two_clients():
    assert mean_distance(np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]])) == pytest.approx((5 + 0 + 5) / 3) and mean_distance(np.array([[1.0, 2.0]])) == 0


def test_the_servers_log_is_by_hand(tmp_path):
    store = AdapterStore(tmp_path)
    refs = [store.put({"w": torch.tensor(values)}) for values in ([1.0, 1.0], [4.0, 5.0], [1.0, 1.0], [1.0, 3.0])]
    clients = tuple(Client(name, 1, 1, 1 / 3) for name in "abc")
    strategy = build_strategy(recipe_of().federation, store)
    state = strategy.init(Federation(clients, refs[0]), 0)
    shares = {"a": 0.2, "b": 0.6, "c": 1.0}
    updates = [Update(Job("train", name, 0, "policy", (refs[0],), "rewards", 1), ref, (), {"lambda_steps": {"long": [shares[name], 0.5, *([0.1] if name == "b" else [])], "vowels": [1 - shares[name], 0.5, *([0.9] if name == "b" else [])]}}) for name, ref in zip("bca", (refs[2], refs[3], refs[1]), strict=True)]
    after = strategy.aggregate(state, updates)
    assert torch.allclose(store.get(after.adapters["policy"])["w"], torch.tensor([2.0, 3.0])) and after.memory["last"] == {u.job.client: u.job.key() for u in updates}
    apart = math.sqrt(2) * (0.4 + 0.8 + 0.4) / 3      # in the first step; in the second all are alike, and a third one client alone has
    assert after.log["lambda_drift"] == pytest.approx(apart / 2) and after.log["mean_lambda_drift"] == pytest.approx(apart / 2) and after.log["lambda/long"] == pytest.approx(0.55)
    assert after.log["update_drift"] == pytest.approx((5 + math.sqrt(9 + 4) + 2) / 3)


def test_a_client_goes_on_with_what_it_remembers(firm, prepared):
    state, commits, *_ = firm
    rounds = [set(record["clients"]) for record in commits.latest()[1]]
    name = min(rounds[0] & rounds[1])
    kept = home_of(name, commits.store, prepared / "pairs.parquet", state.memory["last"][name]).state()
    found = unpacked(kept, ["long", "vowels"])
    assert found.moments["long"].count == 2 * 4 and set(found.heads) == {"long", "vowels"} and found.heads["long"].abs().max() > 0
    again = unpacked(packed(found), ["long", "vowels"])
    assert again.moments == found.moments and again.kl == found.kl and all(torch.equal(again.heads[n], found.heads[n]) for n in found.heads)
    assert packed(ClientState({"o": torch.zeros(2)}, {"o": Moments(3, 1.5, 2.0)}, 0.3)).numbers == {"kl": 0.3, "o/count": 3.0, "o/mean": 1.5, "o/squares": 2.0}


def test_a_killed_run_goes_on_with_the_same_bytes(firm, prepared, tmp_path):
    whole, *_ = firm
    recipe = recipe_of()
    half = recipe.model_copy(update={"federation": recipe.federation.model_copy(update={"rounds": 1})})
    run(half, prepared, tmp_path)
    later = Commits(tmp_path / "federation", "test")
    state, _ = later.latest()
    jobs = build_strategy(recipe.federation, later.store).plan(state, 1)
    run_job(jobs[0], LEARNERS["rewards"](recipe, "cpu"), prepared / "pairs.parquet", later.store)     # one client was done when it was killed
    resumed, *_ = run(recipe, prepared, tmp_path)
    assert resumed.adapters["policy"].hash == whole.adapters["policy"].hash and resumed.memory == whole.memory


def test_clients_have_the_rewards_of_an_objective_in_turn(prepared):
    recipe = recipe_of("firm", "")
    learner = LEARNERS["rewards"](recipe, "cpu")
    homes = {name: home_of(name, AdapterStore(prepared / "nowhere" / "adapters"), prepared / "pairs.parquet", "") for name in sorted(read_clients(prepared))}
    assert [home.reward_of(["one", "two"]) for home in homes.values()] == [("one", "two")[n % 2] for n in range(len(homes))] and homes["ada"].reward_of(["only"]) == "only"
    assert list(learner.scorers(homes["ada"])) == ["long", "vowels"]


def test_clients_train_by_their_own_reward_of_an_objective_and_policies_are_measured_by_the_first(prepared, tmp_path):
    recipe = recipe_of("firm", "", "federation.options.objectives={much: [long, vowels]}")
    learner = LEARNERS["rewards"](recipe, "cpu")
    homes = [home_of(name, AdapterStore(prepared / "nowhere" / "adapters"), prepared / "pairs.parquet", "") for name in sorted(read_clients(prepared))]
    asked = ["a prompt"], ["an answer of some length"]
    (first,), (second,) = (learner.scorers(home)["much"](*asked) for home in homes[:2])
    assert (first, second) == (float(len(asked[1][0])), pytest.approx(7 - 0.8))
    prompts, adapter = ["one", "two of them"], learner.initial_adapter(0)
    measured = learner.measure(prompts, adapter, homes[0].rewards, 5)
    learner.resident.slot.load(adapter)
    rollout, _ = roll_out(learner.resident, prompts, {"much": long}, ClientState.first(["much"], learner._hidden, 0.0), learner.options.coefficients(), derive(5, 0))
    assert measured == {"much": pytest.approx(rollout.scores.mean()), "kl": pytest.approx(0, abs=1e-6), "prompts": 2}


def test_the_learner_starts_from_the_options_coefficient_and_trains_its_heads_at_their_rate(prepared, tmp_path):
    rows = read_rows(prepared / "pairs.parquet", "ada", "train").to_list()
    heads = {}
    for rate in (1e-9, 1e-2):
        recipe = recipe_of("firm", "", "federation.options.ppo.kl=0.37", "federation.options.ppo.target_kl=null", f"federation.options.ppo.critic_lr={rate}")
        learner, store = LEARNERS["rewards"](recipe, "cpu"), AdapterStore(tmp_path / str(rate) / "adapters")
        ref = store.put(learner.initial_adapter(0))
        job = Job("train", "ada", 0, "policy", (ref,), "rewards", 1)
        home = home_of("ada", store, prepared / "pairs.parquet", "")
        _, metrics = learner.train(rows, store.get(ref), 1, home, job)
        assert metrics["kl_coefficient"] == 0.37
        heads[rate] = unpacked(home_of("ada", store, prepared / "pairs.parquet", job.key()).state(), ["long", "vowels"]).heads["long"].abs().max()
    assert heads[1e-9] < 1e-7 and heads[1e-2] > 1e-3


def test_prompts_are_each_client_asked_once():
    assert prompts_of([{"prompt": "b"}, {"prompt": "a"}, {"prompt": "b"}]) == ["b", "a"]


def test_fixed_weights_ask_for_no_mgda(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(mgda, "solve", lambda *_: pytest.fail("solved"))
    recipe = recipe_of("firm", ", weights: {long: 3, vowels: 1}", "federation.rounds=1")
    _, commits, _ = run(recipe, prepared, tmp_path)
    for metrics in commits.latest()[1][0]["clients"].values():
        assert (metrics["lambda/long"], metrics["lambda/vowels"]) == (pytest.approx(0.75), pytest.approx(0.25))


# --- FedCMOO-A

def test_the_gram_matrix_of_what_clients_send():
    gradients = {"a/x": torch.tensor([1.0, 2.0]), "a/y": torch.tensor([[3.0]]), "b/x": torch.tensor([0.0, 1.0]), "b/y": torch.tensor([[-1.0]])}
    assert gram_of(gradients, ["a", "b"]).tolist() == [[14.0, -1.0], [-1.0, 2.0]]


def test_clients_send_a_gradient_of_each_objective_and_all_train_with_the_servers_weights(prepared, tmp_path):
    recipe = recipe_of("fedcmoo", "")
    state, commits, _learner = run(recipe, prepared, tmp_path)
    _, records = commits.latest()
    assert state.round == 2 and [record["phase"] for record in records] == ["gradients", "train"] * 2
    for asked, trained in zip(records[::2], records[1::2], strict=True):
        assert set(asked["clients"]) == set(trained["clients"])
        sent, adapter = (next(iter(record["clients"].values()))["bytes_sent"] for record in (asked, trained))
        assert sent == pytest.approx(2 * adapter, rel=0.15) and all(m["bytes_kept"] == 0 for m in asked["clients"].values())
        for metrics in trained["clients"].values():
            assert [metrics["lambda/long"], metrics["lambda/vowels"]] == pytest.approx(trained["memory"]["lambda"])
        assert trained["server"]["lambda_drift"] == pytest.approx(0, abs=1e-9) and trained["server"]["update_drift"] > 0


def test_the_servers_weights_are_mgdas_of_the_mean_gradients(tmp_path):
    store = AdapterStore(tmp_path)
    first = store.put({"w": torch.tensor([0.0, 0.0])})
    clients = (Client("a", 1, 1, 0.25), Client("b", 3, 1, 0.75))
    strategy = build_strategy(recipe_of("fedcmoo", "").federation, store)
    state = strategy.init(Federation(clients, first), 0)
    assert state.phase == "gradients"

    def answers(sent):
        return [Update(replace(Job("train", name, 0, "policy", (first,), "rewards", 1), kind="gradients"), store.put(tensors), (), {}) for name, tensors in sent.items()]

    after = strategy.aggregate(state, answers({"a": {"long/w": torch.tensor([4.0, 0.0]), "vowels/w": torch.tensor([0.0, 8.0])}, "b": {"long/w": torch.tensor([0.0, 0.0]), "vowels/w": torch.tensor([0.0, 0.0])}}))
    assert (after.phase, after.round) == ("train", 0) and after.memory["lambda"] == pytest.approx([0.8, 0.2]) and after.log["lambda/long"] == pytest.approx(0.8)
    # of unlike clients the mean is (3, 1) and (1, 6) with their weights; the regularised optimum of two is where its derivative along (1, -1) is 0
    unlike = answers({"a": {"long/w": torch.tensor([0.0, 4.0]), "vowels/w": torch.tensor([4.0, 0.0])}, "b": {"long/w": torch.tensor([4.0, 0.0]), "vowels/w": torch.tensor([0.0, 8.0])}})
    for beta, preference, options in ((0.0, (1, 1), ""), (1.5, (1, 1), ", beta: 1.5"), (1.5, (1, 4), ", beta: 1.5, preference: {vowels: 4}")):
        found = build_strategy(recipe_of("fedcmoo", options).federation, store).aggregate(state, unlike).memory["lambda"]
        gram = np.array([[10.0, 9.0], [9.0, 37.0]]) / 47
        slope = 2 * gram @ found + beta * np.array(found) / preference
        assert slope[0] == pytest.approx(slope[1]) and sum(found) == pytest.approx(1) and min(found) > 0
    assert all(job.weights == pytest.approx((0.8, 0.2)) and job.kind == "train" for job in strategy.plan(replace(after, federation=Federation((*clients, Client("c", 1, 1, 0.0)), first)), 0))


def test_a_clients_gradients_are_each_objectives_over_its_whole_batch_from_what_it_remembers(prepared, tmp_path):
    recipe = recipe_of("fedcmoo", "")
    learner, store = LEARNERS["rewards"](recipe, "cpu"), AdapterStore(tmp_path / "adapters")
    adapter, rows, names = learner.initial_adapter(0), read_rows(prepared / "pairs.parquet", "ada", "train").to_list(), ["long", "vowels"]
    ref = store.put(adapter)
    job = replace(Job("train", "ada", 0, "policy", (ref,), "rewards", 1), weights=(0.5, 0.5))
    trained, _ = learner.train(rows, adapter, 1, home_of("ada", store, prepared / "pairs.parquet", ""), job)
    home = home_of("ada", store, prepared / "pairs.parquet", job.key())
    remembered = unpacked(home.state(), names)
    sent, _ = learner.gradients(rows, trained, 5, home)
    learner.resident.slot.load(trained)
    prompts = prompts_of(rows)
    (drawn,) = minibatches(len(prompts), 4, 1, derive(5, "prompts"))
    coefficients = learner.options.coefficients()
    rollout, _ = roll_out(learner.resident, [prompts[n] for n in drawn], {"long": long, "vowels": vowels}, remembered, coefficients, derive(5, "rollout"))
    parts = [objective_gradients(learner.resident, rollout, np.array(part), learner.resident.slot.parameters, coefficients.clip)[0] for part in ([0, 1], [2, 3])]
    for j, name in enumerate(names):
        wanted = (parts[0][j] + parts[1][j]) / 2
        assert torch.allclose(torch.cat([sent[f"{name}/{tensor}"].ravel() for tensor in learner.resident.slot.names]), wanted, atol=1e-6) and wanted.abs().max() > 1e-5
    assert not torch.allclose(parts[0][0], parts[1][0], atol=1e-5) and not torch.allclose(parts[0][0], parts[0][1], atol=1e-5)


def test_gradients_of_another_form_are_refused_and_leave_the_client_as_it_was(prepared, tmp_path):
    recipe = recipe_of("fedcmoo", "")
    learner, commits = LEARNERS["rewards"](recipe, "cpu"), Commits(tmp_path / "federation", "test")
    initial = commits.store.put(learner.initial_adapter(recipe.seed))
    strategy = build_strategy(recipe.federation, commits.store)
    state = strategy.init(build_federation(read_clients(prepared), initial, 3), 0)
    jobs = strategy.plan(state, 0)
    updates = [run_job(job, learner, prepared / "pairs.parquet", commits.store) for job in jobs]
    assert not (tmp_path / "federation-clients").exists()
    given = learner.gradients(read_rows(prepared / "pairs.parquet", jobs[0].client, "train").to_list(), commits.store.get(initial), jobs[0].seed, home_of(jobs[0].client, commits.store, prepared / "pairs.parquet", ""))[0]
    assert commits.store.put(given).hash == updates[0].adapter.hash and max(t.abs().max() for t in given.values()) > 0
    damaged = replace(updates[0], adapter=initial)
    _, record = close_step(strategy, state, jobs, [damaged, *updates[1:]], 0.5, commits)
    assert list(record["refused"]) == [jobs[0].client]


# --- recipes

@pytest.mark.parametrize(("method", "options", "more", "words"), [
    ("firm", ", preference: {lng: 2}", [], "'lng', which is no objective"), ("firm", ", weights: {long: 0}", [], "eights are all 0"), ("firm", ", weights: {long: 1}, beta: 0.1", [], "leave out one or the other"),
    ("fedcmoo", ", preference: {long: 2}", [], "beta is 0"), ("firm", ", preference: {long: 2}, beta: 0", [], "beta is 0"), ("firm", "", ["federation.batch_size=16", "federation.options.ppo.horizon=3"], "ppo.horizon is 3, with which one batch of 16"), ("firm", "", ["rewards.long={kind: judge}"], "is of kind 'judge', which compares two"),
    ("firm", "", ["rewards.other={kind: function, name: clean}"], "rewards names other, which no objective"), ("firm", "", ["rewards.long.name=claen"], "Did you mean 'clean'"),
    ("firm", "", ["rewards={long: {kind: function, name: clean}}"], "reward 'vowels' is not known"),
    ("firm", "", ["federation.optimizer.accumulation=2"], "federation.optimizer.accumulation is 2, which PPO on sampled completions does not use"), ("firm", "", ["policy.lora.dropout=0.1"], "policy.lora.dropout is 0.1"),
    ("firm", "", ["federation.options.objectives={kl: [long], vowels: [vowels]}"], "cannot be called 'kl'"), ("firm", "", ["federation.options.objectives={a/b: [long], vowels: [vowels]}"], "a/b"),
    ("firm", "", ["federation.options.ppo={kl: 0}"], "controller cannot move it"), ("firm", ", preference: {long: 1e9}", [], "preference")])
def test_recipes_that_contradict_themselves_are_refused(method, options, more, words):
    with pytest.raises(RecipeError) as error:
        recipe_of(method, options, *more)
    assert words in str(error.value)
