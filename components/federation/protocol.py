"""The protocol of a federated method, and the values that go to clients and come back.

A method is a value with pure functions:

    state   = strategy.init(federation, seed)
    jobs    = strategy.plan(state)                 # who works, on which adapters, with which seed
    state   = strategy.aggregate(state, updates)   # immutable in, new state out
    outcome = strategy.outcome(state)              # what the rounds end with

A round may have several steps (score all clients, then train some): `aggregate` moves `state.phase`
within a round, and `state.round` when the round is complete. Each step is committed. Jobs and
updates name adapters by their hashes, and carry small values, never tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar

from pydantic import Field, SerializeAsAny

from components.config import (
    DpoObjective,
    FederationConfig,
    LocalObjective,
    MethodOptions,
    OfflinePpoObjective,
    PairPpoObjective,
    PdpoObjective,
    PersonalModules,
    Recipe,
    RecipeError,
    UserError,
)
from components.models.store import AdapterHash, AdapterStore
from components.results import ClientRecord, Metrics, OutcomeRecord, Result

if TYPE_CHECKING:
    from components.federation.personalization import StepLength
    from components.models.store import Adapter


class FederationError(UserError, RuntimeError):
    """A round that cannot be completed."""


class Client(Result):
    """What the server knows of a client."""

    name: str
    training_pairs: int  # n_m
    validation_pairs: int
    weight: float  # p_m of FedBiscuit eq. 1, its share of all training pairs


class Federation(Result):
    """The participating clients, sorted by name, and the adapter that all of them start from."""

    clients: tuple[Client, ...]
    initial: AdapterHash

    @property
    def names(self) -> list[str]:
        """Names of the clients, sorted."""
        return [client.name for client in self.clients]

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each client; the weights sum to one."""
        return {client.name: client.weight for client in self.clients}


def build_federation(
    clients: Mapping[str, Mapping[str, int]], initial: AdapterHash, clients_per_round: int
) -> Federation:
    """The federation of a prepared data set. Clients without training pairs do not participate.

    Args:
        clients: number of rows by split, by client.
        initial: the adapter that all clients start from.
        clients_per_round: clients sampled in each round.

    Raises:
        RecipeError: a round samples more clients than participate.
    """
    active = {name: splits for name, splits in sorted(clients.items()) if splits["train"] > 0}
    check_participants(len(active), clients_per_round)
    total = sum(splits["train"] for splits in active.values())
    members = (
        Client(
            name=name,
            training_pairs=splits["train"],
            validation_pairs=splits["validation"],
            weight=splits["train"] / total,
        )
        for name, splits in active.items()
    )
    return Federation(clients=tuple(members), initial=initial)


def check_participants(clients: int, clients_per_round: int) -> None:
    """Refuse rounds that sample more clients than have training pairs.

    Raises:
        RecipeError: naming both numbers, and the key.
    """
    if clients_per_round > clients:
        raise RecipeError(
            f"federation.clients_per_round is {clients_per_round}, but only {clients} clients of the"
            f" data set have training pairs: use at most {clients}."
        )


class Memory(Result):
    """A method's memory from one step to the next, beside the server's adapters."""

    # Key of each client's last accepted job, for methods whose clients keep state; else empty.
    job_keys: dict[str, str] = Field(default_factory=dict)


M = TypeVar("M", bound=Memory)


