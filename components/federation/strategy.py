"""The protocol of a federated method, and the values that go to clients and come back.

A method is a value with three pure functions (DESIGN.md, 'The spine'):

    state = strategy.init(federation, seed)
    jobs  = strategy.plan(state, round)            # who does what, on which adapter, with which seed
    state = strategy.aggregate(state, updates)     # immutable in, new state out

A round of a method may take several steps (score all clients, then train some): `aggregate` moves `state.phase` on
within a round, and `state.round` when the round is done. Each step is committed. Jobs and updates carry references
to adapters and small values, never tensors.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from components.config import Explained, FederationConfig, Recipe, RecipeError, Section, unknown_name
from components.models.adapters import AdapterRef, AdapterStore

if TYPE_CHECKING:
    from components.models.adapters import Adapter

METHODS = {
    "drift": "components.federation.drift",
    "fedamp": "components.federation.fedamp",
    "fedavg": "components.federation.fedavg",
    "fedbis": "components.federation.fedbis",
    "fedbiscuit": "components.federation.fedbiscuit",
    "fedcda": "components.federation.fedcda",
    "fedcmoo": "components.federation.fedcmoo",
    "feddpo": "components.federation.feddpo",
    "fedopt": "components.federation.fedopt",
    "fedpdpo": "components.federation.fedpdpo",
    "fedper": "components.federation.fedper",
    "fedprox": "components.federation.fedprox",
    "fedrep": "components.federation.fedrep",
    "firm": "components.federation.firm",
    "perfedavg": "components.federation.perfedavg",
}
"""The file of each method. It has `Options` (a config.Section) and `build(config, options, store) -> Strategy`."""


class FederationError(Explained, RuntimeError):
    """A round that cannot be completed. The message is meant for the person who runs it."""


@dataclass(frozen=True)
class Client:
    """What the server knows of a client.

    Attributes:
        name: its id.
        examples: training pairs it holds (n_m).
        validation: validation pairs it holds.
        weight: p_m of eq. 1: its share of all training pairs; the weights of a federation sum to one.
    """

    name: str
    examples: int
    validation: int
    weight: float


@dataclass(frozen=True)
class Federation:
    """Who takes part, in the sorted order of names, and the adapter that everybody starts from."""

    clients: tuple[Client, ...]
    initial: AdapterRef

    @property
    def weights(self) -> dict[str, float]:
        return {client.name: client.weight for client in self.clients}


@dataclass(frozen=True)
class ServerState:
    """What the server knows between two steps; all of it is committed, so a resumed run knows the same.

    Attributes:
        round: rounds that are complete.
        phase: the step within the round that comes next; "train" for methods with one step a round.
        step: steps that are complete, over all rounds and phases; the number of the commit.
        seed: of the run.
        federation: who takes part.
        adapters: the server's adapters by name ("selector" or "selector-0", "policy", a client's name, ...).
        assigned: name of the adapter that a client uses by itself (that of its group, or its own), by client; empty
            where all clients use the same.
        memory: what else a method must remember (groups, losses, moments by reference); JSON values only.
        log: numbers about the last step, by name, for the metrics.
    """

    round: int
    phase: str
    step: int
    seed: int
    federation: Federation
    adapters: dict[str, AdapterRef]
    assigned: dict[str, str] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    log: dict[str, float] = field(default_factory=dict)

    def after(self, *, round_done: bool, phase: str = "train", **changes: Any) -> ServerState:
        """The state one step later."""
        return replace(self, step=self.step + 1, round=self.round + round_done, phase=phase, **changes)


@dataclass(frozen=True)
class Job:
    """One client's work in one step.

    Attributes:
        kind: 'train' (start from adapters[0], send the trained one back), 'score' (send the mean validation loss
            of each adapter back; the adapter is not changed) or 'gradients' (send the gradients of several objectives at adapters[0] back).
        client: who.
        round: the round it belongs to, for the record.
        slot: name of the server adapter it concerns, "" where it concerns several.
        adapters: what the client is sent.
        objective: what is trained or scored, see components/federation/clients.py.
        seed: the client's random choices are functions of it.
        before: key of the client's last job whose update was accepted, from which what it keeps to itself goes on; empty where there was none, and
            of methods whose clients keep nothing.
        weights: of the objectives, in their order, where the server asks for some.
    """

    kind: Literal["train", "score", "gradients"]
    client: str
    round: int
    slot: str
    adapters: tuple[AdapterRef, ...]
    objective: str
    seed: int
    before: str = ""
    weights: tuple[float, ...] = ()

    def key(self) -> str:
        """Hash of what determines the result (adapters by content, not by path)."""
        content = asdict(self) | {"adapters": [ref.hash for ref in self.adapters]}
        if not self.weights:
            del content["weights"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Update:
    """A client's answer to a job.

    Attributes:
        job: what was asked.
        adapter: the trained adapter of a 'train' job, the gradients of a 'gradients' job as tensors of one file, else None.
        losses: mean validation loss per adapter of a 'score' job (NaN: the client has no validation pairs).
        metrics: small numbers for the record, e.g. loss, tokens, seconds; of some methods lists of them.
    """

    job: Job
    adapter: AdapterRef | None
    losses: tuple[float, ...]
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """A client without an answer, and why."""

    client: str
    reason: str


class Strategy(Protocol):
    """A federated method; see the module's docstring. All three functions are pure up to the content-addressed store.

    Attributes:
        trains: the objective of its jobs, a key of LEARNERS in components/federation/clients.py. It says what the
            rounds end with: a selector, by which a policy is then aligned, or a policy.
        personal: whether each client ends with an adapter of its own, under its name, which nobody else uses.
        private: whether each client makes something of its own of the server's adapter, by what never leaves it: its parts of the model
            (components/federation/private.py), or its pairs.
    """

    trains: str
    personal: bool
    private: bool

    def init(self, federation: Federation, seed: int) -> ServerState: ...

    def plan(self, state: ServerState, round: int) -> list[Job]: ...

    def like(self, state: ServerState, adapter: Adapter) -> Adapter:
        """Tensors of the names and shapes that the answers to this step's jobs have; `adapter` is one of the adapters."""
        ...

    def aggregate(self, state: ServerState, updates: Sequence[Update]) -> ServerState: ...


