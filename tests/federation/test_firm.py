"""FIRM and FedCMOO-A: rounds on a tiny model, and the server's part with hand-computed results."""

import json
import math

import numpy as np
import pytest
import torch

from components.config import RecipeError
from components.data.records import Pair, read_clients, read_pairs
from components.federation.clients.context import ClientContexts, rewards_folder
from components.federation.clients.multi_objective_trainer import unique_prompts
from components.federation.clients.private import private_root
from components.federation.local import rewarded_adapters
from components.federation.methods.fedcmoo import FedCmoo
from components.federation.methods.firm import Firm
from components.federation.multi_objective import gram_matrix, mean_distance
from components.federation.protocol import Client, Federation, GradientJob, TrainJob
from components.learning import mgda
from components.learning.loop import Training, TrainingError, draw_minibatches
from components.learning.multi_objective_ppo import MultiObjectivePpo
from components.learning.rollouts import sample_rollout
from components.models.store import AdapterStore
from components.recipes import load_recipe
from components.results import Metrics
from components.seeding import derive
from tests.support.bare_loop import open_loop
from tests.support.bound_methods import bind, get_values, make_update, put_values
from tests.support.reward_functions import score_length, score_vowels

NAMES = ["long", "vowels"]
OBJECTIVES = "{long: [long], vowels: [vowels]}"
REWARDS = (
    "rewards={long: {kind: function, name: 'tests.support.reward_functions:score_length'},"
    " vowels: {kind: function, name: 'tests.support.reward_functions:score_vowels'}}"
)


def make_recipe(method="firm", options="", *overrides):
    return load_recipe(
        "debug",
        [
            f"federation.method={method}",
            f"federation.options={{objectives: {OBJECTIVES}, ppo: {{minibatch: 2}}{options}}}",
            REWARDS,
            "federation.clients_per_round=3",
            "federation.batch_size=4",
            "federation.local_steps=1",
            "federation.rounds=2",
            "policy.max_new_tokens=8",
            "policy.lora={r: 2, alpha: 4, dropout: 0.0}",
            *overrides,
        ],
    )


def bind_objectives(store, method="firm", options=""):
    return bind(make_recipe(method, options).federation, store)


def flatten(tensors, prefix, names):
    return torch.cat([tensors[f"{prefix}/{name}"].ravel() for name in names])


@pytest.fixture(scope="module")
def finished(prepared, tmp_path_factory):
    """A federation of FIRM after two rounds of three clients."""
    loop = open_loop(make_recipe(), prepared, tmp_path_factory.mktemp("firm"))
    loop.run()
    return loop


@pytest.fixture(scope="module")
def loop_of(prepared, tmp_path_factory):
    """A maker of federations that have not run."""

    def make(*arguments):
        return open_loop(make_recipe(*arguments), prepared, tmp_path_factory.mktemp("loop"))

    return make


@pytest.fixture(scope="module")
def contexts(prepared, tmp_path_factory):
    """The clients' contexts in a federation without any rounds, in the order of their names."""
    store = AdapterStore(tmp_path_factory.mktemp("contexts") / "federation" / "adapters")
    opened = ClientContexts(store, prepared / "pairs.parquet")
    return {name: opened.open(name) for name in sorted(read_clients(prepared))}


# --- FIRM: a federation


def test_a_client_sends_and_receives_one_adapter_and_has_its_weights_and_scores_in_its_record(finished):
    for record in finished.records:
        assert len(record.clients) == 3
        for client in record.clients.values():
            scalars = client.metrics.scalars
            assert client.traffic.sent == client.traffic.received > 0
            assert client.traffic.kept > 0
            assert scalars["lambda/long"] + scalars["lambda/vowels"] == pytest.approx(1)
            assert scalars["steps"] == 3 * 2
            assert {"kl", "kl_coefficient", "score/long", "score/vowels"} <= set(scalars)
            for name in NAMES:
                series = client.metrics.series[f"lambda/{name}"]
                assert len(series) == 6
                assert scalars[f"lambda/{name}"] == pytest.approx(np.mean(series))


