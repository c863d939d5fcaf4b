"""The two verbs of a transport: which steps need sums alone, and what the server is given of clients then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import pytest
import torch

from components.config import Recipe
from components.config.federation import METHODS
from components.federation.aggregators import Sum
from components.federation.clients.context import ClientContexts
from components.federation.commits import Commits
from components.federation.protocol import Failure, Job, Update
from components.federation.rounds import run_rounds
from components.federation.step_answers import StepAnswers, Weights
from components.federation.transport import Transport
from components.models.store import Adapter, AdapterStore
from components.recipes import load_recipe
from components.reporting.metrics import cost_metrics
from components.results import ClientTotal, Metrics, Traffic
from tests.support.bare_loop import open_loop
from tests.support.bound_methods import bind_method, make_update, small_federation
from tests.support.registries import TRAINED_METHODS

PAIRS = {"ada": 3, "bea": 1, "cyd": 4}
SINGLE = {"drift", "fedamp", "fedcda", "firm"}
"""Methods whose rounds need single adapters."""


@dataclass
class SumsOnly(Transport):
    """Clients whose values are their numbers of pairs; a sum is all that it gives."""

    steps: list[Weights] = field(default_factory=list)

    @classmethod
    def open(cls, recipe: Recipe, contexts: ClientContexts) -> Self:
        raise NotImplementedError

    def run(self, jobs: Sequence[Job]) -> list[Update | Failure]:
        raise PermissionError("single answers")

    def sum(self, jobs: Sequence[Job], weights: Weights, template: Adapter) -> StepAnswers:
        self.steps.append(weights)
        asked = {job.client for job in jobs}
        assert asked == {client for shares in weights.values() for client in shares}
        assert sum(map(len, weights.values())) == len(asked), "a client is in one sum"
        sums = {}
        for name, shares in weights.items():
            value = sum(weight * PAIRS[client] for client, weight in shares.items())
            tensors = {key: torch.full_like(tensor, value) for key, tensor in template.items()}
            sums[name] = Sum(tensors, sum(shares.values()), tuple(sorted(shares)), len(shares))
        total = ClientTotal(clients=len(asked), rows=1)
        return StepAnswers(sorted(asked), sums=sums, total=total)


def play(tmp_path, method, **options):
    """The transport, and state and records after two rounds of three clients."""
    store = AdapterStore(tmp_path / "adapters")
    if method in ("firm", "fedcmoo"):
        options["objectives"] = {"long": ["long"]}
    bound = bind_method(store, method, 3, rounds=2, **options)
    federation = small_federation(store, PAIRS, [1.0], 3)
    transport = SumsOnly()
    commits = Commits(tmp_path, "")
    start = bound.start(federation, 0)
    state = run_rounds(bound.method, start, transport, commits, bound.config)
    return transport, state, commits.latest(bound.memory_type)[1]


@pytest.mark.parametrize("method", sorted({*TRAINED_METHODS} - SINGLE - {"fedcmoo"}))
def test_a_method_of_sums_takes_its_rounds_on_a_transport_that_has_only_sums(method, tmp_path):
    transport, state, records = play(tmp_path, method)
    assert state.round == 2
    assert [len(weights) for weights in transport.steps] == [1, 1]
    assert [record.total for record in records] == [ClientTotal(clients=3, rows=1)] * 2
    assert not any(record.clients for record in records), "no figure of a single client is committed"


@pytest.mark.parametrize("method", sorted(SINGLE))
def test_a_method_of_single_adapters_asks_for_answers(method, tmp_path):
    with pytest.raises(PermissionError):
        play(tmp_path, method)


def test_fedcmoo_asks_for_the_sum_of_gradients_and_for_single_adapters(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(SumsOnly, "run", lambda self, jobs: steps.append(jobs[0].kind) or [])
    monkeypatch.setattr("components.learning.mgda.solve", lambda *_: torch.tensor([1.0]))
    with pytest.raises(Exception, match="0 accepted updates of 3 clients"):
        play(tmp_path, "fedcmoo")
    assert steps == ["train"]


def test_fedbiscuit_asks_for_a_sum_for_each_cluster_and_for_single_losses(tmp_path, monkeypatch):
    def run(self, jobs):
        losses = {"ada": [0.0, 9.0, 9.0], "bea": [9.0, 0.0, 9.0], "cyd": [9.0, 9.0, 0.0]}
        return [make_update(job, losses=losses[job.client]) for job in jobs]

    monkeypatch.setattr(SumsOnly, "run", run)
    store = AdapterStore(tmp_path / "adapters")
    bound = bind_method(store, "fedbiscuit", 3, rounds=4, selectors=3, warmup_rounds=1)
    federation = small_federation(store, PAIRS, [1.0], 3)
    transport = SumsOnly()
    run_rounds(
        bound.method,
        bound.start(federation, 0),
        transport,
        Commits(tmp_path, ""),
        bound.config,
    )
    names = [f"selector-{number}" for number in range(3)]
    assert [sorted(weights) for weights in transport.steps] == [*([name] for name in names), names]


@pytest.mark.parametrize("aggregator", ["exact", "trimmed"])
def test_an_aggregator_of_single_adapters_asks_for_answers(aggregator, tmp_path):
    with pytest.raises(PermissionError):
        play(tmp_path, "feddpo", aggregator=aggregator)


def run(method, prepared, folder, *overrides):
    """The loop of two rounds, and its last state."""
    sgd = "federation.optimizer={name: sgd, lr: 0.1, scheduler: constant, warmup_steps: 0, clip: null}"
    recipe = load_recipe("debug", [f"federation.method={method}", "federation.rounds=2", sgd, *overrides])
    loop = open_loop(recipe, prepared, folder)
    return loop, loop.run()


def test_sums_have_the_bytes_of_single_updates(prepared, tmp_path, monkeypatch):
    """The sum of the transport, and the aggregator's combination of each client's adapter."""
    _, by_sums = run("feddpo", prepared, tmp_path / "sums")
    monkeypatch.setattr(METHODS.load("feddpo"), "sums", lambda *_: None)
    _, by_updates = run("feddpo", prepared, tmp_path / "updates")
    assert by_sums.adapters == by_updates.adapters


def test_without_permission_the_totals_of_the_clients_are_recorded(prepared, tmp_path):
    known, state = run("scaffold", prepared, tmp_path / "known")
    unknown, same = run("scaffold", prepared, tmp_path / "unknown", "tracking.client_figures=false")
    assert state.adapters == same.adapters
    for one, other in zip(known.records, unknown.records, strict=True):
        assert other.clients == {}
        assert other.participants == len(one.clients) > 1
        assert other.total.losses == []
        means = other.client_means()
        assert means.keys() == one.client_means().keys()
        assert means["loss"] == pytest.approx(one.client_means()["loss"])
        for name in Traffic.model_fields:
            sums = sum(getattr(client.traffic, name) for client in one.clients.values())
            assert getattr(other.total.traffic, name) == sums > 0
    costs = [cost_metrics(loop.records) for loop in (known, unknown)]
    names = ("cost/client_steps", "cost/sent_mb", "cost/kept_mb")
    assert [costs[1][name] for name in names] == pytest.approx([costs[0][name] for name in names])


def test_a_total_has_no_number_of_a_single_step():
    total = ClientTotal.of([make_update_with({"loss": 1.0}), make_update_with({"loss": 3.0, "kl": 2.0})])
    assert total.metrics == Metrics(scalars={"loss": 2.0, "kl": 2.0})


def make_update_with(scalars):
    metrics = Metrics(scalars=scalars, series={"lambda": [0.5]})
    return Update(job="", client="", rows=2, losses=[0.1], metrics=metrics)
