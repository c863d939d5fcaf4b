"""Outcomes: whose model answers, by which jobs it is measured, and what is exported."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from components.data.records import read_rows
from components.federation.clients.private import PrivateStoreError
from components.federation.clients.worker import build_trainer
from components.federation.outcome import (
    OUTCOMES,
    AlignedPolicy,
    ClientAdapters,
    OutcomeError,
    SelectorEnsemble,
    SharedPolicy,
    load_outcome,
    rows_by_client,
)
from components.federation.protocol import Generation
from components.federation.rounds import ask_clients
from components.federation.transport import InProcessTransport
from components.learning.kl import kl_to_reference
from components.learning.pair_scores import PairFigures, pair_figures
from components.models.adapters import read_adapter
from components.models.backbone import find_active_dropout
from components.models.generation import Completion
from components.models.policy import client_adapter_folders
from components.recipes import load_recipe
from components.results import OutcomeRecord
from components.seeding import derive
from tests.support.adapters import random_tensors
from tests.support.bare_loop import open_loop

SMALL = [
    "federation.clients_per_round=4",
    "federation.local_steps=1",
    "federation.batch_size=2",
    "federation.rounds=1",
]
METHODS = {
    "selector-ensemble": ["federation.method=fedbis"],
    "shared-policy": ["federation.method=feddpo"],
    "client-adapters": ["federation.method=drift"],
    "personalized-clients": ["federation.method=fedper", "federation.options={shared_layers: 1}"],
}
PROMPTS = ["a paper", "another paper", "a third one"]


@pytest.fixture(scope="module")
def loops(prepared, tmp_path_factory):
    """A federation of each kind of outcome; clients have private state where the kind has it."""
    opened = {}
    for kind, overrides in METHODS.items():
        recipe = load_recipe("debug", [*SMALL, "policy.max_new_tokens=4", *overrides])
        opened[kind] = open_loop(recipe, prepared, tmp_path_factory.mktemp(kind))
    opened["personalized-clients"].run()
    return opened


@pytest.fixture(scope="module")
def own_rows(prepared):
    """The held-out pairs of two clients."""
    return {name: read_rows(prepared / "pairs.parquet", name, "test") for name in ("ada", "bea")}


def put_random(loop, seed):
    slot = loop.trainer.selector.slot if hasattr(loop.trainer, "selector") else loop.trainer.resident.slot
    return loop.commits.store.put(random_tensors(slot, seed, 0.2))


def ask(loop, jobs):
    transport = InProcessTransport(loop.recipe, loop.contexts, {"": loop.trainer})
    return ask_clients(jobs, transport, loop.recipe.federation)


def measure(loop, outcome, **settings):
    """The figures of all held-out pairs of ada and bea."""
    jobs = outcome.measure_jobs("test", {"ada": None, "bea": None}, **settings)
    return {name: PairFigures.model_validate(answer) for name, answer in ask(loop, jobs).items()}


# --- all kinds


def test_the_kind_of_a_record_names_its_class():
    assert set(OUTCOMES.builtin) == {*METHODS, "aligned-policy"}
    for kind in OUTCOMES.builtin:
        outcome = OUTCOMES.load(kind)
        assert outcome.kind == kind
        assert isinstance(load_outcome(OutcomeRecord(kind=kind)), outcome)


def test_an_unknown_kind_is_refused_and_a_single_policy_of_earlier_versions_is_a_shared_one():
    with pytest.raises(OutcomeError, match=r"'forest' is not known.*shared-policy"):
        load_outcome(OutcomeRecord(kind="forest"))
    assert OutcomeRecord.model_validate({"kind": "single", "folder": "final"}).kind == "shared-policy"


@pytest.mark.parametrize(("kind", "model"), [("selector-ensemble", "selector"), ("shared-policy", "policy")])
def test_an_exported_adapter_is_a_peft_folder_of_the_trained_model(kind, model, loops, tmp_path):
    loop = loops[kind]
    digest = put_random(loop, 1)
    outcome = load_outcome(OutcomeRecord(kind=kind, adapters={"one": digest}))
    exported = outcome.export(tmp_path / "adapters", loop.recipe, loop.commits.store)
    adapter, lora = read_adapter(tmp_path / exported["one"].folder)
    expected = loop.commits.store.get(digest)
    assert exported["one"].hash == digest
    assert exported["one"].folder.startswith("adapters/")
    assert lora.r == getattr(loop.recipe, model).lora.r
    assert all(torch.equal(adapter[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", METHODS)
def test_a_method_ends_with_its_outcome_and_a_client_measures_the_pairs_at_the_positions_alone(
    kind, loops, own_rows
):
    loop = loops[kind]
    state = loop.latest_state() if kind == "personalized-clients" else loop.initial_state()
    record = loop.bound.outcome(state)
    assert record.kind == kind
    (job,) = load_outcome(record).measure_jobs("test", {"ada": [1]}, 3)
    assert (job.client, job.round, job.positions) == ("ada", 3, (1,))
    figures = PairFigures.model_validate(ask(loop, [job])["ada"])
    assert figures.pairs == 1
    assert figures.domains == {own_rows["ada"][1]["domain"]: (1, figures.votes)}


# --- selectors


@pytest.fixture
def ensemble(loops):
    """Three selectors, two of which are equal."""
    loop = loops["selector-ensemble"]
    first = put_random(loop, 1)
    second = put_random(loop, 2)
    return loop, {"selector-0": first, "selector-1": second, "selector-2": first}


def selector_record(adapters, **fields):
    return OutcomeRecord(kind="selector-ensemble", adapters=dict(reversed(adapters.items())), **fields)


def test_a_clients_figures_are_of_the_selectors_in_the_order_of_their_names(ensemble, own_rows):
    loop, adapters = ensemble
    measured = measure(loop, SelectorEnsemble(selector_record(adapters, assignment={"ada": "selector-1"})))
    scored = [loop.commits.store.get(adapters[name]) for name in sorted(adapters)]
    for name, rows in own_rows.items():
        scores = loop.trainer.score_pairs(rows, scored)
        assert measured[name] == pair_figures(scores, rows, 1 if name == "ada" else None)
    assert measured["ada"].assigned != measured["bea"].assigned is None


def test_equal_selectors_are_computed_once(ensemble):
    loop, adapters = ensemble
    with mock.patch.object(loop.trainer, "score_pairs", wraps=loop.trainer.score_pairs) as score_pairs:
        assert len(measure(loop, SelectorEnsemble(selector_record(adapters)), done=1)) == 2
    assert [len(call.args[1]) for call in score_pairs.call_args_list] == [2, 2]


def test_an_ensemble_has_no_policy_to_export(ensemble, tmp_path):
    loop, adapters = ensemble
    outcome = SelectorEnsemble(selector_record(adapters))
    assert not outcome.export_policy(tmp_path / "policy", loop.recipe, loop.commits.store)
    assert not (tmp_path / "policy").exists()
    assert outcome.clients == []


# --- policies


def test_a_shared_policy_is_measured_by_all_clients_and_exported_as_one(loops, own_rows, tmp_path):
    loop = loops["shared-policy"]
    digest = put_random(loop, 1)
    outcome = SharedPolicy(OutcomeRecord(kind="shared-policy", adapters={"policy": digest}))
    adapter = loop.commits.store.get(digest)
    measured = measure(loop, outcome)
    for name, rows in own_rows.items():
        assert measured[name] == pair_figures(loop.trainer.score_pairs(rows, adapter, None), rows)
    assert outcome.clients == []
    assert outcome.export_policy(tmp_path / "policy", loop.recipe, loop.commits.store)
    assert set(read_adapter(tmp_path / "policy")[0]) == set(adapter)


@pytest.fixture
def per_client(loops):
    loop = loops["client-adapters"]
    adapters = {"ada": put_random(loop, 1), "bea": put_random(loop, 2)}
    return loop, ClientAdapters(OutcomeRecord(kind="client-adapters", adapters=adapters))


def test_each_client_is_sent_its_own_adapter_alone(per_client, own_rows):
    loop, outcome = per_client
    assert outcome.clients == ["ada", "bea"]
    measured = measure(loop, outcome)
    for name, rows in own_rows.items():
        adapter = loop.commits.store.get(outcome.record.adapters[name])
        assert measured[name] == pair_figures(loop.trainer.score_pairs(rows, adapter, None), rows)
    assert [job.received for job in outcome.measure_jobs("test", {"bea": None})] == [
        (outcome.record.adapters["bea"],)
    ]


def test_client_adapters_are_exported_as_a_folder_for_each_client(loops, tmp_path):
    loop = loops["client-adapters"]
    adapters = {"ada": put_random(loop, 1), "b/ea": put_random(loop, 2)}
    outcome = load_outcome(OutcomeRecord(kind="client-adapters", adapters=adapters))
    assert outcome.export_policy(tmp_path / "policy", loop.recipe, loop.commits.store)
    folders = client_adapter_folders(tmp_path / "policy")
    assert set(folders) == {"ada", "b/ea"}
    for name, folder in folders.items():
        adapter, _ = read_adapter(folder)
        expected = loop.commits.store.get(adapters[name])
        assert all(torch.equal(adapter[tensor], expected[tensor]) for tensor in expected)


def test_each_client_completes_its_own_prompts(per_client):
    loop, outcome = per_client
    by_client = rows_by_client(["bea", "ada", "bea"])
    assert by_client == {"ada": [1], "bea": [0, 2]}
    generations = {
        name: [
            Generation(prompts=tuple(PROMPTS[n] for n in rows), seed=3),
            Generation(prompts=(PROMPTS[0],), seed=3, temperature=0.8, count=2, max_new_tokens=2),
        ]
        for name, rows in by_client.items()
    }
    answers = ask(loop, outcome.generate_jobs(generations))
    for name, asked in generations.items():
        loop.trainer.load_client(loop.commits.store.get(outcome.record.adapters[name]), None)
        expected = [generation.complete(loop.trainer.resident.policy) for generation in asked]
        received = [
            [[Completion(tuple(one["ids"]), one["text"], one["finished"]) for one in own] for own in texts]
            for texts in answers[name]
        ]
        assert received == expected
    assert answers["ada"][1] != answers["bea"][1]


def test_the_kl_of_each_prompt_is_that_of_its_clients_policy(per_client):
    loop, outcome = per_client
    clients = ["ada", "bea", "ada"]
    answers = ask(loop, outcome.kl_jobs(PROMPTS, clients, 5, 0.7))
    policy = loop.trainer.resident.policy
    for name, rows in rows_by_client(clients).items():
        loop.trainer.load_client(loop.commits.store.get(outcome.record.adapters[name]), None)
        expected = [kl_to_reference(policy, [PROMPTS[n]], derive(5, n), 0.7)["kl_sequence"] for n in rows]
        assert answers[name] == expected
        assert min(expected) > 0


@pytest.fixture
def personalized(loops):
    loop = loops["personalized-clients"]
    return loop, load_outcome(loop.bound.outcome(loop.latest_state()))


def test_personalized_clients_measure_and_answer_with_their_private_modules(personalized, own_rows):
    loop, outcome = personalized
    assert outcome.clients == ["ada", "bea", "cyd", "dan"]
    measured = measure(loop, outcome)
    adapter = loop.commits.store.get(outcome.adapter)
    for name, rows in own_rows.items():
        expected = pair_figures(loop.trainer.score_pairs(rows, adapter, loop.context(name)), rows)
        assert measured[name] == expected
        without = loop.trainer.score_pairs(rows, adapter, loop.contexts.open(name))
        assert measured[name] != pair_figures(without, rows)


def test_a_client_without_its_private_state_is_named(personalized, tmp_path):
    loop, outcome = personalized
    elsewhere = replace(loop.contexts, home=tmp_path / "federation")
    transport = InProcessTransport(loop.recipe, elsewhere, {"": loop.trainer})
    jobs = outcome.measure_jobs("test", {"ada": [0]}, 9)  # not answered before
    with pytest.raises(PrivateStoreError, match="no private state of client ada"):
        ask_clients(jobs, transport, loop.recipe.federation)


def test_an_exported_personalized_policy_has_the_shared_adapter_alone(personalized, tmp_path):
    loop, outcome = personalized
    assert outcome.export_policy(tmp_path / "policy", loop.recipe, loop.commits.store)
    adapter, _ = read_adapter(tmp_path / "policy")
    assert adapter
    assert all(".lora_" in name for name in adapter)


# --- the policy that the server has aligned


@pytest.fixture
def aligned(loops):
    """An aligned adapter, sent to the clients of selectors."""
    loop = loops["selector-ensemble"]
    slot = loops["shared-policy"].trainer.resident.slot
    digest = loop.commits.store.put(random_tensors(slot, 3, 0.2))
    return loop, AlignedPolicy(OutcomeRecord(kind="aligned-policy", adapters={"policy": digest}))


def test_an_aligned_policy_is_measured_by_a_trainer_of_policies_and_refused_by_that_of_the_method(
    aligned, loops, own_rows
):
    loop, outcome = aligned
    (job,) = outcome.measure_jobs("test", {"ada": None}, batch_size=3)
    assert (job.trainer, job.batch_size) == ("aligned", 3)
    figures = PairFigures.model_validate(ask(loop, [job])["ada"])
    adapter = loop.commits.store.get(outcome.adapter)
    expected = loops["shared-policy"].trainer.score_pairs(own_rows["ada"], adapter, None, 3)
    assert figures == pair_figures(expected, own_rows["ada"])
    assert np.abs(expected.margins).max() > 1e-3
    with pytest.raises(TypeError, match="SelectorTrainer has no jobs of kind 'measure-aligned'"):
        loop.trainer.run(job, loop.contexts.open("ada"))


def test_an_aligned_policy_is_measured_without_dropout():
    recipe = load_recipe("debug", [*SMALL, "policy.lora.dropout=0.3"])
    assert find_active_dropout(build_trainer(recipe, "cpu", "aligned").model) == []
    trained = load_recipe("debug", [*SMALL, *METHODS["shared-policy"], "policy.lora.dropout=0.3"])
    assert find_active_dropout(build_trainer(trained, "cpu").model)


@pytest.mark.parametrize("reference", ["sft", "round_start"])
def test_the_implicit_reward_is_relative_to_the_reference_adapter(
    aligned, loops, own_rows, tmp_path, reference
):
    loop, outcome = aligned
    SharedPolicy(outcome.record).export_policy(tmp_path / "sft", loop.recipe, loop.commits.store)
    settings = [f"alignment.dpo={{reference: {reference}, reference_adapter: {tmp_path}/sft}}"]
    recipe = load_recipe("debug", [*SMALL, *METHODS["selector-ensemble"], *settings])
    trainer = build_trainer(recipe, "cpu", "aligned")
    adapter = loop.commits.store.get(outcome.adapter)
    assert trainer.score_pairs(own_rows["ada"], adapter, None).margins == pytest.approx(0, abs=1e-4)
    other = random_tensors(trainer.resident.slot, 8, 0.2)
    assert np.abs(trainer.score_pairs(own_rows["ada"], other, None).margins).max() > 1e-3
    trained = load_recipe("debug", [*SMALL, *METHODS["shared-policy"]])
    assert recipe.base_adapter is not None
    assert trained.model_copy(update={"alignment": recipe.alignment}).base_adapter is None