def test_the_disagreement_of_the_clients_is_logged_by_the_server(finished):
    for record in finished.records:
        series = [client.metrics.series for client in record.clients.values()]
        steps = np.array([[own[f"lambda/{name}"] for name in NAMES] for own in series])
        scalars = record.server.scalars
        drifts = [mean_distance(steps[:, :, n]) for n in range(6)]
        assert scalars["lambda_drift"] == pytest.approx(np.mean(drifts))
        assert scalars["mean_lambda_drift"] == pytest.approx(mean_distance(steps.mean(axis=2)))
        assert scalars["mean_lambda_drift"] < scalars["lambda_drift"]
        assert scalars["update_drift"] > 0
        assert scalars["lambda/long"] == pytest.approx(steps.mean(axis=2)[:, 0].mean())


def test_the_outcome_is_one_policy_for_all_clients(finished):
    state = finished.latest_state()
    outcome = finished.bound.outcome(state)
    assert (outcome.clients, outcome.labels_pairs) == ([], False)
    assert outcome.adapters == {"policy": state.adapters["policy"]}
    assert outcome.job_keys == {}


def test_a_client_remembers_heads_and_moments_from_round_to_round(finished):
    first, second = (set(record.clients) for record in finished.records)
    name = min(first & second)
    key = finished.latest_state().memory.job_keys[name]
    state = finished.contexts.open(name, key).private_state()
    assert state.numbers["long/count"] == 2 * 4
    assert set(state.tensors) == {f"value/{name}" for name in NAMES}
    assert state.tensors["value/long"].abs().max() > 0


@pytest.mark.parametrize("method", ["firm", "fedcmoo"])
def test_rounds_without_a_critic_continue_the_moments_of_the_clients(loop_of, method):
    ppo = "{estimator: {kind: rloo, samples: 2}, minibatch: 2, target_kl: null, keep_moments: true}"
    loop = loop_of(method, "", f"federation.options.ppo={ppo}", "federation.clients_per_round=4")
    loop.run()
    for name, key in loop.latest_state().memory.job_keys.items():
        kept = loop.contexts.open(name, key).private_state().tensors
        trained = [record.clients[name].metrics.scalars.get("steps", 0) for record in loop.records]
        assert all(tensor.startswith("optimizer/policy/") for tensor in kept)
        assert kept["optimizer/policy/0/step"].item() == sum(trained) > max(trained)


# --- FIRM: the server


def test_the_drift_is_the_mean_distance_of_two_clients():
    points = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    assert mean_distance(points) == pytest.approx((5 + 0 + 5) / 3)
    assert mean_distance(np.array([[1.0, 2.0]])) == 0


def make_client(name, pairs, weight):
    return Client(name=name, training_pairs=pairs, validation_pairs=1, weight=weight)


@pytest.fixture
def firm_round(tmp_path):
    """The store, and the state after three updates, of which bea's has a third step."""
    store = AdapterStore(tmp_path / "adapters")
    clients = tuple(make_client(name, 1, 1 / 3) for name in ("ada", "bea", "cyd"))
    bound = bind_objectives(store)
    state = bound.start(Federation(clients=clients, initial=put_values(store, [1.0, 1.0])), 0)
    trained = {"ada": [4.0, 5.0], "bea": [1.0, 1.0], "cyd": [1.0, 3.0]}
    first_step = {"ada": 0.2, "bea": 0.6, "cyd": 1.0}
    updates = []
    for job in reversed(bound.plan(state)):
        long = [first_step[job.client], 0.5, *([0.1] if job.client == "bea" else [])]
        series = {"lambda/long": long, "lambda/vowels": [1 - value for value in long]}
        adapter = put_values(store, trained[job.client])
        updates.append(make_update(job, adapter, metrics=Metrics(series=series), kept=8))
    return store, bound.aggregate(state, updates), updates


def test_the_server_averages_the_adapters_remembers_the_jobs_and_has_the_hand_computed_metrics(firm_round):
    """lambda differs in the first step and is equal in the second; the third one is bea's alone."""
    store, new, updates = firm_round
    scalars = new.metrics.scalars
    first_step = math.sqrt(2) * (0.4 + 0.8 + 0.4) / 3
    assert get_values(store, new.adapters["policy"]) == pytest.approx([2.0, 3.0])
    assert new.memory.job_keys == {update.client: update.job for update in updates}
    assert scalars["lambda_drift"] == pytest.approx(first_step / 2)
    assert scalars["mean_lambda_drift"] == pytest.approx(first_step / 2)
    assert scalars["lambda/long"] == pytest.approx(0.55)
    assert scalars["update_drift"] == pytest.approx((5 + math.sqrt(9 + 4) + 2) / 3)


