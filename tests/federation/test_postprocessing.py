"""Post-processors of updates: their order, and their place in a job's key."""

from typing import Any, Literal

import pytest
import torch
from pydantic import Field

from components.config import POSTPROCESSORS, FederationConfig, PostProcessorConfig, RecipeError
from components.federation.clients.base import ClientResult
from components.federation.clients.context import ClientContexts
from components.federation.clients.worker import finished_update, run_job
from components.federation.commits import Commits
from components.federation.postprocessing import (
    PostProcessor,
    postprocessors_of,
    process_combined,
    process_update,
    processing_key,
)
from components.federation.protocol import TrainJob
from components.federation.rounds import run_federation
from components.models.store import AdapterStore
from components.recipes import load_recipe
from tests.support.bare_loop import open_loop


class AddAtBothEnds(PostProcessor):
    """Adds a number at the client, and subtracts it at the server."""

    kind: Literal["add"] = "add"
    amount: float = Field(1.0, description="What is added.")

    def at_client(self, update, received, job):
        return {name: tensor + self.amount for name, tensor in update.items()}

    def at_server(self, combined, previous):
        return {name: tensor - self.amount for name, tensor in combined.items()}


class HalveMovement(PostProcessor):
    """Halves a client's movement from the received adapter, and the server's from the previous one."""

    kind: Literal["halve"] = "halve"

    def at_client(self, update, received, job):
        return {name: received[name] + (update[name] - received[name]) / 2 for name in update}

    def at_server(self, combined, previous):
        return {name: previous[name] + (combined[name] - previous[name]) / 2 for name in combined}


@pytest.fixture
def registered(monkeypatch):
    """Both post-processors are registered, as those of an installed package are."""
    module = f"{__name__}:"
    names = {"add": f"{module}AddAtBothEnds", "halve": f"{module}HalveMovement"}
    monkeypatch.setattr(POSTPROCESSORS, "builtin", names)


def tensors(value):
    return {"a": torch.tensor([value])}


@pytest.fixture
def job(tmp_path):
    store = AdapterStore(tmp_path / "federation" / "adapters")
    return TrainJob(client="ada", round=0, seed=1, adapter=store.put(tensors(10.0)))


# --- the functions


def test_at_the_client_post_processors_are_applied_in_their_order(job):
    halved_last = process_update(
        [AddAtBothEnds(amount=2), HalveMovement()], tensors(14.0), tensors(10.0), job
    )
    halved_first = process_update(
        [HalveMovement(), AddAtBothEnds(amount=2)], tensors(14.0), tensors(10.0), job
    )
    assert halved_last["a"].item() == 13.0
    assert halved_first["a"].item() == 14.0


def test_at_the_server_post_processors_are_applied_in_reverse_order():
    subtracted_last = process_combined(
        [AddAtBothEnds(amount=2), HalveMovement()], tensors(14.0), tensors(10.0)
    )
    subtracted_first = process_combined(
        [HalveMovement(), AddAtBothEnds(amount=2)], tensors(14.0), tensors(10.0)
    )
    assert subtracted_last["a"].item() == 10.0
    assert subtracted_first["a"].item() == 11.0


def test_without_post_processors_nothing_changes_and_the_key_is_empty(job):
    update = tensors(3.0)
    assert process_update([], update, tensors(0.0), job) is update
    assert process_combined([], update, tensors(0.0)) is update
    assert processing_key([]) == ""


def test_the_key_depends_on_kind_settings_and_order():
    keys = {
        processing_key([AddAtBothEnds()]),
        processing_key([AddAtBothEnds(amount=2)]),
        processing_key([HalveMovement()]),
        processing_key([AddAtBothEnds(), HalveMovement()]),
        processing_key([HalveMovement(), AddAtBothEnds()]),
        "",
    }
    assert len(keys) == 6
    assert processing_key([AddAtBothEnds(amount=1.0)]) == processing_key([AddAtBothEnds()])


# --- recipes


def test_a_recipe_names_post_processors_by_kind(registered):
    config = load_recipe("debug", ["federation.postprocessors=[halve, {kind: add, amount: 3.0}]"]).federation
    assert postprocessors_of(config) == (HalveMovement(), AddAtBothEnds(amount=3.0))


