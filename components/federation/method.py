"""A federated method: the options of a recipe, and the functions of its server half.

    state   = method.start(federation, seed)
    while state.round < rounds:                            # rounds.py
        jobs  = method.plan(state, server)                 # who works, on which adapters
        state = method.aggregate(state, updates, server)   # immutable in, new state out
    outcome = method.outcome(state)                        # what the rounds end with

A round may have several steps (score all clients, then train some): `aggregate` moves `state.phase`
within a round, and `state.round` when the round is complete. Each step is committed. The functions
are pure, up to the content-addressed store of adapters. The round loop validates updates and keeps
the clients' job keys; `Server` samples clients, combines updates, and applies post-processors.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, JsonValue

from components.config import (
    DpoObjective,
    FederationConfig,
    LocalObjective,
    PairPpoObjective,
    PdpoObjective,
    PersonalModules,
    Recipe,
    RecipeError,
)
from components.config.federation import MethodOptions
from components.federation import aggregation
from components.federation.aggregators.aggregator import Aggregator, AnyAggregator, Contributions
from components.federation.aggregators.weighted import ParticipationMean
from components.federation.postprocessing import Context, PostProcessor, origin_of, postprocessors_of
from components.federation.protocol import (
    Federation,
    Job,
    Memory,
    RewardsJob,
    ServerState,
    TrainJob,
    Update,
    sent_adapters,
)
from components.federation.sampling import sample_clients
from components.federation.weight_scale import running_scale, scale_warnings
from components.models.store import AdapterHash, AdapterStore
from components.results import OutcomeRecord
from components.seeding import derive

if TYPE_CHECKING:
    from components.federation.personalization import StageLength
    from components.models.store import Adapter

State = ServerState[Any]
MIXED_TOGETHER = 16
"""Clients whose mixtures are computed in one pass over the adapters, and held in memory."""


@dataclass
class Server:
    """What a step of the server uses; all combinations of updates are made here."""

    config: FederationConfig
    store: AdapterStore
    updates: Sequence[Update] = ()  # the accepted updates of the step, in the order of the clients' names
    processing: list[JsonValue] = field(default_factory=list)  # states of the post-processors
    metrics: dict[str, float] = field(default_factory=dict)  # of the post-processors
    postprocessors: tuple[PostProcessor, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.postprocessors = postprocessors_of(self.config)
        self.processing = self.processing or [None] * len(self.postprocessors)

    def sample(self, state: State) -> list[str]:
        """The clients of a round."""
        return sample_clients(state.federation.names, self.config.clients_per_round, state.seed, state.round)

    def train_jobs(self, state: State, sent: Callable[[str], tuple[str, AdapterHash]]) -> list[TrainJob]:
        """A training job for each sampled client, on the adapter that it is sent, with its name."""
        jobs = []
        for name in self.sample(state):
            adapter_name, adapter = sent(name)
            seed = derive(state.seed, "train", state.round, name)
            key = state.memory.job_keys.get(name, "")
            job = TrainJob(
                client=name,
                round=state.round,
                seed=seed,
                adapter_name=adapter_name,
                adapter=adapter,
                previous_job_key=key,
            )
            jobs.append(job)
        return jobs

    def contributions(self, state: State, members: Sequence[Update] | None = None) -> Contributions:
        """The updates of some clients (None: of all) as an aggregator takes them."""
        names = {update.client for update in (self.updates if members is None else members)}
        updates = [update for update in self.updates if update.client in names]
        weights = state.federation.weights
        return Contributions(
            self.store, updates, [weights[update.client] for update in updates], len(weights)
        )

    def combine(
        self, state: State, adapter_name: str, aggregator: Aggregator, members: Sequence[Update] | None = None
    ) -> tuple[AdapterHash, dict[str, float]]:
        """The server's new adapter of a name, from the updates of some clients (None: of all).

        Returns:
            the adapter, and the metrics of the aggregator, server_step (how far the adapter moved)
            and server_norm.
        """
        contributions = self.contributions(state, members)
        before = self.store.get(state.adapters[adapter_name])
        combined, metrics = aggregator.combine(before, contributions)
        combined = self.process(state, combined, before, adapter_name, contributions.names)
        return self.store.put(combined), metrics | aggregation.step_metrics(combined, before)

    def mix(
        self, state: State, weights: Mapping[str, Mapping[str, float]], previous: Mapping[str, AdapterHash]
    ) -> tuple[dict[str, AdapterHash], dict[str, float]]:
        """Store sum_i w_ki theta_i for each client k of the step.

        Args:
            state: before the step.
            weights: w_ki by client k and client i.
            previous: the adapter of each client before the step.

        Returns:
            the mixtures by client, and the distance of each from the client's previous adapter, as
            the metric `<client>/server_step`.
        """
        sent = sent_adapters(self.updates)
        trained = dict(zip(sent, self.store.open(sent.values()), strict=True))
        names = list(weights)
        adapters: dict[str, AdapterHash] = {}
        metrics: dict[str, float] = {}
        for start in range(0, len(names), MIXED_TOGETHER):
            targets = names[start : start + MIXED_TOGETHER]
            members = sorted(set().union(*(weights[name] for name in targets)))
            rows = np.array([[weights[name].get(member, 0.0) for member in members] for name in targets])
            sources = [trained[member] for member in members]
            for name, mixture in zip(targets, aggregation.mixtures(sources, rows), strict=True):
                before = self.store.get(previous[name])
                combined = self.process(state, mixture, before, name, list(weights[name]))
                adapters[name] = self.store.put(combined)
                metrics[f"{name}/server_step"] = aggregation.distance(combined, before)
        return adapters, metrics

    def process(
        self, state: State, combined: Adapter, before: Adapter, adapter_name: str, members: Sequence[str]
    ) -> Adapter:
        """Apply the post-processors to a combination of the updates of clients.

        Args:
            state: before the step.
            combined: the combination.
            before: the server's adapter before the step; tensors of other names start from 0.
            adapter_name: name of what is combined.
            members: names of the clients.
        """
        shares = state.federation.weights
        context = Context(
            round=state.round,
            kind=state.phase,
            adapter_name=adapter_name,
            participants=tuple(members),
            weight=sum(shares[name] for name in members),
            seed=derive(state.seed, "postprocessing", state.step, adapter_name),
            origin=origin_of(combined, before) if self.postprocessors else {},
        )
        kinds = [postprocessor.kind for postprocessor in self.postprocessors]
        for place, postprocessor in reversed(list(enumerate(self.postprocessors))):
            done = postprocessor.at_server(combined, context, self.processing[place])
            combined = done.tensors
            # As it is committed, so that a resumed run has the same.
            self.processing[place] = json.loads(json.dumps(done.state))
            name = postprocessor.kind + (f"-{place + 1}" if kinds.count(postprocessor.kind) > 1 else "")
            self.metrics |= {f"{adapter_name}/{name}/{key}": value for key, value in done.metrics.items()}
        return combined


class Method(MethodOptions, ABC):
    """A federated method; its fields are the options of a recipe.

    By default there is one adapter of the server, named after the trained model, on which the
    sampled clients train.
    """

    trainer: ClassVar[str] = "policy"
    outcome_kind: ClassVar[str] = "shared-policy"
    memory_type: ClassVar[type[Memory]] = Memory
    first_phase: ClassVar[str] = "train"
    # Whether the method itself uses single updates; its aggregator may need them in any case.
    needs: ClassVar[Literal["sums", "updates"]] = "updates"
    diagnostics: ClassVar[tuple[str, ...]] = ()  # names in components/evaluation/diagnostics
    # Whether the recipe's rewards score completions in the rounds; otherwise they score the clients'
    # pairs before the first round.
    scores_completions: ClassVar[bool] = False
    # Files of the prepared data that the rounds depend on (components/data/records).
    prepared_files: ClassVar[tuple[str, ...]] = ("pairs.parquet",)
    frozen_factors: ClassVar[tuple[Literal["A", "B"], ...]] = ()  # LoRA factors that are not trained
    decays_rates: ClassVar[bool] = False  # whether federation.rate_decay can apply
    # What it changes in the clients' local steps: a components.learning.local_step.LocalStep, which
    # the trainer 'policy' and those derived from it apply.
    local_step: ClassVar[str] = "components.learning.local_step:LocalStep"

    # --- at the server

    def start(self, federation: Federation, seed: int) -> State:
        """The state before the first step: all adapters have the same values.

        Raises:
            RecipeError: the method cannot run with these clients.
        """
        adapters = dict.fromkeys(self.adapter_names(federation), federation.initial)
        return ServerState.start(federation, seed, adapters, self.memory_type(), self.first_phase)

    def adapter_names(self, federation: Federation) -> Sequence[str]:
        """Names of the server's adapters."""
        return [self.trained_model]

    def warnings(self, federation: Federation, seed: int, config: FederationConfig) -> Sequence[str]:
        """What users should know of the planned rounds with these clients, a sentence each."""
        return []

    def sent(self, state: State, client: str) -> tuple[str, AdapterHash]:
        """The name and the hash of the adapter that a client trains in a round."""
        return self.trained_model, state.adapters[self.trained_model]

    def plan(self, state: State, server: Server) -> Sequence[Job]:
        """The jobs of the next step: training jobs of the sampled clients."""
        return server.train_jobs(state, lambda client: self.sent(state, client))

    def update_template(self, state: State, adapter: Adapter) -> Adapter:
        """Tensors with the names and shapes of the next step's updates: those of an adapter."""
        return adapter

    @abstractmethod
    def aggregate(self, state: State, updates: Sequence[Update], server: Server) -> State:
        """The state after a step with these accepted updates, in the order of the clients' names.

        The updates of a method that needs sums have no adapters: `server.combine` has them.
        """

    def measure(self, state: State) -> Sequence[RewardsJob]:
        """The jobs that measure, between rounds, what there is beside accuracy on pairs."""
        return []

    def outcome(self, state: State) -> OutcomeRecord:
        """What the rounds end with, or would end with after this step."""
        is_personal = self.outcome_kind == "personalized-clients"
        # All participants, also those that have not trained: they are the outcome's clients.
        job_keys = {name: state.memory.job_keys.get(name, "") for name in state.federation.names}
        return OutcomeRecord(
            kind=self.outcome_kind, adapters=state.adapters, job_keys=job_keys if is_personal else {}
        )

    # --- at the clients

    @property
    def local_objective(self) -> LocalObjective:
        """What the clients minimize: the option `objective`."""
        objective: LocalObjective = getattr(self, "objective")  # noqa: B009
        return objective

    def learning_rate(self, config: FederationConfig) -> float:
        """Learning rate of the clients' shared adapter."""
        return config.optimizer.lr

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
    def personal_stage(self) -> StageLength | None:
        """The personal stage; None where private and shared modules are trained at once."""
        return None

    @property
    def sampling_temperature(self) -> float:
        """Temperature at which the policy is trained, and its KL to the reference is measured."""
        return 1.0

    def gradient_evaluations(self, config: FederationConfig, rows: int) -> int:
        """Gradient evaluations (one minibatch forward and backward) of a client in a round.

        Every method that trains on rows takes exactly as many, however it divides them: among private
        and shared modules (FedPDPO, FedRep), or among inner and outer steps (Per-FedAvg). FedPer's
        gradients are of both kinds of modules at once. PPO on pairs passes over all pairs of the
        client `epochs` times; a target KL may end it earlier.
        """
        objective = self.local_objective
        if isinstance(objective, PairPpoObjective):
            return objective.epochs * math.ceil(rows / objective.minibatch)
        return config.local_steps_for(rows) * config.optimizer.accumulation

    # --- in the pipeline

    def measure_fingerprint(self, recipe: Recipe) -> str:
        """What measures of the base policy depend on beside seed, data and policy; empty without any."""
        return ""

    def preferences(self) -> dict[str, float]:
        """How much each of several objectives is preferred; empty for methods with one."""
        return {}

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


