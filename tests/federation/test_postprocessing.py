"""Post-processors of updates: what they see, their order, their state, and their place in a job's key."""

import os
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from pydantic import Field

from components.config import RecipeError, UserError
from components.config.federation import POSTPROCESSORS
from components.config.privacy import LabelPrivacy
from components.federation.clients.worker import finished_update, run_job
from components.federation.commits import Commits
from components.federation.postprocessing import (
    PostProcessor,
    Processed,
    origin_of,
    processing_key,
)
from components.federation.protocol import ClientResult, MeasureJob, TrainJob
from components.federation.server import Server
from components.models.store import AdapterStore
from components.recipes import load_recipe
from components.results import Metrics
from tests.support.bare_loop import open_loop, prepare_rewards
from tests.support.bound_methods import TENSOR, bind, bind_method, make_update, small_federation
from tests.support.registries import TRAINED_METHODS


class AddAtBothEnds(PostProcessor):
    """Adds a number at the client, and subtracts it at the server."""

    kind: Literal["add"] = "add"
    amount: float = Field(1.0, description="What is added.")

    def at_client(self, result, context):
        if result.tensors is None:
            return result
        return replace(result, tensors={n: t + self.amount for n, t in result.tensors.items()})

    def at_server(self, combined, context, state):
        return Processed({name: tensor - self.amount for name, tensor in combined.items()})


class HalveMovement(PostProcessor):
    """Halves a movement from its origin, at the client and at the server."""

    kind: Literal["halve"] = "halve"

    def at_client(self, result, context):
        if result.tensors is None:
            return result
        return replace(result, tensors=halve(result.tensors, context.origin))

    def at_server(self, combined, context, state):
        return Processed(halve(combined, context.origin))


class ClipAndRecord(PostProcessor):
    """Clips each client's movement and the server's, and records what it sees at both ends."""

    kind: Literal["clip"] = "clip"
    bound: float = Field(1e-3, description="Largest norm of a movement.")

    def at_client(self, result, context):
        seen = {
            "participants": len(context.participants),
            "weight": context.weight,
            "losses": len(result.losses),
            "rows": result.rows,
            "steps": result.metrics.scalars.get("steps", 0.0),
        }
        metrics = result.metrics.merged(Metrics(scalars={f"clip/{name}": n for name, n in seen.items()}))
        clipped = result.tensors and clip(result.tensors, context.origin, self.bound)
        return replace(result, tensors=clipped, metrics=metrics)

    def at_server(self, combined, context, state):
        calls = (state or {"calls": 0})["calls"] + 1
        norm = distance(combined, context.origin)
        return Processed(
            clip(combined, context.origin, self.bound),
            {"calls": calls, "adapter_name": context.adapter_name},
            {"norm": norm, "contributions": len(context.participants)},
        )


def halve(tensors, origin):
    return {name: origin[name] + (tensor - origin[name]) / 2 for name, tensor in tensors.items()}


def distance(tensors, origin):
    return float(sum((tensor - origin[name]).pow(2).sum() for name, tensor in tensors.items()) ** 0.5)


def clip(tensors, origin, bound):
    factor = min(1.0, bound / max(distance(tensors, origin), 1e-30))
    return {name: origin[name] + factor * (tensor - origin[name]) for name, tensor in tensors.items()}


@pytest.fixture
def registered(monkeypatch):
    """The post-processors are registered, as those of an installed package are."""
    classes = {"add": AddAtBothEnds, "halve": HalveMovement, "clip": ClipAndRecord, "tuple": TupleState}
    names = {kind: f"{__name__}:{cls.__name__}" for kind, cls in classes.items()}
    monkeypatch.setattr(POSTPROCESSORS, "builtin", names)


def tensors(value):
    return {"a": torch.tensor([value])}


@pytest.fixture
def job(contexts):
    return TrainJob(client="ada", round=0, seed=1, adapters=(contexts.adapters.put(tensors(10.0)),))


# --- their order, and the key


class FixedTrainer:
    """Sends the same result for each job, and counts the jobs."""

    def __init__(self, **result):
        self.result = result or {"tensors": tensors(14.0)}
        self.jobs = []

    def run(self, job, context):
        self.jobs.append(job)
        return ClientResult(**self.result)


def process_at_server(tmp_path, processors, times=1):
    """What the server makes of a combined value of 14 that starts from 10, and the server."""
    config = load_recipe("debug", [f"federation.postprocessors=[{processors}]"]).federation
    store = AdapterStore(tmp_path / "adapters")
    state = bind_method(store, "feddpo", 1).start(small_federation(store, {"ada": 1}, [10.0], 1), 0)
    server = Server(config, store)
    for _ in range(times):
        processed = server.process(state, tensors(14.0), tensors(10.0), "policy", ["ada"])
    return processed["a"].item(), server