class ServerState(Result, Generic[M]):
    """What the server knows between two steps. All of it is committed."""

    round: int  # complete rounds
    phase: str  # the next step within the round; 'train' for methods with one step per round
    step: int  # complete steps, over all rounds and phases
    seed: int  # of the run
    clients: tuple[Client, ...]  # see Federation
    initial: AdapterHash
    adapters: dict[str, AdapterHash]  # by name: 'selector', 'policy', a client's name, ...
    memory: SerializeAsAny[M]
    metrics: Metrics = Field(default_factory=Metrics)  # of the last step
    logged_at: int = 0  # round at which these metrics are logged

    @classmethod
    def start(
        cls,
        federation: Federation,
        seed: int,
        adapters: dict[str, AdapterHash],
        memory: M,
        phase: str = "train",
    ) -> Self:
        """The state before the first step."""
        return cls(
            round=0,
            phase=phase,
            step=0,
            seed=seed,
            clients=federation.clients,
            initial=federation.initial,
            adapters=adapters,
            memory=memory,
        )

    @property
    def federation(self) -> Federation:
        """The participating clients, and the adapter that all of them start from."""
        return Federation(clients=self.clients, initial=self.initial)

    def end_round(
        self, adapters: dict[str, AdapterHash], memory: M, metrics: Metrics, phase: str = "train"
    ) -> Self:
        """The state after the last step of a round; `phase` is the first step of the next one."""
        ended = self.within_round(phase, memory, metrics, logged_at=self.round + 1)
        return ended.model_copy(update={"round": self.round + 1, "adapters": adapters})

    def with_metrics(self, metrics: Metrics) -> Self:
        """The same state with more metrics."""
        return self.model_copy(update={"metrics": self.metrics.merged(metrics)})

    def within_round(self, phase: str, memory: M, metrics: Metrics, logged_at: int) -> Self:
        """The state after a step that does not end the round; `phase` is the next step."""
        changes = {
            "step": self.step + 1,
            "phase": phase,
            "memory": memory,
            "metrics": metrics,
            "logged_at": logged_at,
        }
        return self.model_copy(update=changes)


class Job(Result, ABC):
    """One client's work in one step. Adapters are named by their hashes."""

    kind: str
    client: str
    round: int  # index of the round that the job belongs to
    seed: int  # all random choices of the client are functions of it
    slot: str = ""  # name of the server's adapter that the job is about; empty for several
    processing: str = ""  # settings of the update's post-processors; empty without any

    @property
    @abstractmethod
    def received(self) -> tuple[AdapterHash, ...]:
        """The adapters that the client is sent."""

    def key(self) -> str:
        """Hash of what determines the result."""
        content = self.model_dump()
        content |= {name: self.received for name in ("adapter", "adapters") if name in content}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


class AdapterJob(Job, ABC):
    """A job on one adapter."""

    adapter: AdapterHash

    @property
    def received(self) -> tuple[AdapterHash, ...]:
        return (self.adapter,)


class TrainJob(AdapterJob):
    """Train an adapter and send it back."""

    kind: Literal["train"] = "train"
    # Key of the client's last accepted job, from whose private state it continues; empty before the
    # first one, and for clients without private state.
    previous_job_key: str = ""
    # Weights of the objectives, in their order, where the server sets them.
    objective_weights: tuple[float, ...] = ()


class GradientJob(AdapterJob):
    """Send the gradient of each objective at an adapter back."""

    kind: Literal["gradients"] = "gradients"
    previous_job_key: str = ""  # as of TrainJob


class ScoreJob(Job):
    """Send the mean validation loss of each adapter back."""

    kind: Literal["score"] = "score"
    adapters: tuple[AdapterHash, ...]

    @property
    def received(self) -> tuple[AdapterHash, ...]:
        return self.adapters


class MeasureJob(AdapterJob):
    """Measure an adapter on the server's held-out prompts. No client is involved: `client` is empty."""

    kind: Literal["measure"] = "measure"
    name: str  # of the measure


class Update(ClientRecord):
    """A client's answer to a job: what it did, and the adapter that it sends."""

    job: str  # key of the job
    client: str
    adapter: AdapterHash | None = None  # or the gradients as tensors of one file; None for a score job


@dataclass(frozen=True)
class Failure:
    """A client without an update, and the reason."""

    client: str
    reason: str


