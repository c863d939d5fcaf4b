"""A federated method: the options of a recipe, and the functions of its server half.

    state   = method.start(federation, seed)
    while state.round < rounds:                            # rounds.py
        jobs    = method.plan(state, server)               # who works, on which adapters
        weights = method.sums(state, jobs, config)         # of the sums that it needs; None: single updates
        state   = method.aggregate(state, updates, server) # immutable in, new state out
    outcome = method.outcome(state)                        # what the rounds end with

What the clients do is a value, method.local() (local.py), which their trainers read.

A round may have several steps (score all clients, then train some): `aggregate` moves `state.phase`
within a round, and `state.round` when the round is complete. Each step is committed. The functions
are pure, up to the content-addressed store of adapters. The round loop validates updates and keeps
the clients' job keys; `Server` (server.py) samples clients, combines updates, and applies post-processors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from pydantic import Field

from components.config import (
    DpoObjective,
    FederationConfig,
    PairPpoObjective,
    PdpoObjective,
    Recipe,
    RecipeError,
    Section,
)
from components.federation.aggregators import Aggregator, AnyAggregator, ParticipationMean, SumAggregator
from components.federation.local import Local, SampledRewards
from components.federation.protocol import Client, Federation, Job, Memory, ServerState, Update, sent_adapters
from components.federation.server import Server, State
from components.federation.step_answers import Weights
from components.federation.weight_scale import running_scale, scale_warnings
from components.models.store import AdapterHash
from components.results import Outcome

if TYPE_CHECKING:
    from components.models.store import Adapter

FROM_INITIAL = (
    "a round of local training on at most {pairs} own pairs, from the initial adapter: the server has no"
    " shared one"
)
"""Note on the unseen clients of methods whose server has an adapter for each client, and no other one."""


class Joining(NamedTuple):
    """How clients get a model that took part in no round, see components/federation/unseen.py."""

    after: int  # rounds after which the server has what it sends them
    steps: int  # in which they use pairs of their own; 0 where they take what they are sent as it is
    note: str  # in words, what their models are


class Method(Section, ABC):
    """A federated method; its fields are the options of a recipe.

    By default there is one adapter of the server, named after the trained model, on which the
    sampled clients train.
    """

    trained_model: ClassVar[Literal["selector", "policy"]] = "policy"  # section of what clients train
    also_read: ClassVar[tuple[Literal["policy"], ...]] = ()  # further sections of models that the rounds use
    trainer: ClassVar[str] = "policy"  # the client half, a key of components.federation.clients.TRAINERS
    memory_type: ClassVar[type[Memory]] = Memory
    diagnostics: ClassVar[tuple[str, ...]] = ()  # names in components/evaluation/diagnostics
    # Whether the server half needs one sum of equally weighted clients, by which federation.privacy can
    # protect a client; verdicts can be protected with every method.
    sums_protect_clients: ClassVar[bool] = False
    # The class of the selectors, built by `of(recipe, device)`.
    selector_model: ClassVar[str] = "components.models.selector_model:Selector"

    # --- at the clients

    @abstractmethod
    def local(self) -> Local:
        """What the clients do."""

    @property
    def sampling(self) -> SampledRewards | None:
        """The rewards of sampled completions, of a method whose rounds have some."""
        return None

    # --- at the server

    @property
    def adapters_by_client(self) -> bool:
        """Whether the server has an adapter for each client, under the client's name."""
        return False

    @property
    def has_own_models(self) -> bool:
        """Whether clients end with models of their own."""
        return self.adapters_by_client or bool(self.local().own)

    def start(self, federation: Federation, seed: int) -> State:
        """The state before the first step: all adapters have the same values.

        Raises:
            RecipeError: the method cannot run with these clients.
        """
        names = federation.names if self.adapters_by_client else [self.trained_model]
        return ServerState.start(
            federation, seed, dict.fromkeys(names, federation.initial), self.memory_type()
        )

    def warnings(self, federation: Federation, seed: int, config: FederationConfig) -> Sequence[str]:
        """What users should know of the planned rounds with these clients, a sentence each."""
        return []

    def server_adapters(self, config: FederationConfig) -> int:
        """Adapters of the server that a round changes at most."""
        return config.clients_per_round if self.adapters_by_client else 1

    def sent(self, state: State, client: str) -> tuple[str, AdapterHash]:
        """The name and the hash of the adapter that a client trains in a round."""
        name = client if self.adapters_by_client else self.trained_model
        return name, state.adapters[name]

    def plan(self, state: State, server: Server) -> Sequence[Job]:
        """The jobs of the next step: training jobs of the sampled clients."""
        return server.train_jobs(state, lambda client: self.sent(state, client))

    def update_template(self, state: State, adapter: Adapter) -> Adapter:
        """Tensors with the names and shapes of the next step's updates: those of an adapter."""
        return adapter

    def sums(self, state: State, jobs: Sequence[Job], config: FederationConfig) -> Weights | None:
        """The sums of the clients' tensors that suffice for the step; None where it needs single updates.

        Args:
            state: before the step.
            jobs: of the step.
            config: of the rounds.
        """
        return None

    @abstractmethod
    def aggregate(self, state: State, updates: Sequence[Update], server: Server) -> State:
        """The state after a step with these accepted updates, in the order of the clients' names.

        A step of sums has no updates: `server.combine` and `server.mean` take the sums.
        """

    def outcome(self, state: State) -> Outcome:
        """What the rounds end with, or would end with after this step."""
        own = self.local().own
        # All participants, also those that have not trained: they are the outcome's clients.
        job_keys = {name: state.memory.job_keys.get(name, "") for name in state.federation.names}
        return Outcome(
            trained_model=self.trained_model,
            adapters=state.adapters,
            assignment={name: name for name in state.adapters} if self.adapters_by_client else {},
            votes=self.trained_model == "selector",
            own=own,
            job_keys=job_keys if own else {},
        )

    # --- clients that took part in no round

    def joining(self, config: FederationConfig, pairs: int) -> Joining:
        """How such clients get a model, with at most so many training pairs of their own."""
        if self.adapters_by_client:
            return Joining(config.rounds, 1, FROM_INITIAL.format(pairs=pairs))
        if self.local().own:
            note = f"a round of local training on at most {pairs} own pairs, from the server's adapter"
            return Joining(config.rounds, 1, note)
        return Joining(config.rounds, 0, "the server's model as it is")

    def admit(self, state: State, clients: Sequence[Client]) -> State:
        """The state of a federation of such clients, with the adapters that the server sends them.

        `plan` plans their steps, in which all of them take part.

        Args:
            state: after the rounds of `joining`, of the clients that took part.
            clients: the others, sorted by name.
        """
        own = {client.name: state.initial for client in clients}
        adapters = own if self.adapters_by_client else state.adapters
        update = {"clients": tuple(clients), "adapters": adapters, "memory": self.memory_type()}
        return state.model_copy(update=update | {"phase": "train"})

    def join(self, state: State, updates: Sequence[Update]) -> State:
        """The state after a step of such clients. What they train is theirs, or stays private."""
        job_keys = {update.client: update.job for update in updates if update.traffic.kept}
        memory = state.memory.model_copy(update={"job_keys": state.memory.job_keys | job_keys})
        adapters = sent_adapters(updates) if self.adapters_by_client else state.adapters
        return state.model_copy(update={"memory": memory, "adapters": adapters})

    # --- before a run

    def check(self, recipe: Recipe) -> None:
        """Refuse unused rewards, PPO on pairs without its one reward, and a decay that cannot apply.

        Raises:
            RecipeError: naming the rewards or the decay.
        """
        config, local = recipe.federation, self.local()
        by_ppo = isinstance(local.objective, PairPpoObjective)
        by_dpo = isinstance(local.objective, DpoObjective | PdpoObjective)
        if config.rate_decay is not None and not (local.decays_rates and by_dpo):
            which = f"'{config.method}'" + (" with objective 'ppo'" if by_ppo else "")
            raise RecipeError(
                "federation.rate_decay follows the DPO loss of the clients, which federation.method"
                f" {which} does not have or does not keep: set it to null."
            )
        if by_ppo and len(recipe.rewards) != 1:
            raise RecipeError(
                "federation.options.objective 'ppo' needs one reward model, but rewards names"
                f" {len(recipe.rewards) or 'none'}: give a section such as rewards:"
                f" {{preference: {{kind: judge}}}}."
            )
        if recipe.rewards and not by_ppo:
            raise RecipeError(
                f"rewards names {', '.join(recipe.rewards)}, which federation.method"
                f" '{recipe.federation.method}' does not use: leave the section out, or set"
                " federation.options.objective to 'ppo'."
            )