def test_the_rewards_are_measured_of_the_servers_policy_or_of_each_clients(firm_round):
    store, new, _ = firm_round
    assert rewarded_adapters(new) == {"": new.adapters["policy"]}
    apart = bind_objectives(store, options=", average_over: self").method
    state = apart.start(new.federation, 0)
    assert rewarded_adapters(state) == {"": state.initial}  # equal before the first round
    trained = state.model_copy(update={"adapters": state.adapters | {"ada": new.adapters["policy"]}})
    assert rewarded_adapters(trained) == trained.adapters


# --- FIRM: a client

PPO = {
    "temperature": 0.7,
    "clip": 0.3,
    "epochs": 2,
    "minibatch": 5,
    "target_kl": 4.0,
    "horizon": 9,
    "normalize": False,
}


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        (Firm, {}, {"beta": 0.1, "weights": None, "preference": None}),
        (Firm, {"beta": 0}, {"beta": 0}),
        (Firm, {"beta": 2, "preference": {"long": 3}}, {"beta": 2, "preference": {"long": 3}}),
        (Firm, {"weights": {"long": 3, "vowels": 1}}, {"weights": {"long": 0.75, "vowels": 0.25}}),
        (FedCmoo, {}, {"beta": 0, "weights": None}),
        (FedCmoo, {"beta": 3}, {"beta": 3}),
    ],
)
def test_options_are_what_the_clients_train_by(method, options, expected):
    objectives = {"long": ["long"], "vowels": ["vowels"]}
    section = method.model_validate({"objectives": objectives, "ppo": PPO, **options})
    objective = section.local().objective
    assert objective.ppo.model_dump(include=PPO.keys()) == PPO
    assert objective.objectives == objectives
    assert objective.model_dump(include=expected.keys()) == expected


def test_the_servers_weights_are_those_of_the_local_objective():
    section = FedCmoo.model_validate({"objectives": {"long": ["long"], "vowels": ["vowels"]}})
    assert section.build_objective([0.2, 0.8]).weights == {"long": 0.2, "vowels": 0.8}


def test_the_rewards_of_an_objective_are_assigned_to_the_clients_round_robin(contexts):
    assigned = [context.assigned_reward(["one", "two"]) for context in contexts.values()]
    assert assigned == ["one", "two", "one", "two"]
    assert contexts["ada"].assigned_reward(["only"]) == "only"


def test_a_client_trains_by_the_reward_that_is_assigned_to_it(loop_of, contexts):
    loop = loop_of("firm", "", "federation.options.objectives={much: [long, vowels]}")
    prompts = ["a prompt"]
    responses = ["an answer of some length"]
    scores = [
        loop.trainer._client_rewards(contexts[name])["much"](prompts, responses).item()
        for name in ("ada", "bea")
    ]
    assert scores == [float(len(responses[0])), pytest.approx(7 - 0.8)]


def test_policies_are_measured_by_the_first_reward_of_an_objective(loop_of):
    loop = loop_of("firm", "", "federation.options.objectives={much: [long, vowels]}")
    initial = loop.federation.initial
    context = loop.contexts.open("")
    measured = loop.trainer.measure_rewards(initial, context).scalars
    seed = derive(loop.recipe.seed, "reward prompts")
    prompts = context.held_out_prompts(None, 0)
    trainer = loop.trainer
    trainer.resident.slot.load(context.load_adapter(initial))
    ppo = loop.recipe.federation.options.ppo
    rollout = sample_rollout(trainer.resident, prompts, {"much": score_length}, ppo, derive(seed, 0))
    assert measured["much"] == pytest.approx(rollout.scores["much"].mean())
    assert measured["kl"] == pytest.approx(0, abs=1e-6)
    assert measured["prompts"] == len(prompts) == 3


def test_prompts_of_several_batches_are_answered_together_as_each_batch_would_be(loop_of, monkeypatch):
    loop = loop_of("firm", "", "federation.batch_size=2")
    initial = loop.federation.initial
    seed = derive(loop.recipe.seed, "reward prompts")
    trainer = loop.trainer
    generate = trainer.resident.policy.generate
    answered = []

    def record(prompts, *arguments, **options):
        answered.append(len(prompts))
        return generate(prompts, *arguments, **options)

    monkeypatch.setattr(trainer.resident.policy, "generate", record)
    context = loop.contexts.open("")
    measured = trainer.measure_rewards(initial, context).scalars
    assert answered == [3]
    prompts = context.held_out_prompts(None, 0)
    trainer.resident.slot.load(context.load_adapter(initial))
    ppo = loop.recipe.federation.options.ppo
    scores = {"long": score_length}
    batches = [(prompts[:2], derive(seed, 0)), (prompts[2:], derive(seed, 2))]
    rollouts = [sample_rollout(trainer.resident, batch, scores, ppo, seed) for batch, seed in batches]
    assert measured["long"] == np.concatenate([rollout.scores["long"] for rollout in rollouts]).mean()
    assert measured["kl"] == (rollouts[0].kl * 2 + rollouts[1].kl) / 3