class Strategy(Protocol[M]):
    """A federated method. Its functions are pure, up to the content-addressed store of adapters.

    A method derives from this protocol, and overrides `update_template` and `measure` where its
    updates are no adapters, or something is measured beside accuracy.

    Attributes:
        memory_type: type of the method's memory.
    """

    memory_type: type[M]

    def init(self, federation: Federation, seed: int) -> ServerState[M]:
        """The state before the first step.

        Raises:
            RecipeError: the method cannot run with these clients.
        """
        ...

    def warnings(self, federation: Federation, seed: int) -> Sequence[str]:
        """What users should know of the planned rounds with these clients, a sentence each: nothing."""
        return []

    def plan(self, state: ServerState[M]) -> Sequence[Job]:
        """The jobs of the next step."""
        ...

    def update_template(self, state: ServerState[M], adapter: Adapter) -> Adapter:
        """Tensors with the names and shapes of the next step's updates: those of an adapter.

        `adapter` is one of the server's.
        """
        return adapter

    def aggregate(self, state: ServerState[M], updates: Sequence[Update]) -> ServerState[M]:
        """The state after a step with these accepted updates."""
        ...

    def measure(self, state: ServerState[M]) -> Sequence[MeasureJob]:
        """What is measured between rounds beside accuracy on pairs: nothing."""
        return []

    def outcome(self, state: ServerState[M]) -> OutcomeRecord:
        """What the rounds end with, or would end with after this step."""
        ...


class Method(MethodOptions, ABC):
    """Options of a federated method, which build its strategy; the base of each method's `Options`.

    Attributes:
        diagnostics: names of the method's diagnostics (components/evaluation/diagnostics).
        scores_completions: whether the recipe's rewards score completions in the rounds; otherwise
            they score the clients' pairs before the first round.
        prepared_files: files of the prepared data that the rounds depend on (components/data/records).
        frozen_factors: the LoRA factors, of 'A' and 'B', that the clients do not train.
        decays_rates: whether federation.rate_decay can apply. The strategy then keeps the job keys of
            the clients (`accepted_job_keys`).
    """

    diagnostics: ClassVar[tuple[str, ...]] = ()
    scores_completions: ClassVar[bool] = False
    prepared_files: ClassVar[tuple[str, ...]] = ("pairs.parquet",)
    frozen_factors: ClassVar[tuple[Literal["A", "B"], ...]] = ()
    decays_rates: ClassVar[bool] = False

    def check(self, recipe: Recipe) -> None:
        """Refuse unused rewards, PPO on pairs without its one reward, and a decay that cannot apply.

        Raises:
            RecipeError: naming the rewards or the decay.
        """
        self._check_rate_decay(recipe.federation)
        if isinstance(self.local_objective, PairPpoObjective):
            if len(recipe.rewards) != 1:
                raise RecipeError(
                    "federation.options.objective 'ppo' needs one reward model, but rewards names"
                    f" {len(recipe.rewards) or 'none'}: give a section such as rewards:"
                    f" {{preference: {{kind: judge}}}}."
                )
        elif recipe.rewards:
            raise RecipeError(
                f"rewards names {', '.join(recipe.rewards)}, which federation.method"
                f" '{recipe.federation.method}' does not use: leave the section out, or set"
                " federation.options.objective to 'ppo'."
            )

    def _check_rate_decay(self, config: FederationConfig) -> None:
        by_dpo = isinstance(self.local_objective, DpoObjective | PdpoObjective)
        if config.rate_decay is not None and not (self.decays_rates and by_dpo):
            by_ppo = " with objective 'ppo'" if isinstance(self.local_objective, PairPpoObjective) else ""
            raise RecipeError(
                "federation.rate_decay follows the DPO loss of the clients, which federation.method"
                f" '{config.method}'{by_ppo} does not have or does not keep: set it to null."
            )

    def learning_rate(self, config: FederationConfig) -> float:
        """Learning rate of the clients' shared adapter."""
        return config.optimizer.lr

    def gradient_evaluations(self, config: FederationConfig, rows: int) -> int:
        """Gradient evaluations (one minibatch forward and backward) of a client in a round.

        Every method that trains on rows takes exactly as many, however it divides them: among private
        and shared modules (FedPDPO, FedRep), or among inner and outer steps (Per-FedAvg). FedPer's
        gradients are of both kinds of modules at once. PPO on pairs passes over all pairs of the
        client `epochs` times; a target KL may end it earlier.

        Args:
            config: the rounds.
            rows: number of training rows of the client.
        """
        objective = self.local_objective
        if isinstance(objective, PairPpoObjective):
            return objective.epochs * math.ceil(rows / objective.minibatch)
        return config.local_steps_for(rows) * config.optimizer.accumulation

    @property
    @abstractmethod
    def local_objective(self) -> LocalObjective:
        """What the clients minimize."""

    @property
    def proximal_weight(self) -> float:
        """Weight of the proximal term, which the trainers 'policy' and 'selector' add; 0 for none."""
        return 0.0

    @property
    def personal_modules(self) -> PersonalModules | None:
        """The modules that a client keeps to itself; None without any."""
        return None

    @property
    def personal_lr(self) -> float:
        """Learning rate of the private modules, if there are any."""
        return 0.0

    @property
    def personal_step(self) -> StepLength | None:
        """The personal step; None where private and shared modules are trained at once."""
        return None

    def keeps_client_state(self, config: FederationConfig) -> bool:
        """Whether clients keep state beside private modules: a critic, or a decay of their rates."""
        objective = self.local_objective
        has_critic = isinstance(objective, OfflinePpoObjective) and objective.critic is not None
        return has_critic or config.rate_decay is not None

    @property
    def sampling_temperature(self) -> float:
        """Temperature at which the policy is trained, and its KL to the reference is measured."""
        return 1.0

    def measure_fingerprint(self, recipe: Recipe) -> str:
        """What measures of the base policy depend on beside seed, data and policy, as text.

        It is empty for methods without measures.
        """
        return ""

    def preferences(self) -> dict[str, float]:
        """How much each of several objectives is preferred; empty for methods with one."""
        return {}

    @abstractmethod
    def build(self, config: FederationConfig, store: AdapterStore) -> Strategy[Any]:
        """The strategy over a store of adapters.

        Raises:
            RecipeError: the rounds and the options do not fit.
        """