def with_processors(recipe, postprocessors):
    """A recipe with these post-processors."""
    federation = recipe.federation.model_copy(update={"postprocessors": list(postprocessors)})
    return recipe.model_copy(update={"federation": federation})


@pytest.mark.parametrize(
    ("postprocessors", "sent"),
    [
        ([AddAtBothEnds(amount=2), HalveMovement()], 13.0),
        ([HalveMovement(), AddAtBothEnds(amount=2)], 14.0),
        ([], 14.0),
    ],
)
def test_at_the_client_post_processors_are_applied_in_their_order(job, contexts, postprocessors, sent, debug):
    update = run_job(job, FixedTrainer(), contexts, with_processors(debug, postprocessors))
    assert contexts.adapters.get(update.adapter)["a"].item() == sent
    stored = {path.stem for path in contexts.adapters.root.glob("*.safetensors")}
    assert stored == {job.adapter, update.adapter}, "no other form of the update is stored"


@pytest.mark.parametrize(
    ("processors", "expected"),
    [("{kind: add, amount: 2}, halve", 10.0), ("halve, {kind: add, amount: 2}", 11.0), ("", 14.0)],
)
def test_at_the_server_post_processors_are_applied_in_reverse_order(
    registered, tmp_path, processors, expected
):
    assert process_at_server(tmp_path, processors)[0] == expected


def key_of(recipe, postprocessors):
    return processing_key(with_processors(recipe, postprocessors).federation)


def test_the_key_depends_on_kind_settings_and_order(debug):
    add, halve = AddAtBothEnds(), HalveMovement()
    chains = [[add], [AddAtBothEnds(amount=2)], [halve], [add, halve], [halve, add], []]
    assert len({key_of(debug, chain) for chain in chains}) == 6
    assert key_of(debug, []) == ""
    assert key_of(debug, [AddAtBothEnds(amount=1.0)]) == key_of(debug, [AddAtBothEnds()])
    private = debug.federation.model_copy(update={"privacy": LabelPrivacy(epsilon=1)})
    assert processing_key(private) != processing_key(debug.federation)


def test_a_repeated_job_never_returns_an_update_that_was_made_without_its_post_processors(
    job, contexts, debug
):
    trainer = FixedTrainer()
    run_job(job, trainer, contexts, debug)
    protected = job.model_copy(update={"processing": key_of(debug, [HalveMovement()])})
    assert protected.key() != job.key()
    assert finished_update(protected, contexts.adapters) is None
    update = run_job(protected, trainer, contexts, with_processors(debug, [HalveMovement()]))
    assert contexts.adapters.get(update.adapter)["a"].item() == 12.0
    assert len(trainer.jobs) == 2


class Rounding(PostProcessor):
    """Rounds the votes of a measurement."""

    kind: Literal["rounding"] = "rounding"

    def at_client(self, result, context):
        return replace(result, output={"votes": round(result.output["votes"])})


class Careless(PostProcessor):
    """Builds a result without its output."""

    kind: Literal["careless"] = "careless"

    def at_client(self, result, context):
        return ClientResult(rows=result.rows)


MEASURING = FixedTrainer(rows=2, output={"votes": 1.5})


@pytest.fixture
def measurement(job):
    return MeasureJob(client="ada", round=0, seed=0, adapters=(job.adapter,), split="test")


def test_a_post_processor_sees_what_a_client_measures(measurement, contexts, debug):
    processors = [HalveMovement(), ClipAndRecord(), Rounding()]
    update = run_job(measurement, MEASURING, contexts, with_processors(debug, processors))
    assert update.output == {"votes": 2}
    assert update.adapter is None
    assert update.metrics.scalars["clip/rows"] == 2


def test_a_post_processor_that_drops_an_output_is_refused_by_its_kind(measurement, contexts, debug):
    with pytest.raises(UserError, match=r"'careless' adds or drops the output .*'measure'"):
        run_job(measurement, MEASURING, contexts, with_processors(debug, [Careless()]))


class WithoutTraffic(PostProcessor):
    """Builds a result of its own, and says who it is at."""

    kind: Literal["bare"] = "bare"

    def at_client(self, result, context):
        seen = {"seed": float(context.seed), context.client: 1.0}
        return ClientResult(tensors=result.tensors, metrics=Metrics(scalars=seen))


