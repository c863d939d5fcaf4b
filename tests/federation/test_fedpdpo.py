"""FedPDPO, FedRep and FedPer on the tiny model: what travels and what stays, what the server does, and resume within a round."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from components.config import OptimizerConfig
from components.data.records import read_clients
from components.federation import clients, personal_client
from components.federation.clients import LEARNERS, run_job
from components.federation.commits import Commits
from components.federation.private import Home, PrivateStore, PrivateStoreError, home_of, stores_beside
from components.federation.rounds import close_step, run_federation
from components.federation.strategy import Job, build_federation, build_strategy
from components.learning import pdpo
from components.recipes import load_recipe

METHODS = ["fedpdpo", "fedrep", "fedper"]
OPTIONS = {"fedper": "{shared_layers: 1}", "fedrep": "{personal_lr: 1e-2}", "fedpdpo": "{personal_lr: 1e-2, bottleneck: {width: 4}, reward_head: {width: 3}}"}


def recipe_of(method, *more):
    return load_recipe("debug", [f"federation.method={method}", f"federation.options={OPTIONS[method]}", "federation.clients_per_round=3", "federation.optimizer={lr: 1e-2, weight_decay: 0.01}", *more])


def begin(recipe, prepared, folder):
    torch.set_num_threads(1)
    learner, commits = LEARNERS["personal"](recipe, "cpu"), Commits(folder, "test")
    federation = build_federation(read_clients(prepared), commits.store.put(learner.initial_adapter(recipe.seed)), recipe.federation.clients_per_round)
    return learner, commits, federation


def run(recipe, prepared, folder, learner=None):
    fresh, commits, federation = begin(recipe, prepared, folder)
    return run_federation(recipe, federation, prepared / "pairs.parquet", commits, learner or fresh), commits


def tensors_in(path):
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


def last_of(commits):
    return commits.latest()[0].memory["last"]


def at_home(commits, prepared, name):
    return home_of(name, commits.store, prepared / "pairs.parquet", last_of(commits).get(name, ""))


def private_parts(commits):
    return {name: PrivateStore(stores_beside(commits.store), name).after(key).tensors for name, key in sorted(last_of(commits).items())}


@pytest.mark.parametrize("method", METHODS)
def test_nothing_but_the_shared_lora_leaves_a_clients_task(method, prepared, tmp_path):
    recipe = recipe_of(method)
    state, commits = run(recipe, prepared, tmp_path / "f")
    private = private_parts(commits)
    shared = set(commits.store.get(state.adapters["policy"]))
    assert shared and all(".lora_" in name for name in shared)
    for own in private.values():
        assert not shared & set(own) and any(name.startswith("head.") for name in own)
    outside = [path for path in (tmp_path / "f").rglob("*") if path.is_file()]
    assert stores_beside(commits.store) == tmp_path / "f-clients" and len(outside) > 10
    assert {path.suffix for path in outside} == {".json", ".safetensors"}
    for path in outside:
        if path.suffix == ".safetensors":
            assert tensors_in(path) == shared, "an adapter, of all that the server and the network ever saw"
        else:
            text = path.read_text()
            assert not any(part in text for part in ("head.weight", "bottleneck.", "reward.hidden")) and len(text) < 20_000, "numbers about it, and no values"
    assert {name: path for name, path in ((c.name, PrivateStore(stores_beside(commits.store), c.name).folder) for c in state.federation.clients) if path.is_dir()}.keys() == private.keys()


@pytest.mark.parametrize("method", METHODS)
def test_clients_become_different_and_the_server_takes_the_mean_of_what_they_sent_by_their_pairs(method, prepared, tmp_path):
    recipe = recipe_of(method)
    learner, commits, federation = begin(recipe, prepared, tmp_path / "f")
    strategy = build_strategy(recipe.federation, commits.store)
    state = strategy.init(federation, recipe.seed)
    jobs = strategy.plan(state, 0)
    assert [job.objective for job in jobs] == ["personal"] * 3
    updates = [run_job(job, learner, prepared / "pairs.parquet", commits.store) for job in jobs]
    after, record = close_step(strategy, state, jobs, updates, 0.5, commits)
    weights = {u.job.client: u.metrics["rows"] for u in updates}
    sent = {u.job.client: commits.store.get(u.adapter) for u in updates}
    mean = commits.store.get(after.adapters["policy"])
    for name in mean:
        expected = sum(weights[c] * sent[c][name].double() for c in sent) / sum(weights.values())
        assert torch.allclose(mean[name].double(), expected, atol=1e-7)
    parts = list(private_parts(commits).values())
    assert len(parts) == 3 and any(not torch.equal(parts[0][name], parts[1][name]) for name in parts[0])
    for update in updates:
        own = PrivateStore(stores_beside(commits.store), update.job.client).after(after.memory["last"][update.job.client])
        assert update.metrics["bytes_kept"] == own.size > update.metrics["bytes_sent"] == Path(update.adapter.path).stat().st_size == update.metrics["bytes_received"]
        assert update.metrics["steps"] == (4 if method != "fedper" else 2), "two halves of 2, or both at once"
    assert record["clients"]["ada"]["bytes_kept"] == updates[0].metrics["bytes_kept"]


def test_a_client_goes_on_from_its_own_parts_with_the_servers_lora(prepared, tmp_path, monkeypatch):
    starts = []
    original = pdpo.train_half

    def watched(resident, pairs, reference, own, shared, *rest):
        starts.append((own, resident.personal.read(), resident.slot.read()))
        return original(resident, pairs, reference, own, shared, *rest)

    monkeypatch.setattr(pdpo, "train_half", watched)
    recipe = recipe_of("fedpdpo", "federation.clients_per_round=4", "federation.rounds=2")
    learner, commits, federation = begin(recipe, prepared, tmp_path / "f")
    state = run_federation(recipe, federation, prepared / "pairs.parquet", commits, learner)
    assert [own for own, *_ in starts] == [True, False] * 8
    (first, *_), second = [s for s in starts if s[0]][:4], [s for s in starts if s[0]][4:]
    assert all(torch.equal(first[1][n], learner.slot.initial(recipe.seed)[n]) for n in first[1]), "all begin with the same parts"
    after_round_1 = [s for s in starts[:8] if not s[0]]
    server = commits.store.get(commits.store.ref(commits.latest()[1][0]["adapters"]["policy"]))
    for client, (_, own, lora) in enumerate(second):
        assert all(torch.equal(own[n], after_round_1[client][1][n]) for n in own), "its own, as the first half left them"
        assert all(torch.equal(lora[n], server[n]) for n in lora), "what the server sent"
    assert state.round == 2 and any(not torch.equal(second[0][1][n], second[1][1][n]) for n in second[0][1])


def test_options_reach_the_loss_and_the_rates_of_each_half(prepared, tmp_path, monkeypatch):
    asked = []
    original = pdpo.train_half

    def watched(resident, pairs, reference, own, shared, objective, scale, steps, batch_size, optimizer, seed):
        curve = original(resident, pairs, reference, own, shared, objective, scale, steps, batch_size, optimizer, seed)
        asked.append((own, objective, scale, steps, optimizer.lr, curve))
        return curve

    monkeypatch.setattr(pdpo, "train_half", watched)
    options = "federation.options={personal_lr: 2e-3, personal_epochs: 2, reward_weight: [0.5, 1.5], rate_decay: {factor: 0.5, least: 1.5e-3}, bottleneck: null, exclusion: null, beta: 0.3}"
    recipe = recipe_of("fedpdpo", options, "federation.local_epochs=1", "federation.batch_size=2", "federation.optimizer.accumulation=2", "federation.clients_per_round=4")
    _, _commits = run(recipe, prepared, tmp_path / "f")
    ada = [asked[8 * r + h] for r in range(3) for h in (0, 1)]
    assert [(own, steps) for own, _, _, steps, *_ in ada] == [(True, 4), (False, 2)] * 3, "8 pairs, 4 a step: one pass, and two of the first half"
    assert [o.reward_weight for _, o, *_ in ada] == [0.5, 0.5, 1.0, 1.0, 1.5, 1.5] and {o.beta for _, o, *_ in ada} == {0.3} and {o.exclusion for _, o, *_ in ada} == {None}
    scales = [scale for _, _, scale, *_ in ada]
    assert scales[0] == 1.0 and scales[1:] == [curve.scale for *_, curve in ada[:-1]], "carried on from half to half and from round to round"
    losses = [sum(curve.dpo for *_, curve in ada[2 * r : 2 * r + 2]) / 2 for r in range(3)]
    decay = 1.0
    for r in range(3):
        own, shared = ada[2 * r][4], ada[2 * r + 1][4]
        assert own == pytest.approx(max(2e-3 * decay, 1.5e-3)) and shared == pytest.approx(max(1e-2 * decay, 1.5e-3))
        decay *= 0.5 if r and losses[r] > losses[r - 1] else 1.0


def test_learning_rates_fall_after_a_round_whose_loss_rose_and_not_below_the_least(prepared, tmp_path, monkeypatch):
    rates, losses = [], iter([0.5, 0.5, 0.7, 0.7, 0.6, 0.6, 0.9, 0.9])

    def pretended(resident, pairs, reference, own, shared, objective, scale, steps, batch_size, optimizer, seed):
        rates.append(optimizer.lr)
        return pdpo.HalfCurve([1.0], [1.0], 1, 0.1, scale, next(losses), 0.0)

    monkeypatch.setattr(pdpo, "train_half", pretended)
    recipe = recipe_of("fedpdpo", "federation.options={personal_lr: 1e-3, rate_decay: {factor: 0.5, least: 3e-4}}", "federation.rounds=4", "federation.clients_per_round=1")
    learner, _commits, _ = begin(recipe, prepared, tmp_path / "f")
    store, adapter = PrivateStore(tmp_path / "own", "ada"), learner.initial_adapter(0)
    rows = clients.read_rows(prepared / "pairs.parquet", "ada", "train").to_list()
    jobs = [Job("train", "ada", round, "policy", (), "personal", 1) for round in range(5)]
    keys = ["", *(f"{job.key()}" for job in jobs)]
    for round in range(4):
        learner.train(rows, adapter, 1, Home("ada", store, tmp_path, tmp_path, keys[round]), jobs[round])
    assert rates == pytest.approx([1e-3, 1e-2, 1e-3, 1e-2, 5e-4, 5e-3, 5e-4, 5e-3])
    assert store.after(keys[4]).numbers == {"scale": 1.0, "decay": 0.25, "dpo": 0.9}
    monkeypatch.setattr(pdpo, "train_half", lambda *a: rates.append(a[9].lr) or pdpo.HalfCurve([1.0], [1.0], 1, 0.1, 1.0, 0.9, 0.0))
    learner.train(rows, adapter, 1, Home("ada", store, tmp_path, tmp_path, keys[4]), jobs[4])
    assert rates[-2:] == pytest.approx([3e-4, 2.5e-3])


class Killed(BaseException):
    """As if the process had been killed."""


@pytest.mark.parametrize("at", [1, 2, 5, 6, 7, 8])
def test_killed_in_the_middle_of_either_half_a_federation_ends_with_the_same_bytes(at, prepared, tmp_path, monkeypatch):
    recipe = recipe_of("fedpdpo", "federation.rounds=2", "federation.clients_per_round=2")
    whole, whole_commits = run(recipe, prepared, tmp_path / "whole")
    calls = {"all": 0, "own": 0}
    original = pdpo.train_half

    def dying(resident, pairs, reference, own, shared, objective, scale, steps, batch_size, optimizer, seed):
        calls["all"] += 1
        calls["own"] += own

        def progress(step, loss):
            if calls["all"] == at and step == 0:
                raise Killed
        return original(resident, pairs, reference, own, shared, objective, scale, steps, batch_size, optimizer, seed, progress)

    monkeypatch.setattr(pdpo, "train_half", dying)
    with pytest.raises(Killed):
        run(recipe, prepared, tmp_path / "cut")
    state, commits = run(recipe, prepared, tmp_path / "cut")
    assert calls["all"] == 8 + 1 and calls["own"] == 4 + at % 2, "one half is trained again, and a finished first half is not"
    assert Path(state.adapters["policy"].path).read_bytes() == Path(whole.adapters["policy"].path).read_bytes()
    ours, theirs = private_parts(commits), private_parts(whole_commits)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[c][n], theirs[c][n]) for c in ours for n in ours[c])
    assert len(list(stores_beside(commits.store).rglob("*.half.json"))) == 0


def test_a_client_that_is_not_sampled_keeps_its_parts(prepared, tmp_path):
    recipe = recipe_of("fedpdpo", "federation.rounds=4", "federation.clients_per_round=1")
    _, commits = run(recipe, prepared, tmp_path / "f")
    took_part = {c: [r["round"] for r in commits.latest()[1] if c in r["clients"]] for c in ("ada", "bea", "cyd", "dan")}
    for client, rounds in took_part.items():
        files = {path.stem for path in PrivateStore(stores_beside(commits.store), client).folder.glob("*.json")}
        assert len(files) == min(2, len(rounds)) and (not rounds or last_of(commits)[client] in files)


@pytest.mark.parametrize("method", METHODS)
def test_each_client_is_measured_with_its_own_parts_and_before_training_all_are_the_reference(method, prepared, tmp_path):
    recipe = recipe_of(method, "federation.clients_per_round=4", "federation.optimizer.lr=0.1")
    learner, commits, federation = begin(recipe, prepared, tmp_path / "f")
    rows = {name: clients.read_rows(prepared / "pairs.parquet", name, "test").to_list() for name in ("ada", "bea")}
    before = learner.compare(rows["ada"], [commits.store.get(federation.initial)], home_of("ada", commits.store, prepared / "pairs.parquet", ""))
    assert abs(before.margins).max() < 1e-4 and abs(before.rewards).max() < 1e-4 and abs(before.others["summed"]).min() > 0.1
    state = run_federation(recipe, federation, prepared / "pairs.parquet", commits, learner)
    final = state.adapters["policy"]
    ada = learner.compare(rows["ada"], [commits.store.get(final)], at_home(commits, prepared, "ada"))
    as_bea = learner.compare(rows["ada"], [commits.store.get(final)], at_home(commits, prepared, "bea"))
    assert ada.margins.shape == (1, 2) and abs(ada.margins).min() > 1e-4 and not (abs(ada.margins - as_bea.margins) < 1e-5).all()
    assert ("explicit" in ada.others) == (method == "fedpdpo")
    reference = learner._reference(rows["ada"])
    assert ada.others["summed"] == pytest.approx(ada.margins + (reference[:, 0] - reference[:, 1]), abs=1e-6)
    lengths = [[len(ids) for ids in learner.resident.encode_pair(row)[1:]] for row in rows["ada"]]
    chosen = ada.rewards[0] + reference[:, 0]
    assert ada.others["per_token"][0] == pytest.approx([c / n - (c - d) / m for c, d, (n, m) in zip(chosen, ada.others["summed"][0], lengths, strict=True)], abs=1e-6)


@pytest.mark.parametrize("kept", [0, 2])
def test_without_what_a_client_has_kept_neither_a_resumed_round_nor_a_measurement_begins_anew(kept, prepared, tmp_path):
    recipe = recipe_of("fedpdpo", "federation.clients_per_round=4")
    _, commits = run(recipe, prepared, tmp_path / "f")
    learner, adapter, home = LEARNERS["personal"](recipe, "cpu"), commits.store.get(commits.latest()[0].adapters["policy"]), at_home(commits, prepared, "ada")
    shutil.rmtree(home.store.folder)
    with pytest.raises(PrivateStoreError, match=r"what client ada has kept to itself .* is not here"):
        learner.become(adapter, home)
    learner.become(adapter, at_home(commits, prepared, "bea"))
    for path in (*(tmp_path / "f" / "updates").iterdir(), *(p for p in (tmp_path / "f" / "commits").iterdir() if int(p.stem) > kept)):
        path.unlink()
    if kept:
        with pytest.raises(PrivateStoreError, match="client ada"):
            run(recipe, prepared, tmp_path / "f")
    else:
        state, _ = run(recipe, prepared, tmp_path / "f")
        assert state.round == 3, "from the first round on nobody has kept anything yet"


def test_another_runs_stores_are_not_taken_for_this_ones(prepared, tmp_path):
    recipe = recipe_of("fedpdpo", "federation.rounds=1")
    _, ours = run(recipe, prepared, tmp_path / "ours")
    _, theirs = run(recipe.model_copy(update={"seed": 7}), prepared, tmp_path / "theirs")
    shutil.rmtree(stores_beside(ours.store))
    shutil.copytree(stores_beside(theirs.store), stores_beside(ours.store))
    learner = LEARNERS["personal"](recipe, "cpu")
    for client in last_of(ours):
        with pytest.raises(PrivateStoreError, match=f"client {client}"):
            learner.become(learner.initial_adapter(0), at_home(ours, prepared, client))


def test_parts_that_are_not_finite_are_not_kept(prepared, tmp_path, monkeypatch):
    from components.learning.local import TrainingError

    def poisoned(resident, *rest):
        with torch.no_grad():
            resident.personal.parameters[0].view(-1)[0] = float("nan")
        return pdpo.HalfCurve([1.0], [1.0], 1, 0.1, 1.0, 0.5, 0.0)

    recipe = recipe_of("fedper")
    learner, commits, federation = begin(recipe, prepared, tmp_path / "f")
    (job, *_) = build_strategy(recipe.federation, commits.store).plan(build_strategy(recipe.federation, commits.store).init(federation, 0), 0)
    monkeypatch.setattr(pdpo, "train_half", poisoned)
    with pytest.raises(TrainingError, match="own tensor '.*' has values that are NaN or infinite"):
        run_job(job, learner, prepared / "pairs.parquet", commits.store)
    assert not list(stores_beside(commits.store).rglob("*.json"))


def test_policies_of_clients_generate_with_their_own_parts(prepared, tmp_path):
    recipe = recipe_of("fedpdpo", "federation.clients_per_round=4", "federation.options.personal_lr=0.3")
    state, commits = run(recipe, prepared, tmp_path / "f")
    adapter = commits.store.get(state.adapters["policy"])
    policies = personal_client.ClientPolicies(LEARNERS["personal"](recipe, "cpu"), adapter, commits.store, prepared / "pairs.parquet", last_of(commits))
    (ada,), (bea,) = policies.generate(["a prompt"] * 2, ["ada", "bea"], seed=0)
    assert ada.ids != bea.ids
    (again,) = policies.of("ada").generate(["a prompt"], seed=0)
    assert again[0].ids == ada.ids
    with pytest.raises(Exception, match="client_id 'nobody' has no policy here"):
        policies.of("nobody")


def test_ablations_leave_their_part_out(prepared, tmp_path):
    for option, part in (("bottleneck", "bottleneck."), ("reward_head", "reward.")):
        recipe = recipe_of("fedpdpo", f"federation.options.{option}=null", "federation.rounds=1")
        _state, commits = run(recipe, prepared, tmp_path / option)
        (own, *_) = private_parts(commits).values()
        assert not any(name.startswith(part) for name in own) and "head.weight" in own
        assert json.dumps(commits.latest()[1][0]["clients"])


def test_bad_options_are_refused_in_a_sentence():
    from components.config import RecipeError

    for override, message in (("federation.options={bottleneck: {widht: 3}}", "did you mean 'federation.options.bottleneck.width'"),
                              ("federation.options={personal_steps: 3, personal_epochs: 1}", "leave out one of them"),
                              ("federation.options={exclusion: {most: 1.0}}", "federation.options.exclusion.most")):
        with pytest.raises(RecipeError, match=message):
            recipe_of("fedpdpo", override)
    assert OptimizerConfig().accumulation == 1
