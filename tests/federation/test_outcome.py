"""Outcomes: what each kind scores, compares and exports, without asking which method it came from."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from components.data.records import read_rows
from components.federation.outcome import (
    OUTCOMES,
    OutcomeError,
    PersonalizedClients,
    SelectorEnsemble,
    SharedPolicy,
    Workspace,
    load_outcome,
)
from components.models.adapters import read_adapter
from components.models.policy import client_adapter_folders
from components.models.selector import Comparison
from components.recipes import load_recipe
from components.results import OutcomeRecord
from tests.support.adapters import random_tensors
from tests.support.bare_loop import open_loop

SMALL = ["federation.clients_per_round=4", "federation.local_steps=1", "federation.batch_size=2"]
METHODS = {
    "selector-ensemble": ["federation.method=fedbis"],
    "shared-policy": ["federation.method=feddpo"],
    "client-adapters": ["federation.method=drift"],
    "personalized-clients": [
        "federation.method=fedper",
        "federation.options={shared_layers: 1}",
        "federation.rounds=1",
    ],
}


@contextmanager
def lend(value):
    yield value


def make_workspace(loop):
    return Workspace(loop.recipe, loop.contexts, lambda: lend(loop.trainer), lambda: lend("cpu"))


@pytest.fixture(scope="module")
def loops(prepared, tmp_path_factory):
    """A federation of each kind of outcome; clients have private state where the kind has it."""
    opened = {}
    for kind, overrides in METHODS.items():
        recipe = load_recipe("debug", [*SMALL, *overrides])
        opened[kind] = open_loop(recipe, prepared, tmp_path_factory.mktemp(kind))
    opened["personalized-clients"].run()
    return opened


@pytest.fixture(scope="module")
def rows(prepared):
    pairs = read_rows(prepared / "pairs.parquet", split="test")
    return [row for row in pairs if row["client_id"] in ("ada", "bea")]


def put_random(loop, seed):
    slot = loop.trainer.selector.slot if hasattr(loop.trainer, "selector") else loop.trainer.resident.slot
    return loop.commits.store.put(random_tensors(slot, seed, 0.2))


def score_alone(loop, digest, rows):
    store = loop.commits.store
    return loop.trainer.score_pairs(rows, [store.get(digest)]).margins[0]


# --- all kinds


def test_the_kind_of_a_record_names_its_class():
    assert set(OUTCOMES.builtin) == set(METHODS)
    for kind in OUTCOMES.builtin:
        outcome = OUTCOMES.load(kind)
        assert outcome.kind == kind
        assert isinstance(load_outcome(OutcomeRecord(kind=kind, adapters={})), outcome)


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(OutcomeError, match=r"'forest' is not known.*shared-policy"):
        load_outcome(OutcomeRecord(kind="forest", adapters={}))


@pytest.mark.parametrize("kind", METHODS)
def test_a_method_ends_with_an_outcome_of_a_known_kind(kind, loops):
    loop = loops[kind]
    assert loop.bound.outcome(loop.initial_state()).kind == kind


@pytest.mark.parametrize(("kind", "model"), [("selector-ensemble", "selector"), ("shared-policy", "policy")])
def test_an_exported_adapter_is_a_peft_folder_of_the_trained_model(kind, model, loops, tmp_path):
    loop = loops[kind]
    digest = put_random(loop, 1)
    outcome = load_outcome(OutcomeRecord(kind=kind, adapters={"one": digest}))
    exported = outcome.export(tmp_path / "adapters", make_workspace(loop))
    adapter, lora = read_adapter(tmp_path / exported["one"].folder)
    expected = loop.commits.store.get(digest)
    assert exported["one"].hash == digest
    assert exported["one"].folder.startswith("adapters/")
    assert lora.r == getattr(loop.recipe, model).lora.r
    for name, tensor in expected.items():
        assert torch.equal(adapter[name], tensor)


@pytest.mark.parametrize("kind", ["shared-policy", "client-adapters", "personalized-clients"])
def test_an_outcome_without_selectors_compares_no_completions(kind, loops):
    outcome = load_outcome(OutcomeRecord(kind=kind, adapters={}))
    with pytest.raises(OutcomeError, match=f"'{kind}' has no selectors"):
        outcome.compare([Comparison("p", "a", "b")], make_workspace(loops[kind]))


# --- selectors


@pytest.fixture
def ensemble(loops):
    """Three selectors, two of which are equal."""
    loop = loops["selector-ensemble"]
    first = put_random(loop, 1)
    second = put_random(loop, 2)
    return loop, {"selector-0": first, "selector-1": second, "selector-2": first}


def test_an_ensemble_scores_pairs_by_each_selector_in_the_order_of_their_names(ensemble, rows):
    loop, adapters = ensemble
    record = OutcomeRecord(kind="selector-ensemble", adapters=dict(reversed(adapters.items())))
    scores = SelectorEnsemble(record).score(rows, make_workspace(loop))
    assert scores.margins.shape == (3, len(rows))
    for margins, name in zip(scores.margins, adapters, strict=True):
        assert np.allclose(margins, score_alone(loop, adapters[name], rows))
    assert scores.assigned is None


def test_equal_selectors_are_computed_once(ensemble, rows, monkeypatch):
    loop, adapters = ensemble
    counts = []
    score_pairs = loop.trainer.score_pairs

    def record(pairs, scored):
        counts.append(len(scored))
        return score_pairs(pairs, scored)

    monkeypatch.setattr(loop.trainer, "score_pairs", record)
    outcome = SelectorEnsemble(OutcomeRecord(kind="selector-ensemble", adapters=adapters))
    assert outcome.score(rows, make_workspace(loop)).margins.shape == (3, len(rows))
    assert counts == [2]


def test_the_selector_of_each_clients_cluster_is_named_with_the_scores(ensemble, rows):
    loop, adapters = ensemble
    record = OutcomeRecord(kind="selector-ensemble", adapters=adapters, assignment={"ada": "selector-1"})
    scores = SelectorEnsemble(record).score(rows, make_workspace(loop))
    expected = [1 if row["client_id"] == "ada" else -1 for row in rows]
    assert scores.assigned.tolist() == expected


def test_an_ensemble_compares_completions_by_each_selector(ensemble, rows):
    loop, adapters = ensemble
    outcome = SelectorEnsemble(OutcomeRecord(kind="selector-ensemble", adapters=adapters))
    comparisons = [Comparison(row["prompt"], row["chosen"], row["rejected"]) for row in rows]
    odds = outcome.compare(comparisons, make_workspace(loop))
    assert odds.shape == (3, len(rows))
    assert np.array_equal(odds[0], odds[2])
    assert not np.allclose(odds[0], odds[1])


def test_an_ensemble_has_no_policy_to_export(ensemble, tmp_path):
    loop, adapters = ensemble
    outcome = SelectorEnsemble(OutcomeRecord(kind="selector-ensemble", adapters=adapters))
    assert outcome.export_policy(tmp_path / "policy", make_workspace(loop)) is None
    assert not (tmp_path / "policy").exists()
    assert outcome.clients is None


# --- policies


def test_a_shared_policy_scores_all_pairs_and_is_exported_as_one_policy(loops, rows, tmp_path):
    loop = loops["shared-policy"]
    digest = put_random(loop, 1)
    outcome = SharedPolicy(OutcomeRecord(kind="shared-policy", adapters={"policy": digest}))
    workspace = make_workspace(loop)
    assert outcome.clients is None
    assert np.allclose(outcome.score(rows, workspace).margins[0], score_alone(loop, digest, rows))
    policy = outcome.export_policy(tmp_path / "policy", workspace)
    assert (policy.kind, policy.folder, policy.job_keys) == ("single", "policy", {})
    assert set(read_adapter(tmp_path / "policy")[0]) == set(workspace.adapter(digest))


def test_client_adapters_score_each_clients_pairs_by_its_own(loops, rows, tmp_path):
    loop = loops["client-adapters"]
    adapters = {"ada": put_random(loop, 1), "bea": put_random(loop, 2)}
    outcome = load_outcome(OutcomeRecord(kind="client-adapters", adapters=adapters))
    margins = outcome.score(rows, make_workspace(loop)).margins[0]
    assert outcome.clients == ["ada", "bea"]
    for name, digest in adapters.items():
        own = [n for n, row in enumerate(rows) if row["client_id"] == name]
        assert np.allclose(margins[own], score_alone(loop, digest, [rows[n] for n in own]))


def test_client_adapters_are_exported_as_a_folder_for_each_client(loops, tmp_path):
    loop = loops["client-adapters"]
    adapters = {"ada": put_random(loop, 1), "b/ea": put_random(loop, 2)}
    workspace = make_workspace(loop)
    outcome = load_outcome(OutcomeRecord(kind="client-adapters", adapters=adapters))
    policy = outcome.export_policy(tmp_path / "policy", workspace)
    assert policy.kind == "client-adapters"
    folders = client_adapter_folders(tmp_path / "policy")
    assert set(folders) == {"ada", "b/ea"}
    for name, folder in folders.items():
        adapter, _ = read_adapter(folder)
        expected = workspace.adapter(adapters[name])
        assert all(torch.equal(adapter[tensor], expected[tensor]) for tensor in expected)


def test_personalized_clients_score_each_clients_pairs_with_its_private_modules(loops, rows):
    loop = loops["personalized-clients"]
    record = loop.bound.outcome(loop.latest_state())
    outcome = PersonalizedClients(record)
    margins = outcome.score(rows, make_workspace(loop)).margins[0]
    adapter = loop.commits.store.get(record.adapters["policy"])
    assert outcome.clients == ["ada", "bea", "cyd", "dan"]
    for name in ("ada", "bea"):
        own = [n for n, row in enumerate(rows) if row["client_id"] == name]
        expected = loop.trainer.score_client_pairs([rows[n] for n in own], adapter, loop.context(name))
        assert np.allclose(margins[own], expected.margins[0])


def test_an_exported_personalized_policy_has_the_shared_adapter_alone(loops, tmp_path):
    loop = loops["personalized-clients"]
    record = loop.bound.outcome(loop.latest_state())
    policy = PersonalizedClients(record).export_policy(tmp_path / "policy", make_workspace(loop))
    assert policy.kind == "personalized-clients"
    assert policy.job_keys == record.job_keys
    adapter, _ = read_adapter(tmp_path / "policy")
    assert adapter
    assert all(".lora_" in name for name in adapter)