class AveragingMethod(Method):
    """Federated averaging of one adapter: the rounds that many methods share.

    for r in 0 .. R-1:
        A_r     = A clients sampled uniformly without replacement
        phi_m   = OPTIM(m, phi_r, K)   for m in A_r
        phi_r+1 = combination of the phi_m by the aggregator

    phi_r is the server's adapter, and OPTIM(m, phi, K) are K local steps of client m from phi.
    """

    needs: ClassVar[Literal["sums", "updates"]] = "sums"

    aggregator: AnyAggregator = Field(
        default_factory=ParticipationMean, description="How the server combines the clients' adapters."
    )

    @property
    def combiner(self) -> Aggregator:
        """The aggregator."""
        return self.aggregator

    def warnings(self, federation: Federation, seed: int, config: FederationConfig) -> Sequence[str]:
        """Weights that shrink or inflate the adapter over the rounds."""
        rounds: dict[str, range] = {self.trained_model: range(config.rounds)}
        return scale_warnings(self.combiner, federation, config.clients_per_round, seed, rounds)

    def aggregate(self, state: State, updates: Sequence[Update], server: Server) -> State:
        adapter_name = self.trained_model
        adapter, metrics = server.combine(state, adapter_name, self.combiner)
        metrics |= running_scale(self.combiner, state, metrics)
        return state.end_round({adapter_name: adapter}, metrics | self.round_metrics(state, updates, server))

    def round_metrics(self, state: State, updates: Sequence[Update], server: Server) -> dict[str, float]:
        """Further metrics of a round."""
        return {}


def method_of(config: FederationConfig) -> Method:
    """The method of a recipe: its options, which are of the class that federation.method names.

    Raises:
        RecipeError: what is registered is no method.
    """
    if not isinstance(config.options, Method):
        raise RecipeError(
            f"federation.method '{config.method}' registers {type(config.options).__name__}, which is no"
            " components.federation.method.Method: derive it from that class."
        )
    return config.options