def test_a_post_processor_knows_its_client_and_a_seed_and_cannot_hide_what_the_client_keeps(
    job, contexts, debug
):
    keeping = FixedTrainer(tensors=tensors(14.0), kept_bytes=8)
    other = job.model_copy(update={"client": "bea", "seed": 2})
    ada, bea = (
        run_job(each, keeping, contexts, with_processors(debug, [WithoutTraffic()])) for each in (job, other)
    )
    assert ada.metrics.scalars["ada"] == bea.metrics.scalars["bea"] == 1
    assert ada.metrics.scalars["seed"] != bea.metrics.scalars["seed"]
    assert ada.traffic.kept == bea.traffic.kept == 8


class TupleState(PostProcessor):
    """Returns a state that JSON changes, and a number."""

    kind: Literal["tuple"] = "tuple"
    amount: float = Field(1.0, description="The number.")

    def at_server(self, combined, context, state):
        return Processed(combined, {"calls": (*(state or {"calls": ()})["calls"], 1)}, {"x": self.amount})


def test_the_state_is_what_is_committed_and_two_of_a_kind_have_names_of_their_own(registered, tmp_path):
    _, server = process_at_server(tmp_path, "tuple, {kind: tuple, amount: 2}", times=2)
    assert server.processing == [{"calls": [1, 1]}, {"calls": [1, 1]}]
    assert server.metrics == {"policy/tuple-1/x": 1.0, "policy/tuple-2/x": 2.0}


def test_who_takes_part_does_not_change_a_jobs_key(job):
    assert job.model_copy(update={"participants": ("ada", "bea"), "weight": 0.5}).key() == job.key()


def test_tensors_that_are_no_adapter_start_from_zero():
    origin = origin_of({"a": torch.tensor([1.0]), "vowels/a": torch.tensor([5.0])}, tensors(3.0))
    assert {name: tensor.tolist() for name, tensor in origin.items()} == {"a": [3.0], "vowels/a": [0.0]}


# --- recipes


def test_tensors_that_count_are_sent_and_combined_as_they_are(registered, job, contexts, tmp_path, debug):
    """FedNova's numbers of steps would dominate the norm of an update."""
    sent = tensors(14.0) | {"count/steps": torch.tensor([100.0])}
    update = run_job(
        job, FixedTrainer(tensors=sent), contexts, with_processors(debug, [ClipAndRecord(bound=1.0)])
    )
    assert {name: tensor.item() for name, tensor in contexts.adapters.get(update.adapter).items()} == {
        "a": 11.0,
        "count/steps": 100.0,
    }
    config = load_recipe("debug", ["federation.postprocessors=[{kind: clip, bound: 1.0}]"]).federation
    store = AdapterStore(tmp_path / "adapters")
    state = bind_method(store, "feddpo", 1).start(small_federation(store, {"ada": 1}, [10.0], 1), 0)
    combined = Server(config, store).process(state, sent, tensors(10.0), "policy", ["ada"])
    assert {name: tensor.item() for name, tensor in combined.items()} == {"a": 11.0, "count/steps": 100.0}


def test_fedopt_post_processes_the_clients_mean_and_not_its_scaled_sum(registered, tmp_path):
    """By the paper's weights a sum of two of four clients is no mean; no client has moved."""
    store = AdapterStore(tmp_path / "adapters")
    pairs = {"ada": 5, "bea": 3, "cyd": 1, "dan": 1}
    settings = ["federation.method=fedopt", "federation.options={aggregator: paper}"]
    processed = [*settings, "federation.postprocessors=[{kind: halve}]"]
    bound = bind(load_recipe("debug", processed).federation, store)
    state = bound.start(small_federation(store, pairs, [10.0], 2), 0)
    jobs = bound.plan(state)
    state = bound.aggregate(
        state, [make_update(job, store.put({TENSOR: torch.tensor([10.0])})) for job in jobs]
    )
    assert state.metrics.scalars["weight_sum"] != 1.0
    assert state.metrics.scalars["mean_movement"] == 0.0


def test_a_recipe_names_post_processors_by_kind(registered):
    config = load_recipe("debug", ["federation.postprocessors=[halve, {kind: add, amount: 3.0}]"]).federation
    assert config.postprocessors == [HalveMovement(), AddAtBothEnds(amount=3.0)]


def test_an_unknown_post_processor_is_refused_with_the_nearest_name(registered):
    with pytest.raises(RecipeError, match=r"federation\.postprocessors\[0\].*'halv'.*'halve'"):
        load_recipe("debug", ["federation.postprocessors=[halv]"])


def test_the_package_has_no_post_processors_and_says_so():
    with pytest.raises(RecipeError, match=r"federation\.postprocessors\[0\].*none"):
        load_recipe("debug", ["federation.postprocessors=[{amount: 1}]"])


