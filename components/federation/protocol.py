"""The protocol of a federated method, and the values that go to clients and come back.

A method is a value with pure functions:

    state   = strategy.init(federation, seed)
    jobs    = strategy.plan(state)                 # who works, on which adapters, with which seed
    state   = strategy.aggregate(state, updates)   # immutable in, new state out
    outcome = strategy.outcome(state)              # what the rounds end with

A round may have several steps (score all clients, then train some): `aggregate` moves `state.phase`
within a round, and `state.round` when the round is complete. Each step is committed. Jobs and
updates carry references to adapters and small values, never tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

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
from components.models.adapters import AdapterRef, AdapterStore
from components.results import Metrics, OutcomeRecord, Traffic

if TYPE_CHECKING:
    from components.federation.personalization import StepLength
    from components.models.adapters import Adapter


class FederationError(UserError, RuntimeError):
    """A round that cannot be completed."""


@dataclass(frozen=True)
class Client:
    """What the server knows of a client.

    Attributes:
        name: its id.
        training_pairs: number of training pairs (n_m).
        validation_pairs: number of validation pairs.
        weight: p_m of FedBiscuit eq. 1, its share of all training pairs; the weights of a
            federation sum to one.
    """

    name: str
    training_pairs: int
    validation_pairs: int
    weight: float


@dataclass(frozen=True)
class Federation:
    """The participating clients, sorted by name, and the adapter that all of them start from."""

    clients: tuple[Client, ...]
    initial: AdapterRef

    @property
    def names(self) -> list[str]:
        """Names of the clients, sorted."""
        return [client.name for client in self.clients]

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each client."""
        return {client.name: client.weight for client in self.clients}


def build_federation(
    clients: Mapping[str, Mapping[str, int]], initial: AdapterRef, clients_per_round: int
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
        Client(name, splits["train"], splits["validation"], splits["train"] / total)
        for name, splits in active.items()
    )
    return Federation(tuple(members), initial)


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


