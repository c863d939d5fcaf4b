"""FedPDPO, FedRep and FedPer on the tiny model: what is shared, and what stays with a client."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open

from components.config import RecipeError, UserError
from components.data.records import read_pairs
from components.federation.clients.private import PrivateStore, private_root
from components.learning.loop import TrainingError, train
from components.recipes import load_recipe
from tests.support.bare_loop import open_loop

OPTIONS = {
    "fedper": "{shared_layers: 1}",
    "fedrep": "{personal: {lr: 1e-2}}",
    "fedpdpo": "{personal: {lr: 1e-2}, bottleneck: {width: 4}, reward_head: {width: 3}}",
}
SMALL = [
    "federation.rounds=2",
    "federation.clients_per_round=3",
    "federation.local_steps=2",
    "federation.batch_size=2",
    "federation.optimizer={lr: 1e-2, weight_decay: 0.01}",
]
CLIENTS = ("ada", "bea", "cyd", "dan")
TRAIN = "components.federation.clients.policy_trainer.train"


def make_recipe(method, *overrides):
    chosen = [f"federation.method={method}", f"federation.options={OPTIONS[method]}"]
    return load_recipe("debug", [*chosen, *SMALL, *overrides])


def run(recipe, prepared, folder):
    loop = open_loop(recipe, prepared, folder)
    loop.run()
    return loop


def private_stores(loop):
    root = private_root(loop.commits.folder)
    return {name: PrivateStore(root, name) for name in CLIENTS}


def private_modules(loop):
    """Modules of each client that has some, after its last accepted job."""
    keys = loop.latest_state().memory.job_keys
    stores = private_stores(loop)
    return {name: stores[name].load(key).tensors for name, key in sorted(keys.items())}


def server_adapter(loop):
    return loop.commits.store.get(loop.latest_state().adapters["policy"])


def equals(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module", params=OPTIONS)
def finished(request, prepared, tmp_path_factory):
    """A federation of each method after two rounds of three clients."""
    return run(make_recipe(request.param), prepared, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def fedpdpo(prepared, tmp_path_factory):
    """A federation of FedPDPO after two rounds of all four clients, whose heads change fast."""
    sizes = ["federation.clients_per_round=4", "federation.local_steps=4"]
    recipe = make_recipe("fedpdpo", *sizes, "federation.options.personal.lr=0.3")
    return run(recipe, prepared, tmp_path_factory.mktemp("fedpdpo"))


@pytest.fixture
def copied(fedpdpo, tmp_path):
    """A copy of that federation, whose files can be removed."""
    shutil.copytree(fedpdpo.commits.folder.parent, tmp_path / "copy")
    return open_loop(fedpdpo.recipe, fedpdpo.prepared, tmp_path / "copy", fedpdpo.trainer)


@pytest.fixture
def held_out_rows(prepared):
    return read_pairs(prepared / "pairs.parquet", "ada", "test")


# --- what is shared, and what stays


def test_the_server_has_the_shared_lora_alone_and_numbers_about_private_modules(finished):
    shared = set(server_adapter(finished))
    assert shared
    assert all(".lora_" in name for name in shared)
    files = [path for path in finished.commits.folder.rglob("*") if path.is_file()]
    assert len(files) >= 5  # two commits, and the adapters before and after each round
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as content:
                assert set(content.keys()) == shared
        else:
            text = path.read_text()
            assert len(text) < 20_000
            assert not [name for name in ("head.weight", "bottleneck.", "reward.hidden") if name in text]


def test_private_modules_lie_in_the_clients_own_stores_and_differ_between_clients(finished):
    shared = set(server_adapter(finished))
    modules = private_modules(finished)
    with_store = {name for name, store in private_stores(finished).items() if store.folder.is_dir()}
    assert private_root(finished.commits.folder).parent == finished.commits.folder.parent
    assert with_store == set(modules)
    for tensors in modules.values():
        assert not shared & set(tensors)
        assert any(name.startswith("head.") for name in tensors)
    first, second, *_ = modules.values()
    assert not equals(first, second)


def test_the_server_combines_the_shared_adapters_by_the_clients_pairs(finished, tmp_path):
    loop = open_loop(finished.recipe, finished.prepared, tmp_path, finished.trainer)
    state = loop.initial_state()
    jobs = loop.bound.plan(state)
    updates = [loop.run_job(job) for job in jobs]
    new, _ = loop.bound.close_step(state, jobs, updates, 0.5, loop.commits)
    sent = [loop.commits.store.get(update.adapter) for update in updates]
    weights = [update.rows / sum(update.rows for update in updates) for update in updates]
    for name, tensor in loop.commits.store.get(new.adapters["policy"]).items():
        expected = sum(weight * adapter[name].double() for weight, adapter in zip(weights, sent, strict=True))
        assert torch.allclose(tensor.double(), expected, atol=1e-7)


def test_a_clients_record_has_its_kept_bytes_its_steps_and_the_metrics_of_its_objective(finished):
    method = finished.recipe.federation.method
    stage_steps = None if method == "fedper" else 1
    for record in finished.records:
        for client in record.clients.values():
            scalars = client.metrics.scalars
            assert client.traffic.kept > client.traffic.sent == client.traffic.received > 0
            assert scalars["steps"] == 2
            assert scalars.get("personal/steps") == scalars.get("shared/steps") == stage_steps
            assert {"dpo", "decay"} <= set(scalars)
            assert ("excluded" in scalars) == ("scale" in scalars) == (method == "fedpdpo")
    job_keys = finished.latest_state().memory.job_keys
    for name, client in finished.records[-1].clients.items():
        assert client.traffic.kept == private_stores(finished)[name].load(job_keys[name]).size


def test_the_outcome_names_each_clients_last_job(finished):
    outcome = finished.bound.outcome(finished.latest_state())
    job_keys = finished.latest_state().memory.job_keys
    assert (outcome.own, outcome.has_client_policies) == ("modules", False)
    assert outcome.job_keys == {name: job_keys.get(name, "") for name in CLIENTS}


# --- where each stage starts, and with what settings


@pytest.fixture
def observed_steps(monkeypatch):
    """The steps of clients: loss, what the model, s and the learning rate are before it, and metrics."""
    steps = []

    def observe(model, parameters, minibatches, loss, training, groups):
        personal, shared = loss.resident.personal, loss.resident.slot
        step = SimpleNamespace(
            group="shared" if parameters[0] is shared.parameters[0] else "personal",
            loss=loss,
            lr=training.optimizer.lr,
            scale=loss.scale,
            modules=personal.read(),
            adapter=shared.read(),
        )
        figures = train(model, parameters, minibatches, loss, training, groups)
        step.metrics = loss.metrics(figures)
        steps.append(step)
        return figures

    monkeypatch.setattr(TRAIN, observe)
    return steps


def test_a_client_continues_from_its_own_modules_and_the_servers_adapter(prepared, tmp_path, observed_steps):
    recipe = make_recipe("fedpdpo", "federation.clients_per_round=4")
    loop = run(recipe, prepared, tmp_path)
    assert [step.group for step in observed_steps] == ["personal", "shared"] * 8
    modules = [step.modules for step in observed_steps]
    adapters = [step.adapter for step in observed_steps]
    initial = loop.trainer.resident.personal.initial_modules(recipe.seed)
    server = loop.commits.store.get(loop.records[0].adapters["policy"])
    for client in range(4):
        assert equals(modules[2 * client], initial)
        assert equals(modules[8 + 2 * client], modules[2 * client + 1])
        assert equals(adapters[8 + 2 * client], server)


def test_options_reach_the_loss_and_the_learning_rates_of_each_step(prepared, tmp_path, observed_steps):
    options = [
        "personal: {lr: 2e-3, share: 0.66}",
        "objective: {reward_weight: [0.5, 1.5], exclusion: null, beta: 0.3}",
        "bottleneck: null",
    ]
    overrides = [
        f"federation.options={{{', '.join(options)}}}",
        "federation.rounds=3",
        "federation.rate_decay={factor: 0.5, min_lr: 1.5e-3}",
        "federation.local_epochs=3",
        "federation.optimizer.accumulation=2",
        "federation.clients_per_round=4",
    ]
    run(make_recipe("fedpdpo", *overrides), prepared, tmp_path)
    ada = [observed_steps[8 * (n // 2) + n % 2] for n in range(6)]
    losses = [step.loss for step in ada]
    metrics = [step.metrics for step in ada]
    # 8 pairs, 4 per optimizer step: one of three passes in the shared stage, two in the personal one
    assert [step.metrics["steps"] for step in ada] == [4, 2] * 3
    assert [loss.reward_weight for loss in losses] == [0.5, 0.5, 1.0, 1.0, 1.5, 1.5]
    assert {loss.beta for loss in losses} == {0.3}
    assert {loss.exclusion for loss in losses} == {None}
    assert [step.scale for step in ada] == [1.0, *(step["scale"] for step in metrics[:-1])]
    decay = 1.0
    means = [(metrics[2 * n]["dpo"] + metrics[2 * n + 1]["dpo"]) / 2 for n in range(3)]
    for number in range(3):
        assert ada[2 * number].lr == pytest.approx(max(2e-3 * decay, 1.5e-3))
        assert ada[2 * number + 1].lr == pytest.approx(max(1e-2 * decay, 1.5e-3))
        decay *= 0.5 if number and means[number] > means[number - 1] else 1.0


def test_private_modules_that_are_not_finite_are_not_stored(prepared, tmp_path, monkeypatch):
    def train_to_nan(model, parameters, minibatches, loss, *arguments):
        figures = train(model, parameters, minibatches, loss, *arguments)
        with torch.no_grad():
            loss.resident.personal.parameters[0].view(-1)[0] = float("nan")
        return figures

    monkeypatch.setattr(TRAIN, train_to_nan)
    loop = open_loop(make_recipe("fedper"), prepared, tmp_path)
    job = loop.bound.plan(loop.initial_state())[0]
    with pytest.raises(TrainingError, match=r"private tensor '.*' has values that are NaN.*learning rates"):
        loop.run_job(job)
    assert not list(private_root(loop.commits.folder).rglob("*.json"))


def test_a_client_that_is_not_sampled_keeps_its_modules(prepared, tmp_path):
    recipe = make_recipe("fedpdpo", "federation.rounds=4", "federation.clients_per_round=1")
    loop = run(recipe, prepared, tmp_path)
    job_keys = loop.latest_state().memory.job_keys
    for name, store in private_stores(loop).items():
        rounds = [record.round for record in loop.records if name in record.clients]
        states = {path.stem for path in store.folder.glob("*.json")}
        assert len(states) == min(2, len(rounds))
        assert (name in job_keys) == bool(rounds)
        assert {job_keys[name]} <= states if rounds else not states


# --- how clients are measured


def test_before_training_every_client_is_the_reference(finished, held_out_rows):
    adapter = finished.commits.store.get(finished.federation.initial)
    scores = finished.trainer.score_pairs(held_out_rows, adapter, finished.contexts.open("ada"))
    assert np.abs(scores.margins).max() < 1e-4
    assert np.abs(scores.rewards).max() < 1e-4
    assert np.abs(scores.margins_by_metric["summed"]).min() > 0.1


def score(loop, rows, client):
    return loop.trainer.score_pairs(rows, server_adapter(loop), loop.context(client))


def test_each_client_is_measured_and_generates_with_its_own_modules(fedpdpo, held_out_rows):
    ada, bea = (score(fedpdpo, held_out_rows, name).margins for name in ("ada", "bea"))
    assert ada.shape == (1, 2)
    assert np.abs(ada).min() > 1e-4
    assert not np.allclose(ada, bea, atol=1e-5)
    completions = []
    for client in ("ada", "bea", "ada"):
        fedpdpo.trainer.load_client(server_adapter(fedpdpo), fedpdpo.context(client))
        ((completion,),) = fedpdpo.trainer.resident.policy.generate(["a prompt"], seed=0)
        completions.append(completion.ids)
    assert completions[0] == completions[2] != completions[1]


def test_the_explicit_reward_is_measured_where_there_is_a_reward_head(finished, held_out_rows):
    client = next(iter(finished.latest_state().memory.job_keys))
    scores = score(finished, held_out_rows, client)
    has_reward_head = finished.recipe.federation.method == "fedpdpo"
    assert ("explicit" in scores.margins_by_metric) == has_reward_head


def test_margins_of_likelihoods_follow_from_those_of_log_ratios(fedpdpo, held_out_rows):
    scores = score(fedpdpo, held_out_rows, "ada")
    encoded = [fedpdpo.trainer.resident.encode(*row.texts) for row in held_out_rows]
    reference = fedpdpo.trainer.reference_cache.completion_logprobs(fedpdpo.trainer.resident, encoded, 4)
    summed = scores.margins[0] + reference[:, 0] - reference[:, 1]
    assert scores.margins_by_metric["summed"][0] == pytest.approx(summed, abs=1e-6)
    chosen = scores.rewards[0] + reference[:, 0]
    rejected = chosen - summed
    lengths = np.array([[len(completion) for completion in completions] for _, *completions in encoded])
    per_token = chosen / lengths[:, 0] - rejected / lengths[:, 1]
    assert scores.margins_by_metric["per_token"][0] == pytest.approx(per_token, abs=1e-6)


# --- resume


@pytest.fixture
def without_ada(copied):
    """That copy, in which the private state of ada has been removed."""
    shutil.rmtree(private_stores(copied)["ada"].folder)
    return copied


def remove_commits(loop, last):
    """Remove all updates, and the commits after a step."""
    for path in (loop.commits.folder / "updates").iterdir():
        path.unlink()
    for path in (loop.commits.folder / "commits").iterdir():
        if int(path.stem) > last:
            path.unlink()


def test_without_a_clients_private_state_neither_its_measurement_nor_a_later_round_is_possible(without_ada):
    adapter = server_adapter(without_ada)
    with pytest.raises(UserError, match=r"no private state of client ada .*new run"):
        without_ada.trainer.load_client(adapter, without_ada.context("ada"))
    without_ada.trainer.load_client(adapter, without_ada.context("bea"))
    remove_commits(without_ada, last=1)
    with pytest.raises(UserError, match="client ada"):
        without_ada.run()


def test_a_run_is_repeated_from_the_first_round_without_private_state(without_ada):
    before = without_ada.latest_state().adapters
    remove_commits(without_ada, last=0)
    assert without_ada.run().adapters == before


def test_private_state_of_another_run_is_refused(copied, prepared, tmp_path):
    other = run(make_recipe("fedpdpo", "federation.rounds=1", "seed=7"), prepared, tmp_path / "other")
    root = private_root(copied.commits.folder)
    shutil.rmtree(root)
    shutil.copytree(private_root(other.commits.folder), root)
    for client in copied.latest_state().memory.job_keys:
        with pytest.raises(UserError, match=f"client {client}"):
            copied.trainer.load_client(server_adapter(copied), copied.context(client))


def test_a_repeated_job_trains_its_shared_step_alone_where_the_personal_stage_is_stored(
    prepared, tmp_path, observed_steps
):
    loop = open_loop(make_recipe("fedpdpo"), prepared, tmp_path)
    job = loop.bound.plan(loop.initial_state())[0]
    store = private_stores(loop)[job.client]
    saved = []
    save = PrivateStore.save_personal_stage

    def save_and_copy(self, job_key, state):
        save(self, job_key, state)
        saved.append((self._path(job_key, ".personal"), state))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateStore, "save_personal_stage", save_and_copy)
        first = loop.run_job(job)
    Path(loop.commits.folder / "updates" / f"{job.key()}.json").unlink()
    store.save_personal_stage(job.key(), saved[0][1])
    repeated = loop.run_job(job)
    assert [step.group for step in observed_steps] == ["personal", "shared", "shared"]
    assert repeated.adapter == first.adapter
    assert not list(store.folder.glob("*.personal.json"))


# --- options


@pytest.mark.parametrize(("option", "prefix"), [("bottleneck", "bottleneck."), ("reward_head", "reward.")])
def test_an_ablation_leaves_its_module_out(prepared, tmp_path, option, prefix):
    recipe = make_recipe("fedpdpo", f"federation.options.{option}=null", "federation.rounds=1")
    loop = run(recipe, prepared, tmp_path)
    for tensors in private_modules(loop).values():
        assert "head.weight" in tensors
        assert not any(name.startswith(prefix) for name in tensors)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("{bottleneck: {widht: 3}}", r"did you mean 'federation\.options\.bottleneck\.width'"),
        ("{personal: {share: 1.0}}", r"federation\.options\.personal\.share.*1"),
        ("{objective: {exclusion: {max_share: 1.5}}}", r"federation\.options\.objective\.exclusion"),
    ],
)
def test_options_that_cannot_be_used_are_refused(override, message):
    with pytest.raises(RecipeError, match=message):
        make_recipe("fedpdpo", f"federation.options={override}")
