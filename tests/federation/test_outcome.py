"""Outcomes: whose model answers, by which jobs it is measured, and what is exported."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from components.config import UserError
from components.data.records import read_pairs
from components.evaluation.accuracy import accuracy_report
from components.federation.clients.worker import build_trainer
from components.federation.outcome import (
    export_adapters,
    export_policy,
    generate_jobs,
    kl_jobs,
    measure_jobs,
    rows_by_client,
)
from components.federation.protocol import Failure, Generation
from components.federation.rounds import ask_clients
from components.federation.transport import InProcessTransport
from components.learning.kl import kl_to_reference
from components.learning.pair_scores import PairFigures, pair_figures
from components.models.adapters import read_adapter
from components.models.backbone import find_active_dropout
from components.models.policy import client_adapter_folders
from components.models.samples import Completion
from components.recipes import load_recipe
from components.reporting.lines import accuracy_line
from components.results import Outcome
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
    return {name: read_pairs(prepared / "pairs.parquet", name, "test") for name in ("ada", "bea")}


def put_random(loop, seed):
    slot = loop.trainer.selector.slot if hasattr(loop.trainer, "selector") else loop.trainer.resident.slot
    return loop.commits.store.put(random_tensors(slot, seed, 0.2))


def ask(loop, jobs):
    transport = InProcessTransport(loop.recipe, loop.contexts, {"": loop.trainer})
    updates, _ = ask_clients(jobs, transport, loop.recipe.federation, quorum=1)
    return {update.client: update.output for update in updates}


def measure(loop, outcome, **settings):
    """The figures of all held-out pairs of ada and bea."""
    jobs = measure_jobs(outcome, "test", {"ada": None, "bea": None}, **settings)
    return {name: PairFigures.model_validate(answer) for name, answer in ask(loop, jobs).items()}


# --- all kinds


@pytest.mark.parametrize(("kind", "model"), [("selector-ensemble", "selector"), ("shared-policy", "policy")])
def test_an_exported_adapter_is_a_peft_folder_of_the_trained_model(kind, model, loops, tmp_path):
    loop = loops[kind]
    digest = put_random(loop, 1)
    outcome = Outcome(trained_model=model, adapters={"one": digest})
    exported = export_adapters(outcome, tmp_path / "adapters", loop.recipe, loop.commits.store)
    adapter, lora = read_adapter(tmp_path / exported["one"].folder)
    expected = loop.commits.store.get(digest)
    assert exported["one"].hash == digest
    assert exported["one"].folder.startswith("adapters/")
    assert lora.r == getattr(loop.recipe, model).lora.r
    assert all(torch.equal(adapter[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", METHODS)
def test_a_method_ends_with_its_outcome_and_a_client_measures_as_many_pairs_as_it_is_asked(
    kind, loops, own_rows
):
    loop = loops[kind]
    state = loop.latest_state() if kind == "personalized-clients" else loop.initial_state()
    outcome = loop.bound.outcome(state)
    assert outcome.votes == (outcome.trained_model == "selector") == (kind == "selector-ensemble")
    assert outcome.has_client_policies == (kind == "client-adapters")
    assert outcome.own == ("modules" if kind == "personalized-clients" else "")
    assert outcome.clients == (
        [] if kind in ("selector-ensemble", "shared-policy") else state.federation.names
    )
    (job,) = measure_jobs(outcome, "test", {"ada": 1}, 3)
    assert (job.client, job.round, job.pairs) == ("ada", 3, 1)
    figures = PairFigures.model_validate(ask(loop, [job])["ada"])
    assert figures.pairs == 1
    (drawn,) = loop.contexts.open("ada").drawn_rows(job)
    assert figures.domains == {drawn.domain: (1, figures.votes)}


def test_a_client_draws_the_pairs_that_it_measures_by_the_seed_and_its_name(loops, own_rows):
    contexts, (job,) = loops["shared-policy"].contexts, measure_jobs(Outcome(adapters={}), "test", {"ada": 1})
    rows = own_rows["ada"]
    draws = {}
    for seed in range(12):
        for client in ("ada", "bea"):
            drawn = contexts.open(client).drawn_rows(job.model_copy(update={"seed": seed, "client": client}))
            (draws[seed, client],) = [own_rows[client].index(row) for row in drawn]
    assert len({draws[seed, "ada"] for seed in range(12)}) > 1
    assert any(draws[seed, "ada"] != draws[seed, "bea"] for seed in range(12))
    assert contexts.open("ada").drawn_rows(job.model_copy(update={"pairs": len(rows) + 1})) == rows


# --- selectors


@pytest.fixture
def ensemble(loops):
    """Three selectors, two of which are equal."""
    loop = loops["selector-ensemble"]
    first = put_random(loop, 1)
    second = put_random(loop, 2)
    return loop, {"selector-0": first, "selector-1": second, "selector-2": first}


def voting(adapters, **fields):
    reverse = dict(reversed(adapters.items()))
    return Outcome(trained_model="selector", votes=True, adapters=reverse, **fields)


def test_a_clients_figures_are_of_the_selectors_in_the_order_of_their_names(ensemble, own_rows):
    loop, adapters = ensemble
    measured = measure(loop, voting(adapters, assignment={"ada": "selector-1"}))
    scored = [loop.commits.store.get(adapters[name]) for name in sorted(adapters)]
    for name, rows in own_rows.items():
        scores = loop.trainer.score_pairs(rows, scored)
        assert measured[name] == pair_figures(scores, rows, 1 if name == "ada" else None)
    assert measured["ada"].assigned != measured["bea"].assigned is None


def test_equal_selectors_are_computed_once(ensemble):
    loop, adapters = ensemble
    with mock.patch.object(loop.trainer, "score_pairs", wraps=loop.trainer.score_pairs) as score_pairs:
        assert len(measure(loop, voting(adapters), done=1)) == 2
    assert [len(call.args[1]) for call in score_pairs.call_args_list] == [2, 2]


# --- policies


def test_a_shared_policy_is_measured_by_all_clients_and_exported_as_one(loops, own_rows, tmp_path):
    loop = loops["shared-policy"]
    digest = put_random(loop, 1)
    outcome = Outcome(adapters={"policy": digest})
    adapter = loop.commits.store.get(digest)
    measured = measure(loop, outcome)
    for name, rows in own_rows.items():
        assert measured[name] == pair_figures(loop.trainer.score_pairs(rows, adapter, None), rows)
    assert outcome.clients == []
    export_policy(outcome, tmp_path / "policy", loop.recipe, loop.commits.store)
    assert set(read_adapter(tmp_path / "policy")[0]) == set(adapter)


def of_clients(adapters):
    return Outcome(adapters=adapters, assignment={name: name for name in adapters})


@pytest.fixture
def per_client(loops):
    loop = loops["client-adapters"]
    adapters = {"ada": put_random(loop, 1), "bea": put_random(loop, 2)}
    return loop, of_clients(adapters)


def test_each_client_is_sent_its_own_adapter_alone(per_client, own_rows):
    loop, outcome = per_client
    assert outcome.clients == ["ada", "bea"]
    measured = measure(loop, outcome)
    for name, rows in own_rows.items():
        adapter = loop.commits.store.get(outcome.adapters[name])
        assert measured[name] == pair_figures(loop.trainer.score_pairs(rows, adapter, None), rows)
    assert [job.received for job in measure_jobs(outcome, "test", {"bea": None})] == [
        (outcome.adapters["bea"],)
    ]


def test_client_adapters_are_exported_as_a_folder_for_each_client(loops, tmp_path):
    loop = loops["client-adapters"]
    adapters = {"ada": put_random(loop, 1), "b/ea": put_random(loop, 2)}
    outcome = of_clients(adapters)
    export_policy(outcome, tmp_path / "policy", loop.recipe, loop.commits.store)
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
    answers = ask(loop, generate_jobs(outcome, generations))
    for name, asked in generations.items():
        loop.trainer.load_client(loop.commits.store.get(outcome.adapters[name]), None)
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
    answers = ask(loop, kl_jobs(outcome, PROMPTS, clients, 5, 0.7))
    policy = loop.trainer.resident.policy
    for name, rows in rows_by_client(clients).items():
        loop.trainer.load_client(loop.commits.store.get(outcome.adapters[name]), None)
        expected = [kl_to_reference(policy, [PROMPTS[n]], derive(5, n), 0.7)["kl_sequence"] for n in rows]
        assert answers[name] == expected
        assert min(expected) > 0


@pytest.fixture
def personalized(loops):
    loop = loops["personalized-clients"]
    return loop, loop.bound.outcome(loop.latest_state())


def test_personalized_clients_measure_and_answer_with_their_private_modules(personalized, own_rows):
    loop, outcome = personalized
    assert outcome.clients == ["ada", "bea", "cyd", "dan"]
    measured = measure(loop, outcome)
    adapter = loop.commits.store.get(*outcome.adapters_of(""))
    for name, rows in own_rows.items():
        expected = pair_figures(loop.trainer.score_pairs(rows, adapter, loop.context(name)), rows)
        assert measured[name] == expected
        without = loop.trainer.score_pairs(rows, adapter, loop.contexts.open(name))
        assert measured[name] != pair_figures(without, rows)


def test_a_client_without_its_private_state_is_named(personalized, tmp_path):
    loop, outcome = personalized
    elsewhere = replace(loop.contexts, home=tmp_path / "federation")
    transport = InProcessTransport(loop.recipe, elsewhere, {"": loop.trainer})
    jobs = measure_jobs(outcome, "test", {"ada": 1}, 9)  # not answered before
    with pytest.raises(UserError, match="no private state of client ada"):
        ask_clients(jobs, transport, loop.recipe.federation, quorum=1)


class Away(InProcessTransport):
    """Reaches all clients but some."""

    away = ("bea",)

    def run(self, jobs):
        here = [job for job in jobs if job.client not in self.away]
        return [*super().run(here), *(Failure(name, "not connected") for name in self.away)]


def test_a_measurement_takes_those_who_answer_above_the_quorum(personalized, own_rows):
    loop, outcome = personalized
    transport = Away(loop.recipe, loop.contexts, {"": loop.trainer})
    jobs = measure_jobs(outcome, "test", dict.fromkeys(own_rows))
    updates, missing = ask_clients(jobs, transport, loop.recipe.federation, quorum=0.5)
    assert [update.client for update in updates] == ["ada"]
    figures = {update.client: PairFigures.model_validate(update.output) for update in updates}
    report = accuracy_report(figures, missing)
    assert (report.missing, list(report.clients)) == ({"bea": "not connected"}, ["ada"])
    assert "(1 of 2 clients, worst client" in accuracy_line(report)
    assert "missing" not in accuracy_report(figures).model_dump(mode="json"), "results stay as they were"
    needed = "1 of 2 clients have no answer to a job 'measure', which needs 2: .*bea: not connected"
    with pytest.raises(UserError, match=needed):
        ask_clients(jobs, transport, loop.recipe.federation, quorum=0.6)


def test_an_exported_personalized_policy_has_the_shared_adapter_alone(personalized, tmp_path):
    loop, outcome = personalized
    export_policy(outcome, tmp_path / "policy", loop.recipe, loop.commits.store)
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
    return loop, Outcome(adapters={"policy": digest}, is_aligned=True)


def test_an_aligned_policy_is_measured_by_a_trainer_of_policies(aligned, loops, own_rows):
    loop, outcome = aligned
    (job,) = measure_jobs(outcome, "test", {"ada": None}, batch_size=3)
    assert (job.trainer, job.batch_size) == ("policy", 3)
    figures = PairFigures.model_validate(ask(loop, [job])["ada"])
    adapter = loop.commits.store.get(*outcome.adapters_of(""))
    expected = loops["shared-policy"].trainer.score_pairs(own_rows["ada"], adapter, None, 3)
    assert figures == pair_figures(expected, own_rows["ada"])
    assert np.abs(expected.margins).max() > 1e-3


def test_an_aligned_policy_is_measured_without_dropout():
    recipe = load_recipe("debug", [*SMALL, "policy.lora.dropout=0.3"])
    assert find_active_dropout(build_trainer(recipe, "cpu", "policy").model) == []
    trained = load_recipe("debug", [*SMALL, *METHODS["shared-policy"], "policy.lora.dropout=0.3"])
    assert find_active_dropout(build_trainer(trained, "cpu").model)


@pytest.mark.parametrize("reference", ["sft", "round_start"])
def test_the_implicit_reward_is_relative_to_the_reference_adapter(
    aligned, loops, own_rows, tmp_path, reference
):
    loop, outcome = aligned
    export_policy(outcome, tmp_path / "sft", loop.recipe, loop.commits.store)
    settings = [f"alignment.dpo={{reference: {reference}, reference_adapter: {tmp_path}/sft}}"]
    recipe = load_recipe("debug", [*SMALL, *METHODS["selector-ensemble"], *settings])
    trainer = build_trainer(recipe, "cpu", "policy")
    adapter = loop.commits.store.get(*outcome.adapters_of(""))
    assert trainer.score_pairs(own_rows["ada"], adapter, None).margins == pytest.approx(0, abs=1e-4)
    other = random_tensors(trainer.resident.slot, 8, 0.2)
    assert np.abs(trainer.score_pairs(own_rows["ada"], other, None).margins).max() > 1e-3
    trained = load_recipe("debug", [*SMALL, *METHODS["shared-policy"]])
    assert recipe.base_adapter is not None
    assert trained.model_copy(update={"alignment": recipe.alignment}).base_adapter is None