@pytest.mark.parametrize(("rate", "lowest", "highest"), [(1e-9, 0.0, 1e-7), (1e-2, 1e-3, 1.0)])
def test_a_client_starts_from_the_options_kl_and_trains_its_heads_at_their_rate(
    loop_of, rate, lowest, highest
):
    critic = f"estimator: {{critic_lr: {rate}}}"
    options = f"federation.options.ppo={{minibatch: 2, kl: 0.37, target_kl: null, {critic}}}"
    loop = loop_of("firm", "", options)
    job = TrainJob(client="ada", round=0, seed=1, adapters=(loop.federation.initial,))
    result = loop.trainer.run(job, loop.contexts.open("ada"))
    assert result.metrics.scalars["kl_coefficient"] == 0.37
    state = loop.contexts.open("ada", job.key()).private_state()
    assert lowest <= state.tensors["value/long"].abs().max() <= highest


def test_each_distinct_prompt_is_answered_once():
    assert unique_prompts([Pair(prompt, "", "") for prompt in "bab"]) == ["b", "a"]


def test_a_client_without_prompts_is_refused():
    with pytest.raises(TrainingError, match="no prompts"):
        unique_prompts([])


def test_fixed_weights_are_used_without_mgda(loop_of, monkeypatch):
    monkeypatch.setattr(mgda, "solve", lambda *_: pytest.fail("MGDA was solved"))
    loop = loop_of("firm", ", weights: {long: 3, vowels: 1}", "federation.rounds=1")
    loop.run()
    for client in loop.records[0].clients.values():
        assert client.metrics.scalars["lambda/long"] == pytest.approx(0.75)
        assert client.metrics.scalars["lambda/vowels"] == pytest.approx(0.25)


def test_a_trained_reward_is_looked_up_beside_the_scores_of_the_federation(contexts, tmp_path):
    context = contexts["ada"]
    assert context.rewards == rewards_folder(context.adapters.root.parent)
    assert context.trained_reward("long") is None
    context.rewards.mkdir(parents=True)
    (context.rewards / "long.trained.json").write_text(json.dumps({"folder": str(tmp_path)}))
    assert context.trained_reward("long") == tmp_path


# --- FedCMOO-A


def test_the_gram_matrix_is_that_of_the_sent_gradients():
    gradients = {
        "a/x": torch.tensor([1.0, 2.0]),
        "a/y": torch.tensor([[3.0]]),
        "b/x": torch.tensor([0.0, 1.0]),
        "b/y": torch.tensor([[-1.0]]),
    }
    assert gram_matrix(gradients, ["a", "b"]).tolist() == [[14.0, -1.0], [-1.0, 2.0]]


@pytest.fixture(scope="module")
def fedcmoo_loop(prepared, tmp_path_factory):
    """A federation of FedCMOO-A after two rounds of three clients."""
    loop = open_loop(make_recipe("fedcmoo"), prepared, tmp_path_factory.mktemp("fedcmoo"))
    loop.run()
    return loop


def test_a_round_of_fedcmoo_has_a_step_of_gradients_of_each_objective_and_one_of_training(fedcmoo_loop):
    records = fedcmoo_loop.records
    assert [record.phase for record in records] == ["gradients", "train"] * 2
    assert [record.rounds_done for record in records] == [0, 1, 1, 2]
    for gradients, training in zip(records[::2], records[1::2], strict=True):
        assert set(gradients.clients) == set(training.clients)
        for name, client in gradients.clients.items():
            assert client.traffic.sent == pytest.approx(2 * training.clients[name].traffic.sent, rel=0.15)
            assert client.traffic.kept == 0


