"""The values of a federation: its clients, the server's state, jobs for clients, and their answers.

Jobs and updates name adapters by their hashes, and carry small values, never tensors. All of these
are pydantic models, so that they can be stored and sent as JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, Literal, Self, TypeVar

from pydantic import Field, JsonValue, SerializeAsAny

from components.config import RecipeError
from components.models.store import AdapterHash
from components.results import ClientRecord, Metrics, Result

if TYPE_CHECKING:
    from components.models.generation import GenerationProgress
    from components.models.policy import Policy
    from components.models.samples import Completion
    from components.models.store import Adapter


COUNT = "count/"
"""Beginning of the names of tensors in an update that count something, and are no movement of an adapter."""


class Client(Result):
    """What the server knows of a client."""

    name: str
    training_pairs: int  # n_m
    validation_pairs: int
    weight: float  # p_m of FedBiscuit eq. 1, its share of all training pairs
    group: str | None = None  # of owners with the same taste, where the source knows it


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
    clients: Mapping[str, Mapping[str, int]],
    initial: AdapterHash,
    clients_per_round: int,
    groups: Mapping[str, str | None] = MappingProxyType({}),
    unseen: int = 0,
) -> Federation:
    """The federation of a prepared data set. Clients without training pairs do not participate.

    Args:
        clients: number of rows by split, by client.
        initial: the adapter that all clients start from.
        clients_per_round: clients sampled in each round.
        groups: of clients, where the source knows them.
        unseen: further clients of the data, which take part in no round.

    Raises:
        RecipeError: a round samples more clients than participate.
    """
    active = {name: splits for name, splits in sorted(clients.items()) if splits["train"] > 0}
    check_participants(len(active), clients_per_round, unseen)
    total = sum(splits["train"] for splits in active.values())
    members = (
        Client(
            name=name,
            training_pairs=splits["train"],
            validation_pairs=splits["validation"],
            weight=splits["train"] / total,
            group=groups.get(name),
        )
        for name, splits in active.items()
    )
    return Federation(clients=tuple(members), initial=initial)


def check_participants(clients: int, clients_per_round: int, unseen: int = 0) -> None:
    """Refuse rounds that sample more clients than have training pairs.

    Raises:
        RecipeError: naming both numbers, and the key.
    """
    besides = f", besides {unseen} that take part in no round (data.unseen_clients)" if unseen else ""
    if clients_per_round > clients:
        raise RecipeError(
            f"federation.clients_per_round is {clients_per_round}, but only {clients} clients of the"
            f" data set have training pairs{besides}: use at most {clients}."
        )


class Memory(Result):
    """A method's memory from one step to the next, beside the server's adapters."""

    # Key of the last accepted job of each client that keeps state; the round loop sets them.
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
    processing: list[JsonValue] = Field(default_factory=list)  # the state of each post-processor
    # Name of the noise of the last sum in the server's secret folder; empty without any.
    noise: str = Field("", exclude_if=lambda noise: not noise)

    @classmethod
    def start(
        cls,
        federation: Federation,
        seed: int,
        adapters: dict[str, AdapterHash],
        memory: M,
    ) -> Self:
        """The state before the first step."""
        return cls(
            round=0,
            phase="train",
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

    def shares(self, jobs: Sequence[Job]) -> dict[str, float]:
        """The share of all training pairs (p_m) of the client of each job."""
        weights = self.federation.weights
        return {job.client: weights[job.client] for job in jobs}

    def end_round(
        self,
        adapters: dict[str, AdapterHash],
        metrics: Mapping[str, float],
        memory: M | None = None,
        phase: str = "train",
    ) -> Self:
        """The state after the last step of a round.

        Args:
            adapters: those that the step has changed.
            metrics: scalars of the step.
            memory: None where it does not change.
            phase: the first step of the next round.
        """
        ended = self.within_round(phase, metrics, memory, logged_at=self.round + 1)
        return ended.model_copy(update={"round": self.round + 1, "adapters": self.adapters | adapters})

    def within_round(
        self, phase: str, metrics: Mapping[str, float], memory: M | None, logged_at: int
    ) -> Self:
        """The state after a step that does not end the round; `phase` is the next step."""
        changes = {
            "step": self.step + 1,
            "phase": phase,
            "memory": memory or self.memory,
            "metrics": Metrics(scalars=dict(metrics)),
            "logged_at": logged_at,
        }
        return self.model_copy(update=changes)


class Job(Result):
    """One client's work in one step, on adapters that it is sent; they are given by their hashes."""

    kind: str
    client: str
    round: int  # index of the round that the job belongs to
    seed: int  # all random choices of the client are functions of it
    adapter_name: str = ""  # of the server's adapter that the job is about; empty for several
    adapters: tuple[AdapterHash, ...]
    # Key of the client's last accepted job, from whose private state it continues; empty before the
    # first one, and for clients without private state.
    previous_job_key: str = ""
    # Set by the round loop, and used by post-processors only:
    processing: str = ""  # their settings; empty without any
    participants: tuple[str, ...] = ()  # the clients of the step
    weight: float = 0.0  # share of all training pairs that the client has

    @property
    def adapter(self) -> AdapterHash:
        """The only adapter."""
        (digest,) = self.adapters
        return digest

    @property
    def received(self) -> tuple[AdapterHash, ...]:
        """All that the client is sent by its hash."""
        return self.adapters

    @property
    def trainer(self) -> str:
        """The trainer that carries it out; empty: the method's."""
        return ""

    @property
    def is_step(self) -> bool:
        """Whether it belongs to a step of a round, and trains or scores for it."""
        return True

    @property
    def when(self) -> str:
        """When in a run it is carried out, in words."""
        return f"round {self.round + 1}" if self.is_step else f"after {self.round} rounds"

    def key(self) -> str:
        """Hash of what determines the result."""
        content = self.model_dump(exclude={"participants", "weight"})  # they follow from seed and round
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