# --- every method

REWARDS = (
    "rewards={long: {kind: function, name: 'tests.support.reward_functions:score_length'},"
    " vowels: {kind: function, name: 'tests.support.reward_functions:score_vowels'}}"
)
OBJECTIVES = [
    "federation.options={objectives: {long: [long], vowels: [vowels]}, ppo: {minibatch: 2}}",
    REWARDS,
    "federation.batch_size=4",
    "policy.max_new_tokens=8",
    "policy.lora={r: 2, alpha: 4, dropout: 0.0}",
]
SMALL = [
    "federation.rounds=1",
    "federation.clients_per_round=2",
    "federation.local_steps=1",
    "federation.batch_size=2",
]
SGD = "federation.optimizer={name: sgd, lr: 0.1, clip: null}"
OVERRIDES: dict[str, list[str]] = {
    "fedbiscuit": ["federation.options={selectors: 3, warmup_rounds: 1}", "federation.rounds=4"],
    "fedper": ["federation.options={shared_layers: 1}", "federation.local_steps=2"],
    "fedrep": ["federation.local_steps=2"],
    "fedpdpo": ["federation.local_steps=2"],
    "perfedavg": ["federation.options={inner_steps: 1}", "federation.local_steps=2"],
    "firm": OBJECTIVES,
    "fedcmoo": OBJECTIVES,
    "fednova": [SGD],
    "scaffold": [SGD],
}


def run_once(method: str, prepared: Any, folder: Any, *overrides: str) -> Any:
    """A round of a method (of FedBiscuit, its warm-up, a grouping, and a clustered round)."""
    settings = [f"federation.method={method}", *SMALL, *OVERRIDES.get(method, []), *overrides]
    recipe = load_recipe("debug", settings)
    prepare_rewards(recipe, prepared, folder, folder / "judges")
    loop = open_loop(recipe, prepared, folder)
    return loop, loop.run()


def test_every_job_of_a_run_carries_the_settings_of_the_post_processors(
    registered, prepared, tmp_path, monkeypatch
):
    monkeypatch.setattr(Commits, "discard", lambda self, jobs=(), keep_every=1: None)
    plain, _ = run_once("feddpo", prepared, tmp_path / "plain")
    protected, _ = run_once("feddpo", prepared, tmp_path / "protected", "federation.postprocessors=[halve]")
    first, second = (set(os.listdir(loop.commits.folder / "updates")) for loop in (plain, protected))
    assert len(first) == len(second) == 2
    assert not first & second


@pytest.mark.parametrize("method", TRAINED_METHODS)
def test_every_method_is_clipped_and_recorded_at_both_ends(method, registered, prepared, tmp_path):
    loop, state = run_once(method, prepared, tmp_path, "federation.postprocessors=[clip]")
    shares = loop.federation.weights
    for record in loop.records:
        for name, client in record.clients.items():
            scalars = client.metrics.scalars
            assert scalars["clip/participants"] == len(record.clients)
            assert scalars["clip/weight"] == pytest.approx(shares[name])
            assert scalars["clip/rows"] == client.rows
            assert scalars["clip/losses"] == len(client.losses)
            assert scalars["clip/steps"] == scalars.get("steps", 0.0)
        combined = {name for name in record.server.scalars if name.endswith("/clip/norm")}
        assert bool(combined) == (record.phase != "grouping")
        for name in combined:
            assert record.server.scalars[name] < 1.01e-3 * len(record.clients)
            contributions = record.server.scalars[name.replace("norm", "contributions")]
            assert 1 <= contributions <= len(record.clients)
    (kept,) = state.processing
    assert kept["calls"] == sum(
        name.endswith("/clip/norm") for record in loop.records for name in record.server.scalars
    )
    assert loop.latest_state() == state, "the state of a post-processor is committed"


@pytest.mark.parametrize("method", ["feddpo", "fedbis", "fedopt", "fedcda", "fedamp", "drift", "fedbiscuit"])
def test_every_method_applies_post_processors_to_what_it_combines(method, registered, prepared, tmp_path):
    """Where `at_server` is not applied, adapters have the number that the clients have added."""
    overrides = ["federation.postprocessors=[{kind: add, amount: 1000.0}]"]
    loop, state = run_once(method, prepared, tmp_path, *overrides)
    sent = {digest for job in loop.bound.plan(state.end_round({}, {})) for digest in job.received}
    for digest in sent:
        adapter = loop.commits.store.get(digest)
        assert max(tensor.abs().max().item() for tensor in adapter.values()) < 500