class Cohort(NamedTuple):
    """Clients whose adapters are averaged."""

    name: str  # in metrics; empty where it is the only one
    members: Sequence[str]
    aggregator: Aggregator


class AveragingMethod(Method):
    """Federated averaging of one adapter: the rounds that many methods share.

    for r in 0 .. R-1:
        A_r     = A clients sampled uniformly without replacement
        phi_m   = OPTIM(m, phi_r, K)   for m in A_r
        phi_r+1 = combination of the phi_m by the aggregator

    phi_r is the server's adapter, and OPTIM(m, phi, K) are K local steps of client m from phi. Whose
    adapters are averaged is an option: of all clients; of those of one group (an oracle, which knows the
    groups); or of none, where each client trains alone. The clients of a round, and their steps, are the
    same with each.
    """

    averages_apart: ClassVar[bool] = True  # whether average_over and finetune_rounds can be set

    aggregator: AnyAggregator = Field(
        default_factory=ParticipationMean, description="How the server combines the clients' adapters."
    )
    average_over: Literal["all", "group", "self"] = Field(
        "all",
        description=(
            "Whose adapters the server averages. all: those of the round's clients; group: of those that"
            " belong to one group, where the source knows groups, as an upper bound for methods that look"
            " for them; self: none, each client trains alone, as the reference for what federating gains."
        ),
    )
    finetune_rounds: int = Field(
        0,
        ge=0,
        description=(
            "Last rounds, in which every client trains alone from the adapter of the rounds before. They"
            " train all clients, also where a round samples some."
        ),
    )

    @property
    def adapters_by_client(self) -> bool:
        """Also where clients may end with equal adapters, those of their group."""
        return self.average_over != "all" or self.finetune_rounds > 0

    def joining(self, config: FederationConfig, pairs: int) -> Joining:
        """The rounds in which clients fine-tune, or one where they train alone or keep modules."""
        after = config.rounds - self.finetune_rounds
        if not self.adapters_by_client:
            return super().joining(config, pairs)
        steps = self.finetune_rounds or int(self.average_over == "self" or bool(self.local().own))
        if self.average_over == "self":
            return Joining(after, steps, FROM_INITIAL.format(pairs=pairs))
        origin = "the server's adapter"
        if self.average_over == "group":
            origin = "the mean of its group (of a group without others: the initial adapter)"
        rounds = "a round" if steps == 1 else f"{steps} rounds"
        trained = f"{rounds} of local training on at most {pairs} own pairs, from {origin}"
        return Joining(after, steps, trained if steps else f"{origin} as it is")

    def admit(self, state: State, clients: Sequence[Client]) -> State:
        """They are sent the mean of their group, or of all; where there is none, the initial adapter."""
        admitted = super().admit(state, clients)
        if not self.adapters_by_client or self.average_over == "self":
            return admitted
        adapters = {}
        for client in clients:
            members = [
                one.name for one in state.clients if self.average_over == "all" or one.group == client.group
            ]
            adapters[client.name] = state.adapters[members[0]] if members else state.initial
        return admitted.model_copy(update={"adapters": adapters})

    def join(self, state: State, updates: Sequence[Update]) -> State:
        """What they train stays with them where the rounds end with it, and not with a mean."""
        joined = super().join(state, updates)
        if self.finetune_rounds or self.average_over == "self":
            return joined
        return joined.model_copy(update={"adapters": state.adapters})

    def is_alone(self, state: State, config: FederationConfig) -> bool:
        """Whether clients train alone in the state's round."""
        return self.average_over == "self" or config.rounds - state.round <= self.finetune_rounds

    def start(self, federation: Federation, seed: int) -> State:
        """The state before the first step.

        Raises:
            RecipeError: groups are to be averaged, and the source does not know them.
        """
        unknown = [client.name for client in federation.clients if client.group is None]
        if self.average_over == "group" and unknown:
            raise RecipeError(
                f"federation.options.average_over is 'group', but the data do not say the groups of"
                f" {len(unknown)} of {len(federation.clients)} clients (such as {unknown[0]}): use a source"
                " that knows the tastes of its owners, such as aclsum, with data.partition 'natural', or"
                " 'all'."
            )
        return super().start(federation, seed)

    def warnings(self, federation: Federation, seed: int, config: FederationConfig) -> Sequence[str]:
        """Weights that shrink or inflate the adapter over the rounds."""
        if self.average_over != "all":
            return []
        rounds: dict[str, range] = {self.trained_model: range(config.rounds - self.finetune_rounds)}
        return scale_warnings(self.aggregator, federation, config.clients_per_round, seed, rounds)

    def plan(self, state: State, server: Server) -> Sequence[Job]:
        """Training jobs of the sampled clients; of all clients where they fine-tune."""
        finetune = self.average_over != "self" and self.is_alone(state, server.config)
        clients = state.federation.names if finetune else None
        return server.train_jobs(state, lambda client: self.sent(state, client), clients)

    def cohorts(self, state: State, config: FederationConfig) -> dict[str, Cohort]:
        """Whose adapters the round averages, by the name of the adapter that the average replaces."""
        names = state.federation.names
        if not self.adapters_by_client:
            return {self.trained_model: Cohort("", names, self.aggregator)}
        members: dict[str, list[str]] = {}
        for client in state.federation.clients:
            group = client.group if self.average_over == "group" else ""
            key = client.name if self.is_alone(state, config) else group or ""
            members.setdefault(key, []).append(client.name)
        return {
            own[0]: Cohort(name, own, ParticipationMean() if len(own) == 1 else self.aggregator)
            for name, own in members.items()
        }

    def sums(self, state: State, jobs: Sequence[Job], config: FederationConfig) -> Weights | None:
        """A sum for each cohort; single updates where an aggregator needs them."""
        shares = state.shares(jobs)
        weights = {}
        for name, cohort in self.cohorts(state, config).items():
            if not isinstance(cohort.aggregator, SumAggregator):
                return None
            if own := {client: shares[client] for client in cohort.members if client in shares}:
                weights[name] = cohort.aggregator.client_weights(own, len(state.clients))
        return weights

    def aggregate(self, state: State, updates: Sequence[Update], server: Server) -> State:
        adapters: dict[str, AdapterHash] = {}
        metrics: dict[str, float] = {}
        took_part = set(server.answers.clients)
        for name, cohort in self.cohorts(state, server.config).items():
            if took_part.isdisjoint(cohort.members):
                continue
            adapter, numbers = server.combine(
                state, name, cohort.aggregator, cohort.members, self.local().frozen
            )
            if not cohort.name:
                numbers |= running_scale(cohort.aggregator, state, numbers)
            adapters |= dict.fromkeys(cohort.members if self.adapters_by_client else [name], adapter)
            prefix = cohort.name and f"{cohort.name}/"
            metrics |= {f"{prefix}{key}": value for key, value in numbers.items()}
        return state.end_round(adapters, metrics | self.round_metrics(state, updates, server))

    def outcome(self, state: State) -> Outcome:
        """The adapters by client where there may be several; equal selectors are there once."""
        outcome = super().outcome(state)
        if not self.adapters_by_client or self.trained_model == "policy":
            return outcome
        first: dict[AdapterHash, str] = {}
        assignment = {name: first.setdefault(state.adapters[name], name) for name in state.federation.names}
        adapters = {name: digest for digest, name in first.items()}
        return outcome.model_copy(update={"votes": False, "adapters": adapters, "assignment": assignment})

    def check(self, recipe: Recipe) -> None:
        super().check(recipe)
        self.check_averages(recipe)

    def check_averages(self, recipe: Recipe) -> None:
        """Refuse averages over groups or clients that the method has no use for, or that leave no round."""
        config = recipe.federation
        if self.adapters_by_client and not self.averages_apart:
            raise RecipeError(
                f"federation.method '{config.method}' averages over clients of its own choice: leave out"
                " federation.options.average_over and finetune_rounds, or use another method."
            )
        if self.finetune_rounds and self.average_over == "self":
            raise RecipeError(
                "federation.options.average_over is 'self', so that clients train alone in all rounds: leave"
                " out finetune_rounds."
            )
        if self.finetune_rounds >= config.rounds:
            raise RecipeError(
                f"federation.rounds is {config.rounds}, and federation.options.finetune_rounds"
                f" {self.finetune_rounds} leaves no round that averages: set more rounds, or average_over to"
                " 'self'."
            )

    def round_metrics(self, state: State, updates: Sequence[Update], server: Server) -> dict[str, float]:
        """Further metrics of a round."""
        return {}