class TrainJob(Job):
    """Train an adapter and send it back."""

    kind: Literal["train"] = "train"
    # Weights of the objectives, in their order, where the server sets them.
    objective_weights: tuple[float, ...] = ()
    # Further tensors that the client is sent by name, for the method's plug-in of the local step.
    attached: dict[str, AdapterHash] = Field(default_factory=dict)

    @property
    def received(self) -> tuple[AdapterHash, ...]:
        return (*self.adapters, *self.attached.values())


class GradientJob(Job):
    """Send the gradient of each objective at an adapter back."""

    kind: Literal["gradients"] = "gradients"


class MeasureJob(Job):
    """Measure a model on the client's own pairs.

    The model is that of the adapter and the client's private state. Several adapters, one of which may
    occur twice, are those of selectors, which vote. The output has counts and sums, see PairFigures; with
    `losses`, the mean loss of each adapter is sent in its place.
    """

    kind: Literal["measure"] = "measure"
    split: str
    losses: bool = False
    pairs: int | None = None  # of the client's of the split, which the client draws; None: all
    assigned: int | None = None  # index of the selector that the client uses; None if it uses none
    batch_size: int | None = None  # pairs per batch; None: that of the trainer
    is_aligned: bool = False  # whether the server has aligned the model, a policy, by DPO after the rounds

    @property
    def trainer(self) -> str:
        return "policy" if self.is_aligned else ""

    @property
    def is_step(self) -> bool:
        return self.losses


class Generation(Result):
    """Prompts that a policy answers, see Policy.generate."""

    prompts: tuple[str, ...]
    seed: int
    temperature: float = 0.0
    count: int = 1
    max_new_tokens: int | None = None  # None: policy.max_new_tokens

    def complete(
        self, policy: Policy, progress: GenerationProgress | None = None, part: Sequence[int] | None = None
    ) -> list[list[Completion]]:
        """`count` completions of each prompt, or of a part of them by their positions."""
        from components.models.samples import SampleKey

        part = range(len(self.prompts)) if part is None else part
        prompts = [self.prompts[n] for n in part]
        keys = [SampleKey(self.seed, n) for n in part]
        return policy.generate(prompts, keys, self.temperature, self.count, self.max_new_tokens, progress)


class GenerateJob(Job):
    """Let the client's policy answer prompts of the server, and send the completions back.

    With `kl`, KL(policy || backbone) on each generation's completions (nats) is sent in their place.
    """

    kind: Literal["generate"] = "generate"
    generations: tuple[Generation, ...]
    kl: bool = False

    @property
    def is_step(self) -> bool:
        return False

    @property
    def when(self) -> str:
        return "after the rounds"


class ScorePairsJob(Job):
    """Score the client's training pairs by a reward and keep the scores; the output has PairSums."""

    kind: Literal["score-pairs"] = "score-pairs"
    reward: str  # its name
    fingerprint: str  # of what its scores depend on beside the pairs
    adapters: tuple[AdapterHash, ...] = ()

    @property
    def trainer(self) -> str:
        return "rewards"

    @property
    def is_step(self) -> bool:
        return False

    @property
    def when(self) -> str:
        return "before the rounds"


class PairSums(Result):
    """What a reward makes of a client's pairs."""

    pairs: int
    right: float  # pairs whose chosen completion has the higher score; equal scores count half
    margin: float  # sum of the scores of chosen completions less those of rejected ones


@dataclass(frozen=True)
class ClientResult:
    """What a client's work gives, before it is sent."""

    tensors: Adapter | None = None  # the trained adapter, or gradients; None of jobs that send none
    losses: tuple[float, ...] = ()  # mean validation loss of each scored adapter
    rows: int = 0  # that the job could use
    metrics: Metrics = field(default_factory=Metrics)
    kept_bytes: int = 0  # size of what the client keeps
    output: JsonValue = None  # figures or completions; None of a job of a step


class Update(ClientRecord):
    """A client's answer to a job: what it did, and the adapter that it sends."""

    job: str  # key of the job
    client: str
    adapter: AdapterHash | None = None  # or the gradients as tensors of one file; None of jobs that send none
    output: JsonValue = None  # as of ClientResult


@dataclass(frozen=True)
class Failure:
    """A client without an update, and the reason."""

    client: str
    reason: str


Answer = TypeVar("Answer", Update, Failure)


def by_client(updates: Sequence[Answer]) -> list[Answer]:
    """Answers in the order of the clients' names, in which sums are taken."""
    return sorted(updates, key=lambda update: update.client)


def sent_adapters(updates: Sequence[Update]) -> dict[str, AdapterHash]:
    """The adapter that each client has sent, in the order of the clients' names."""
    adapters = {}
    for update in by_client(updates):
        if update.adapter is None:
            raise TypeError(f"the update of client {update.client} has no adapter")
        adapters[update.client] = update.adapter
    return adapters