def test_an_unknown_post_processor_is_refused_with_the_nearest_name(registered):
    with pytest.raises(RecipeError, match=r"federation\.postprocessors\[0\].*'halv'.*'halve'"):
        load_recipe("debug", ["federation.postprocessors=[halv]"])


def test_the_package_has_no_post_processors_and_says_so():
    with pytest.raises(RecipeError, match=r"federation\.postprocessors\[0\].*none"):
        load_recipe("debug", ["federation.postprocessors=[{amount: 1}]"])


def test_a_section_without_its_functions_is_no_post_processor():
    config = FederationConfig().model_copy(update={"postprocessors": [PostProcessorConfig(kind="bare")]})
    with pytest.raises(TypeError, match="'bare' does not derive from"):
        postprocessors_of(config)


# --- jobs


class FixedTrainer:
    """Sends the same tensors for each job, and counts the jobs."""

    def __init__(self):
        self.jobs = []

    def run(self, job, context):
        self.jobs.append(job)
        return ClientResult(tensors=tensors(14.0))


@pytest.fixture
def contexts(tmp_path, prepared):
    return ClientContexts(AdapterStore(tmp_path / "federation" / "adapters"), prepared / "pairs.parquet")


def test_a_client_sends_the_processed_update_and_stores_no_other(job, contexts):
    update = run_job(job, FixedTrainer(), contexts, [HalveMovement()])
    assert contexts.adapters.get(update.adapter)["a"].item() == 12.0
    stored = {path.stem for path in contexts.adapters.root.glob("*.safetensors")}
    assert stored == {job.adapter, update.adapter}


def test_a_repeated_job_never_returns_an_update_that_was_made_without_its_post_processors(job, contexts):

    trainer = FixedTrainer()
    run_job(job, trainer, contexts)
    protected = job.model_copy(update={"processing": processing_key([HalveMovement()])})
    assert protected.key() != job.key()
    assert finished_update(protected, contexts.adapters) is None
    update = run_job(protected, trainer, contexts, [HalveMovement()])
    assert contexts.adapters.get(update.adapter)["a"].item() == 12.0
    assert len(trainer.jobs) == 2


# --- whole federations

METHODS: dict[str, list[str]] = {
    "feddpo": [],
    "fedbis": [],
    "fedopt": [],
    "fedcda": [],
    "fedamp": [],
    "drift": [],
    "fedbiscuit": ["federation.options={selectors: 3, warmup_rounds: 1}", "federation.rounds=4"],
}


def run_once(method: str, prepared: Any, folder: Any, *overrides: str) -> Any:
    recipe = load_recipe(
        "debug",
        [
            f"federation.method={method}",
            "federation.rounds=1",
            "federation.clients_per_round=2",
            "federation.local_steps=1",
            "federation.batch_size=2",
            *METHODS[method],
            *overrides,
        ],
    )
    loop = open_loop(recipe, prepared, folder)
    pairs = prepared / "pairs.parquet"
    return loop, run_federation(recipe, loop.federation, pairs, loop.commits, loop.trainer)


@pytest.mark.slow
def test_every_job_of_a_run_carries_the_settings_of_the_post_processors(
    registered, prepared, tmp_path, monkeypatch
):
    monkeypatch.setattr(Commits, "discard", lambda self, jobs=(), keep_every=1: None)
    plain, _ = run_once("feddpo", prepared, tmp_path / "plain")
    protected, _ = run_once("feddpo", prepared, tmp_path / "protected", "federation.postprocessors=[halve]")
    files = [
        {path.name for path in (loop.commits.folder / "updates").iterdir()} for loop in (plain, protected)
    ]
    assert len(files[0]) == len(files[1]) == 2
    assert not files[0] & files[1]


def sent_next(strategy, state):
    """Hashes of the adapters that the clients are sent next."""
    state = state.end_round(state.adapters, state.memory, state.metrics)
    sent = set()
    for job in strategy.plan(state):
        sent |= set(job.received)
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_applies_post_processors_to_what_it_combines(method, registered, prepared, tmp_path):
    """Where `at_server` is not applied, adapters have the number that the clients have added."""
    overrides = ["federation.postprocessors=[{kind: add, amount: 1000.0}]"]
    loop, state = run_once(method, prepared, tmp_path, *overrides)
    for digest in sent_next(loop.strategy, state):
        adapter = loop.commits.store.get(digest)
        assert max(tensor.abs().max().item() for tensor in adapter.values()) < 500