class Memory(BaseModel):
    """A method's memory from one step to the next, beside the server's adapters; stored as JSON.

    Attributes:
        job_keys: key of each client's last accepted job, for methods whose clients keep state; else
            empty.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    job_keys: dict[str, str] = Field(default_factory=dict)


M = TypeVar("M", bound=Memory)


@dataclass(frozen=True)
class ServerState(Generic[M]):
    """What the server knows between two steps. All of it is committed.

    Attributes:
        round: number of complete rounds.
        phase: name of the next step within the round; 'train' for methods with one step per round.
        step: number of complete steps, over all rounds and phases.
        seed: seed of the run.
        federation: the participating clients.
        adapters: the server's adapters by name ('selector', 'policy', a client's name, ...).
        memory: what else the method remembers.
        metrics: numbers about the last step.
        logged_at: round at which these numbers are logged.
    """

    round: int
    phase: str
    step: int
    seed: int
    federation: Federation
    adapters: dict[str, AdapterRef]
    memory: M
    metrics: Metrics = field(default_factory=Metrics)
    logged_at: int = 0

    @classmethod
    def initial(
        cls,
        federation: Federation,
        seed: int,
        adapters: dict[str, AdapterRef],
        memory: M,
        phase: str = "train",
    ) -> Self:
        """The state before the first step."""
        return cls(0, phase, 0, seed, federation, adapters, memory)

    def end_round(
        self, adapters: dict[str, AdapterRef], memory: M, metrics: Metrics, phase: str = "train"
    ) -> ServerState[M]:
        """The state after the last step of a round; `phase` is the first step of the next one."""
        return replace(
            self,
            step=self.step + 1,
            round=self.round + 1,
            phase=phase,
            adapters=adapters,
            memory=memory,
            metrics=metrics,
            logged_at=self.round + 1,
        )

    def with_metrics(self, metrics: Metrics) -> ServerState[M]:
        """The same state with more metrics."""
        return replace(self, metrics=self.metrics.merged(metrics))

    def within_round(self, phase: str, memory: M, metrics: Metrics, logged_at: int) -> ServerState[M]:
        """The state after a step that does not end the round; `phase` is the next step."""
        return replace(
            self, step=self.step + 1, phase=phase, memory=memory, metrics=metrics, logged_at=logged_at
        )


@dataclass(frozen=True, kw_only=True)
class Job(ABC):
    """One client's work in one step.

    Attributes:
        client: name of the client.
        round: index of the round that the job belongs to.
        seed: all random choices of the client are functions of it.
        slot: name of the server's adapter that the job is about; empty where it is about several.
        processing: settings of the update's post-processors; empty without any.
    """

    client: str
    round: int
    seed: int
    slot: str = ""
    processing: str = ""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def sent_adapters(self) -> tuple[AdapterRef, ...]:
        """The adapters that the client is sent."""

    def key(self) -> str:
        """Hash of what determines the result; adapters count by content, not by path."""
        content = {"kind": self.kind} | asdict(self)
        content = {
            name: [ref.hash for ref in self.sent_adapters] if name in ("adapter", "adapters") else value
            for name, value in content.items()
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True, kw_only=True)
class TrainJob(Job):
    """Train an adapter and send it back.

    Attributes:
        adapter: where training starts.
        previous_job_key: key of the client's last accepted job, from whose private state it
            continues; empty before the first one, and for clients without private state.
        objective_weights: weights of the objectives, in their order, where the server sets them.
    """

    adapter: AdapterRef
    previous_job_key: str = ""
    objective_weights: tuple[float, ...] = ()

    kind: ClassVar[str] = "train"

    @property
    def sent_adapters(self) -> tuple[AdapterRef, ...]:
        return (self.adapter,)


@dataclass(frozen=True, kw_only=True)
class GradientJob(Job):
    """Send the gradient of each objective at an adapter back; attributes as of TrainJob."""

    adapter: AdapterRef
    previous_job_key: str = ""

    kind: ClassVar[str] = "gradients"

    @property
    def sent_adapters(self) -> tuple[AdapterRef, ...]:
        return (self.adapter,)


@dataclass(frozen=True, kw_only=True)
class ScoreJob(Job):
    """Send the mean validation loss of each adapter back.

    Attributes:
        adapters: the scored adapters.
    """

    adapters: tuple[AdapterRef, ...]

    kind: ClassVar[str] = "score"

    @property
    def sent_adapters(self) -> tuple[AdapterRef, ...]:
        return self.adapters


@dataclass(frozen=True, kw_only=True)
class MeasureJob(Job):
    """Measure an adapter on the server's held-out prompts.

    No client is involved, and `client` is empty.

    Attributes:
        name: name of the measure.
        adapter: the measured adapter.
    """

    name: str
    adapter: AdapterRef

    kind: ClassVar[str] = "measure"

    @property
    def sent_adapters(self) -> tuple[AdapterRef, ...]:
        return (self.adapter,)


@dataclass(frozen=True)
class Update:
    """A client's answer to a job.

    Attributes:
        job: the job.
        adapter: the trained adapter, or the gradients as tensors of one file; None for a score job.
        losses: mean validation loss of each adapter of a score job (NaN without validation pairs).
        rows: number of rows that the job could use.
        metrics: numbers of the work.
        traffic: bytes received, sent and kept.
    """

    job: Job
    adapter: AdapterRef | None
    losses: tuple[float, ...]
    rows: int
    metrics: Metrics
    traffic: Traffic


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
    return sorted(updates, key=lambda update: update.job.client)


def accepted_job_keys(memory: Memory, updates: Sequence[Update], stateful: bool) -> dict[str, str]:
    """The job keys of a memory after these updates were accepted.

    Args:
        memory: before them.
        updates: of training jobs.
        stateful: whether clients keep state; otherwise the keys are not needed, and none is kept.
    """
    if not stateful:
        return memory.job_keys
    return memory.job_keys | {update.job.client: update.job.key() for update in updates}


def required_adapter(update: Update) -> AdapterRef:
    """The adapter of an update that must have one."""
    if update.adapter is None:
        raise TypeError(f"the update of client {update.job.client} has no adapter")
    return update.adapter