class RatedMethod(Method):
    """Options of a method whose clients train on pairs, with a learning rate of the method's own."""

    decays_rates: ClassVar[bool] = True

    lr: float | None = Field(
        None,
        gt=0,
        description="Learning rate of the clients' shared adapter; null: federation.optimizer.lr.",
    )

    def learning_rate(self, config: FederationConfig) -> float:
        """The method's own learning rate, or the optimizer's."""
        return config.optimizer.lr if self.lr is None else self.lr


def method_of(config: FederationConfig) -> Method:
    """The method of a recipe, as its options.

    Raises:
        RecipeError: the registered options do not build a strategy.
    """
    if not isinstance(config.options, Method):
        raise RecipeError(
            f"federation.method '{config.method}' registers {type(config.options).__name__}, which is no"
            " components.federation.protocol.Method: derive the method's options from that class."
        )
    return config.options


def by_client(updates: Sequence[Update]) -> list[Update]:
    """Updates in the order of the clients' names, in which sums are taken."""
    return sorted(updates, key=lambda update: update.client)


def sent_adapters(updates: Sequence[Update]) -> dict[str, AdapterHash]:
    """The adapter that each client has sent, in the order of the clients' names."""
    adapters = {}
    for update in by_client(updates):
        if update.adapter is None:
            raise TypeError(f"the update of client {update.client} has no adapter")
        adapters[update.client] = update.adapter
    return adapters


def accepted_job_keys(memory: Memory, updates: Sequence[Update], stateful: bool) -> dict[str, str]:
    """The job keys of a memory after these updates were accepted.

    Args:
        memory: before them.
        updates: of training jobs.
        stateful: whether clients keep state; otherwise the keys are not needed, and none is kept.
    """
    if not stateful:
        return memory.job_keys
    return memory.job_keys | {update.client: update.job for update in updates}