def test_all_clients_train_with_the_servers_weights(fedcmoo_loop):
    for training in fedcmoo_loop.records[1::2]:
        for client in training.clients.values():
            weights = [client.metrics.scalars[f"lambda/{name}"] for name in NAMES]
            assert weights == pytest.approx(training.memory["weights"])
        assert training.server.scalars["lambda_drift"] == pytest.approx(0, abs=1e-9)
        assert training.server.scalars["update_drift"] > 0


@pytest.fixture
def gradient_step(tmp_path):
    """A store, and the state of FedCMOO-A before the first gradients of two clients."""
    store = AdapterStore(tmp_path / "adapters")
    clients = (make_client("ada", 1, 0.25), make_client("bea", 3, 0.75), make_client("cyd", 1, 0.0))
    federation = Federation(clients=clients, initial=put_values(store, [0.0, 0.0]))
    return store, bind_objectives(store, "fedcmoo").start(federation, 0)


def send_gradients(store, state, gradients):
    """Updates of clients, by client and objective."""
    updates = []
    for client, by_objective in gradients.items():
        job = GradientJob(client=client, round=0, seed=1, adapters=(state.federation.initial,))
        tensors = {f"{name}/a": torch.tensor(values) for name, values in by_objective.items()}
        updates.append(make_update(job, store.put(tensors)))
    return updates


ONE_CLIENT = {
    "ada": {"long": [4.0, 0.0], "vowels": [0.0, 8.0]},
    "bea": {"long": [0.0, 0.0], "vowels": [0.0, 0.0]},
}
TWO_CLIENTS = {
    "ada": {"long": [0.0, 4.0], "vowels": [4.0, 0.0]},
    "bea": {"long": [4.0, 0.0], "vowels": [0.0, 8.0]},
}
"""Their means by pairs are (3, 1) and (1, 6)."""


def test_the_servers_weights_are_those_of_mgda_of_the_mean_gradients_and_training_jobs_carry_them(
    gradient_step,
):
    store, state = gradient_step
    bound = bind_objectives(store, "fedcmoo")
    new = bound.aggregate(state, send_gradients(store, state, ONE_CLIENT))
    jobs = bound.plan(new)
    assert (state.phase, new.phase, new.round, new.logged_at) == ("gradients", "train", 0, 1)
    assert new.memory.weights == pytest.approx([0.8, 0.2])
    assert new.metrics.scalars["lambda/long"] == pytest.approx(0.8)
    assert new.adapters == state.adapters
    assert [job.kind for job in jobs] == ["train"] * 3
    for job in jobs:
        assert job.objective_weights == pytest.approx((0.8, 0.2))


@pytest.mark.parametrize(
    ("beta", "preference", "options"),
    [
        (0.0, (1, 1), ""),
        (1.5, (1, 1), ", beta: 1.5"),
        (1.5, (1, 4), ", beta: 1.5, preference: {vowels: 4}"),
    ],
)
def test_the_servers_weights_are_the_optimum_of_the_regularized_problem(
    gradient_step, beta, preference, options
):
    """The optimum of two weights is where the derivative along (1, -1) is 0."""
    store, state = gradient_step
    bound = bind_objectives(store, "fedcmoo", options)
    weights = bound.aggregate(state, send_gradients(store, state, TWO_CLIENTS)).memory.weights
    gram = np.array([[10.0, 9.0], [9.0, 37.0]]) / 47
    slope = 2 * gram @ weights + beta * np.array(weights) / preference
    assert slope[0] == pytest.approx(slope[1])
    assert sum(weights) == pytest.approx(1)
    assert min(weights) > 0


def test_a_clients_gradients_are_those_of_its_whole_batch_from_what_it_remembers(loop_of, prepared):
    loop = loop_of("fedcmoo")
    trainer = loop.trainer
    training = TrainJob(
        client="ada", round=0, seed=1, adapters=(loop.federation.initial,), objective_weights=(0.5, 0.5)
    )
    trained = trainer.run(training, loop.contexts.open("ada")).tensors
    context = loop.contexts.open("ada", training.key())
    job = GradientJob(client="ada", round=1, seed=5, adapters=(loop.commits.store.put(trained),))
    sent = trainer.run(job, context).tensors

    trainer.resident.slot.load(trained)
    prompts = unique_prompts(read_pairs(prepared / "pairs.parquet", "ada", "train"))
    (batch,) = draw_minibatches(len(prompts), 4, 1, derive(5, "prompts"))
    objective = loop.recipe.federation.options.build_objective(())
    state = context.private_state()
    rewards = {"long": score_length, "vowels": score_vowels}
    training = Training(1, 4, loop.recipe.federation.optimizer, seed=0)
    ppo = MultiObjectivePpo(trainer.resident, rewards, objective, training, state.numbers, state.tensors)
    rollout = ppo.sample([prompts[n] for n in batch], derive(5, "rollout"))
    minibatches = [ppo.gradients(*rollout, np.array(part)).gradients for part in ([0, 1], [2, 3])]
    assert not torch.allclose(minibatches[0][0], minibatches[1][0], atol=1e-5)
    assert not torch.allclose(minibatches[0][0], minibatches[0][1], atol=1e-5)
    for place, name in enumerate(NAMES):
        expected = (minibatches[0][place] + minibatches[1][place]) / 2
        assert expected.abs().max() > 1e-5
        assert torch.allclose(flatten(sent, name, trainer.resident.slot.names), expected, atol=1e-6)