def options_model(method: str, where: str) -> type[Section]:
    """The model of a method's options.

    Raises:
        RecipeError: there is no such method; names the nearest.
    """
    return _module(method, where).Options


def options_of(config: FederationConfig) -> Any:
    """The options of a recipe's method, as its own model has them."""
    return options_model(config.method, "recipe").model_validate(config.options)


def build_strategy(config: FederationConfig, store: AdapterStore) -> Strategy:
    """The method of a recipe, with its options, over an adapter store."""
    return _module(config.method, "recipe").build(config, options_of(config), store)


def federated_sections(recipe: Recipe) -> tuple[str, ...]:
    """The sections of a recipe that its rounds depend on, beside the seed and the pairs."""
    trains = build_strategy(recipe.federation, AdapterStore(Path())).trains
    judges = any(reward.kind == "judge" for reward in recipe.rewards.values())
    return ("selector" if trains == "selector" else "policy"), "federation", *(["rewards"] if recipe.rewards else []), *(["evaluation"] if judges else [])


def build_federation(clients: dict[str, dict], initial: AdapterRef, clients_per_round: int) -> Federation:
    """The federation of a prepared folder.

    Args:
        clients: rows per split by client id, as records.read_clients gives them; clients without training pairs
            take no part.
        initial: the adapter that everybody starts from.
        clients_per_round: checked against the number of clients.

    Raises:
        RecipeError: fewer clients than a round samples.
    """
    active = {name: counts for name, counts in sorted(clients.items()) if counts["train"] > 0}
    if clients_per_round > len(active):
        raise RecipeError(f"federation.clients_per_round is {clients_per_round}, but only {len(active)} of the data set's clients hold training pairs: use at most {len(active)}.")
    total = sum(counts["train"] for counts in active.values())
    return Federation(
        tuple(Client(name, counts["train"], counts["validation"], counts["train"] / total) for name, counts in active.items()), initial)


def _module(method: str, where: str) -> Any:
    if method not in METHODS:
        raise RecipeError(f"{where}: {unknown_name('federation.method', method, METHODS)}")
    return importlib.import_module(METHODS[method])


def screen(updates: Sequence[Update], store: AdapterStore, like: Adapter) -> tuple[list[Update], list[Failure]]:
    """Part updates into those that can be aggregated and those that are refused, in the order of the clients' names.

    An adapter with NaN or infinite values, another shape or dtype, or a missing or an extra tensor is refused, and
    the reason names the tensor.

    Args:
        updates: in any order.
        store: where their adapters are.
        like: an adapter of the right form.
    """
    from components.models.adapters import AdapterError, check_adapter

    accepted, refused = [], []
    for update in sorted(updates, key=lambda u: u.job.client):
        try:
            if update.adapter is not None:
                check_adapter(store.get(update.adapter), like)
            accepted.append(update)
        except AdapterError as error:
            refused.append(Failure(update.job.client, str(error)))
    return accepted, refused
