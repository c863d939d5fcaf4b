"""FedBiscuit: an ensemble of selectors, one per cluster of clients (FedBiscuit section 5).

    for u in 0 .. U-1:                                               # phase 1, warm-up
        T rounds of FedBis on phi_u
    for r in U T .. R-1:                                             # phase 2, clustered training
        if (r - U T) % tau == 0:                                     # step 2.1
            every client scores phi_0 .. phi_U-1 on its validation set
            U_m = balanced clusters of the losses
        A_r   = A clients sampled uniformly without replacement      # step 2.2
        phi_m = OPTIM(m, phi_U_m, K)   for m in A_r                  # step 2.3
        phi_u = combination of phi_u and the phi_m with U_m = u      # step 2.4, eq. 6

phi_u is the LoRA adapter of selector u, U the number of selectors, U_m the selector of client m's
cluster, T `warmup_rounds`, tau `regroup_every`, and OPTIM(m, phi, K) K local steps of client m from
phi. Warm-up rounds are a part of the R rounds (section 7.1; algorithm 1 counts after them). The
default aggregator `participation` replaces phi_u with the mean of the phi_m; eq. 6 are `paper` and
`uniform`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from components.config import FederationConfig, Recipe, RecipeError
from components.federation.aggregators import AnyAggregator, ParticipationMean
from components.federation.grouping import (
    balanced_groups,
    count_moved,
    least_loss_groups,
    mean_loss_of_cluster,
)
from components.federation.method import Cohort, Joining
from components.federation.methods.fedbis import FedBis
from components.federation.protocol import Client, Federation, Job, MeasureJob, Memory, Update
from components.federation.server import Server, State
from components.federation.step_answers import Weights
from components.federation.weight_scale import running_scale, scale_warnings
from components.models.store import AdapterHash
from components.results import Outcome
from components.seeding import derive

GROUPING = "grouping"
"""Name of the phase in which clients are grouped."""


class GroupingMemory(Memory):
    """The clusters."""

    # Name of the selector that each client's cluster trains; empty before the first grouping.
    assignment: dict[str, str] = Field(default_factory=dict)
    grouped_at: int | None = None  # index of the round of the last grouping
    # Each client's validation losses at that time, one per selector; NaN of a client without.
    losses: dict[str, list[float]] = Field(default_factory=dict)


class FedBiscuit(FedBis):
    """Options of FedBiscuit."""

    memory_type: ClassVar[type[Memory]] = GroupingMemory
    averages_apart: ClassVar[bool] = False
    diagnostics: ClassVar[tuple[str, ...]] = ("grouping",)

    selectors: int = Field(1, ge=1, le=1001)
    """Selectors of the ensemble (U); odd, so that a majority decides. With one there is nothing to
    group, and the method is FedBis."""
    warmup_rounds: int = Field(50, ge=1)
    """First rounds of FedBis for each selector (T), a part of federation.rounds; FedBiscuit section
    7.1: 50."""
    regroup_every: int = Field(50, ge=1)
    """Rounds between two groupings (tau); FedBiscuit B.2: 50 (summarization), 100 (QA)."""
    grouping: Literal["paper", "least_loss"] = "paper"
    """paper: assign each client to its best selector, cap the clusters, and reassign the overflow
    by the next-best loss (section 5.1); least_loss: minimize the sum of losses under the same
    cluster sizes (eqs. 4 and 5 with equal p_m), so that a selector that is better than the others
    for all clients does not attract all of them."""
    aggregator: AnyAggregator = Field(default_factory=ParticipationMean)
    """How the server combines adapters. After the warm-up, `paper` and `uniform` are eq. 6 with p_m
    and with 1 / M, which move a selector by its sampled members' share of the federation."""

    def server_adapters(self, config: FederationConfig) -> int:
        return self.selectors

    @field_validator("selectors")
    @classmethod
    def _check_odd(cls, selectors: int) -> int:
        if selectors % 2 == 0:
            raise ValueError(
                f"an ensemble needs an odd number of selectors, or votes tie: use {selectors - 1} or"
                f" {selectors + 1}"
            )
        return selectors

    @property
    def selector_names(self) -> list[str]:
        return [f"selector-{number}" for number in range(self.selectors)]

    @property
    def warmup(self) -> int:
        """Rounds before the first grouping."""
        return self.warmup_rounds * self.selectors

    def check(self, recipe: Recipe) -> None:
        """Refuse a warm-up that leaves no round for clustered training too."""
        super().check(recipe)
        rounds = recipe.federation.rounds
        if self.selectors > 1 and self.warmup >= rounds:
            raise RecipeError(
                f"federation.rounds is {rounds}, but the warm-up alone takes {self.warmup}"
                f" (federation.options.warmup_rounds {self.warmup_rounds} for each of {self.selectors}"
                " selectors): set more rounds or a shorter warm-up."
            )

    def start(self, federation: Federation, seed: int) -> State:
        """The state before the first step.

        Raises:
            RecipeError: there are too few clients, or none with validation pairs.
        """
        state = super().start(federation, seed)
        if self.selectors == 1:
            return state
        if self.selectors > len(federation.clients):
            raise RecipeError(
                f"federation.options.selectors is {self.selectors}, but only {len(federation.clients)}"
                " clients participate: use fewer selectors, so that each has a client."
            )
        if not any(client.validation_pairs for client in federation.clients):
            raise RecipeError(
                "fedbiscuit groups clients by their validation losses, but no client has validation pairs:"
                " raise data.validation, or the source's own options for it."
            )
        adapters = dict.fromkeys(self.selector_names, federation.initial)
        return state.model_copy(update={"adapters": adapters})

    def warnings(self, federation: Federation, seed: int, config: FederationConfig) -> Sequence[str]:
        if self.selectors == 1:
            return super().warnings(federation, seed, config)
        length = self.warmup_rounds
        warmup = {
            adapter_name: range(u * length, (u + 1) * length)
            for u, adapter_name in enumerate(self.selector_names)
        }
        return scale_warnings(self.aggregator, federation, config.clients_per_round, seed, warmup)

    def sent(self, state: State, client: str) -> tuple[str, AdapterHash]:
        """In the warm-up, one selector after the other; then that of the client's cluster."""
        if self.selectors == 1:
            return super().sent(state, client)
        if state.round < self.warmup:
            adapter_name = self.selector_names[state.round // self.warmup_rounds]
        else:
            adapter_name = state.memory.assignment[client]
        return adapter_name, state.adapters[adapter_name]

    def plan(self, state: State, server: Server) -> Sequence[Job]:
        """Losses of all clients when a grouping is due, else training jobs for the sampled ones."""
        if state.phase != GROUPING:
            return super().plan(state, server)
        selectors = tuple(state.adapters[adapter_name] for adapter_name in self.selector_names)
        return [
            MeasureJob(
                client=name,
                round=state.round,
                seed=derive(state.seed, "score", state.round, name),
                adapters=selectors,
                split="validation",
                losses=True,
            )
            for name in state.federation.names
        ]

    def cohorts(self, state: State, config: FederationConfig) -> dict[str, Cohort]:
        """The clients that train each selector."""
        if self.selectors == 1:
            return super().cohorts(state, config)
        members: dict[str, list[str]] = {}
        for client in state.federation.names:
            members.setdefault(self.sent(state, client)[0], []).append(client)
        aggregator = self.aggregator if state.round < self.warmup else self.aggregator.for_clusters()
        return {name: Cohort(name, clients, aggregator) for name, clients in members.items()}

    def sums(self, state: State, jobs: Sequence[Job], config: FederationConfig) -> Weights | None:
        """A sum for each cluster; single losses where clients are grouped."""
        return None if state.phase == GROUPING else super().sums(state, jobs, config)

    def aggregate(self, state: State, updates: Sequence[Update], server: Server) -> State:
        """Assign every client a cluster, or combine the updates of each cluster's clients."""
        if self.selectors == 1:
            return super().aggregate(state, updates, server)
        if state.phase == GROUPING:
            return self._group(state, updates)
        adapters: dict[str, AdapterHash] = {}
        metrics: dict[str, float] = {}
        took_part = set(server.answers.clients)
        for adapter_name, cohort in sorted(self.cohorts(state, server.config).items()):
            members = took_part.intersection(cohort.members)
            if not members:
                continue
            aggregator = cohort.aggregator
            adapters[adapter_name], numbers = server.combine(state, adapter_name, aggregator, members)
            numbers |= running_scale(aggregator, state, numbers, f"{adapter_name}/")
            metrics |= {f"{adapter_name}/{name}": value for name, value in numbers.items()}
            metrics[f"{adapter_name}/members"] = len(members)
        done = state.round + 1
        due = done >= self.warmup and (done - self.warmup) % self.regroup_every == 0
        return state.end_round(adapters, metrics, phase=GROUPING if due else "train")

    def _group(self, state: State, updates: Sequence[Update]) -> State:
        """Balance the clusters by the reported losses.

        A client that failed has no losses, and keeps its cluster as long as the sizes allow it.
        """
        selectors = self.selector_names
        names = state.federation.names
        reported = {update.client: update.losses for update in updates}
        no_vote = [float("nan")] * len(selectors)
        losses = np.array([reported.get(name, no_vote) for name in names])
        assignment = state.memory.assignment
        previous = [selectors.index(assignment[name]) for name in names] if assignment else None
        procedure = {"paper": balanced_groups, "least_loss": least_loss_groups}[self.grouping]
        clusters = procedure(losses, previous)
        sizes = np.bincount(clusters, minlength=len(selectors))
        metrics = {
            f"{adapter_name}/size": float(size) for adapter_name, size in zip(selectors, sizes, strict=True)
        }
        metrics["moved"] = count_moved(clusters, previous)
        metrics["without_vote"] = int(np.isnan(losses).all(axis=1).sum())
        metrics["loss_of_group"] = mean_loss_of_cluster(losses, clusters)
        memory = GroupingMemory(
            assignment={name: selectors[cluster] for name, cluster in zip(names, clusters, strict=True)},
            grouped_at=state.round,
            losses={name: list(row) for name, row in zip(names, losses.tolist(), strict=True)},
        )
        return state.within_round("train", metrics, memory, logged_at=state.round)

    def joining(self, config: FederationConfig, pairs: int) -> Joining:
        if self.selectors == 1:
            return super().joining(config, pairs)
        return Joining(config.rounds, 1, f"the selector with the least loss on at most {pairs} own pairs")

    def admit(self, state: State, clients: Sequence[Client]) -> State:
        admitted = super().admit(state, clients)
        return admitted if self.selectors == 1 else admitted.model_copy(update={"phase": GROUPING})

    def join(self, state: State, updates: Sequence[Update]) -> State:
        """Assign each client the selector with the least loss, the first of equal ones (section 5.1)."""
        if self.selectors == 1:
            return super().join(state, updates)
        names = self.selector_names
        losses = {update.client: np.nan_to_num(update.losses, nan=np.inf) for update in updates}
        chosen = {client: names[int(np.argmin(own))] for client, own in losses.items()}
        return state.model_copy(update={"memory": GroupingMemory(assignment=chosen)})

    def outcome(self, state: State) -> Outcome:
        outcome = super().outcome(state)
        return outcome.model_copy(update={"assignment": state.memory.assignment})