def test_gradients_leave_the_clients_private_store_empty(loop_of):
    loop = loop_of("fedcmoo")
    job = loop.bound.plan(loop.initial_state())[0]
    update = loop.run_job(job)
    repeated = loop.trainer.run(job, loop.contexts.open(job.client)).tensors
    assert loop.commits.store.put(repeated) == update.adapter
    assert max(tensor.abs().max() for tensor in repeated.values()) > 0
    assert not private_root(loop.commits.folder).exists()


def test_gradients_with_other_tensors_are_refused(loop_of):
    loop = loop_of("fedcmoo")
    state = loop.initial_state()
    jobs = loop.bound.plan(state)
    updates = [loop.run_job(job) for job in jobs]
    damaged = updates[0].model_copy(update={"adapter": loop.federation.initial})
    _, record = loop.bound.close_step(state, jobs, [damaged, *updates[1:]], 0.5, loop.commits)
    assert list(record.refused) == [jobs[0].client]
    assert list(record.clients) == [job.client for job in jobs[1:]]


# --- recipes


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("firm", "preference: {lng: 2}", "'lng', which is no objective"),
        ("firm", "weights: {long: 0}", "weights are all 0"),
        ("firm", "weights: {long: 1}, beta: 0.1", "leave out one or the other"),
        ("fedcmoo", "preference: {long: 2}", "beta is 0"),
        ("firm", "preference: {long: 2}, beta: 0", "beta is 0"),
        ("firm", "preference: {long: 1e9}", "federation.options.preference"),
    ],
)
def test_options_that_contradict_each_other_are_refused(method, options, message):
    with pytest.raises(RecipeError) as error:
        make_recipe(method, f", {options}")
    assert message in str(error.value)


OWN = "federation.options"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["federation.batch_size=16", f"{OWN}.ppo.horizon=3"],
            "ppo.horizon is 3, with which one batch of 16",
        ),
        (["rewards.long={kind: judge}"], "rewards.long is of kind 'judge', which compares two"),
        (["rewards.other={kind: function, name: clean}"], "rewards names other, which no objective"),
        (["rewards.long.name=claen"], "Did you mean 'clean'"),
        (["rewards={long: {kind: function, name: clean}}"], "reward 'vowels' is not known"),
        (["federation.optimizer.accumulation=2"], "federation.optimizer.accumulation is 2"),
        (["policy.lora.dropout=0.1"], "policy.lora.dropout is 0.1"),
        ([f"{OWN}.objectives={{kl: [long], vowels: [vowels]}}"], "cannot be named 'kl'"),
        ([f"{OWN}.objectives={{long: [long], long_min: [vowels]}}"], "'long_min' beside 'long'"),
        ([f"{OWN}.objectives={{a/b: [long], vowels: [vowels]}}"], "a/b"),
        ([f"{OWN}.ppo={{kl: 0}}"], "set target_kl to null"),
        (
            [f"{OWN}.ppo={{estimator: rloo}}", "federation.batch_size=6"],
            "federation.batch_size is 6 completions, which are not complete groups of 4",
        ),
        (
            [
                "federation.method=fedcmoo",
                f"{OWN}.ppo={{keep_moments: true}}",
                "federation.optimizer.name=adamw_8bit",
            ],
            "federation.options.ppo.keep_moments is true",
        ),
    ],
)
def test_recipes_that_contradict_themselves_are_refused(overrides, message):
    with pytest.raises(RecipeError) as error:
        make_recipe("firm", "", *overrides)
    assert message in str(error.value)
