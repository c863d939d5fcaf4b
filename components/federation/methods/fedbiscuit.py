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
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from components.config import FederationConfig, RecipeError, SelectorObjective
from components.federation.aggregators.base import AnyAggregator, aggregator_of
from components.federation.aggregators.weighted import ParticipationMean
from components.federation.averaging import combine_updates
from components.federation.grouping import (
    balanced_groups,
    count_moved,
    least_loss_groups,
    mean_loss_of_group,
)
from components.federation.methods import fedbis
from components.federation.postprocessing import PostProcessor, postprocessors_of
from components.federation.protocol import (
    Federation,
    Job,
    Memory,
    Method,
    ScoreJob,
    ServerState,
    Strategy,
    TrainJob,
    Update,
)
from components.federation.sampling import sample_clients
from components.federation.weight_scale import running_scale, scale_warnings
from components.models.store import AdapterStore
from components.results import Metrics, OutcomeRecord
from components.seeding import derive

GROUPING = "grouping"
"""Name of the phase in which clients are grouped."""


class Options(Method):
    """Options of FedBiscuit."""

    trained_model: ClassVar[Literal["selector", "policy"]] = "selector"
    trainer: ClassVar[str] = "selector"
    diagnostics: ClassVar[tuple[str, ...]] = ("grouping",)

    selectors: int = Field(
        1,
        ge=1,
        le=1001,
        description=(
            "Selectors of the ensemble (U); odd, so that a majority decides. With one there is nothing to"
            " group, and the method is FedBis."
        ),
    )
    warmup_rounds: int = Field(
        50,
        ge=1,
        description=(
            "First rounds of FedBis for each selector (T), a part of federation.rounds; FedBiscuit section"
            " 7.1: 50."
        ),
    )
    regroup_every: int = Field(
        50,
        ge=1,
        description="Rounds between two groupings (tau); FedBiscuit B.2: 50 (summarization), 100 (QA).",
    )
    grouping: Literal["paper", "least_loss"] = Field(
        "paper",
        description=(
            "paper: assign each client to its best selector, cap the clusters, and reassign the overflow by"
            " the next-best loss (section 5.1); least_loss: minimize the sum of losses under the same"
            " cluster sizes (eqs. 4 and 5 with equal p_m), so that a selector that is better than the"
            " others for all clients does not attract all of them."
        ),
    )
    aggregator: AnyAggregator = Field(
        default_factory=ParticipationMean,
        description=(
            "How the server combines adapters. After the warm-up, `paper` and `uniform` are eq. 6 with p_m"
            " and with 1 / M, which move a selector by its sampled members' share of the federation."
        ),
    )

    def server_adapters(self, federation: FederationConfig) -> int:
        """Those of all selectors."""
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
    def local_objective(self) -> SelectorObjective:
        """Cross-entropy of the binary choice."""
        return SelectorObjective()

    def build(self, config: FederationConfig, store: AdapterStore) -> Strategy[Any]:
        """FedBiscuit, or FedBis where there is one selector.

        Raises:
            RecipeError: the warm-up leaves no round for clustered training.
        """
        if self.selectors == 1:
            return fedbis.Options(aggregator=self.aggregator).build(config, store)
        warmup = self.warmup_rounds * self.selectors
        if warmup >= config.rounds:
            raise RecipeError(
                f"federation.rounds is {config.rounds}, but the warm-up alone takes {warmup}"
                f" (federation.options.warmup_rounds {self.warmup_rounds} for each of {self.selectors}"
                " selectors): set more rounds or a shorter warm-up."
            )
        return FedBiscuit(config, store, self, postprocessors_of(config))


class GroupingMemory(Memory):
    """The clusters.

    Attributes:
        assignment: name of the selector that each client's cluster trains; empty before the first
            grouping.
        grouped_at: index of the round of the last grouping.
        losses: each client's validation losses at that time, one per selector; NaN of a client
            that reported none.
    """

    assignment: dict[str, str] = Field(default_factory=dict)
    grouped_at: int | None = None
    losses: dict[str, list[float]] = Field(default_factory=dict)


@dataclass(frozen=True)
class FedBiscuit(Strategy[GroupingMemory]):
    """The strategy; see the module's docstring.

    Attributes:
        config: rounds and clients per round.
        store: the server's adapters.
        options: of the method.
        postprocessors: applied to each combined adapter.
    """

    config: FederationConfig
    store: AdapterStore
    options: Options
    postprocessors: tuple[PostProcessor, ...] = ()

    memory_type = GroupingMemory

    @property
    def slots(self) -> list[str]:
        """Names of the selectors."""
        return [f"selector-{number}" for number in range(self.options.selectors)]

    @property
    def warmup(self) -> int:
        """Rounds before the first grouping."""
        return self.options.warmup_rounds * self.options.selectors

    def init(self, federation: Federation, seed: int) -> ServerState[GroupingMemory]:
        """All selectors start from the same adapter.

        Raises:
            RecipeError: there are more selectors than clients, or no client has validation pairs.
        """
        if self.options.selectors > len(federation.clients):
            raise RecipeError(
                f"federation.options.selectors is {self.options.selectors}, but only"
                f" {len(federation.clients)} clients participate: use fewer selectors, so that each has a"
                " client."
            )
        if not any(client.validation_pairs for client in federation.clients):
            raise RecipeError(
                "fedbiscuit groups clients by their validation losses, but no client has validation pairs:"
                " raise data.validation, or the source's own options for it."
            )
        adapters = dict.fromkeys(self.slots, federation.initial)
        return ServerState.start(federation, seed, adapters, GroupingMemory())

    def warnings(self, federation: Federation, seed: int) -> Sequence[str]:
        """Weights that shrink or inflate a selector over its warm-up."""
        length = self.options.warmup_rounds
        warmup = {slot: range(u * length, (u + 1) * length) for u, slot in enumerate(self.slots)}
        aggregator = aggregator_of(self.options.aggregator)
        return scale_warnings(aggregator, federation, self.config.clients_per_round, seed, warmup)

    def plan(self, state: ServerState[GroupingMemory]) -> Sequence[Job]:
        """Score jobs for all clients when a grouping is due, else training jobs for the sampled ones."""
        names = state.federation.names
        if state.phase == GROUPING:
            selectors = tuple(state.adapters[slot] for slot in self.slots)
            return [
                ScoreJob(
                    client=name,
                    round=state.round,
                    seed=derive(state.seed, "score", state.round, name),
                    adapters=selectors,
                )
                for name in names
            ]
        sampled = sample_clients(names, self.config.clients_per_round, state.seed, state.round)
        return [self._training_job(state, name) for name in sampled]

    def _training_job(self, state: ServerState[GroupingMemory], name: str) -> TrainJob:
        if state.round < self.warmup:
            slot = self.slots[state.round // self.options.warmup_rounds]
        else:
            slot = state.memory.assignment[name]
        return TrainJob(
            client=name,
            round=state.round,
            seed=derive(state.seed, "train", state.round, name),
            slot=slot,
            adapter=state.adapters[slot],
        )

    def aggregate(
        self, state: ServerState[GroupingMemory], updates: Sequence[Update]
    ) -> ServerState[GroupingMemory]:
        """The state after a step.

        A grouping assigns every client a cluster. A training step combines, for each selector, the
        updates of the clients that trained it.
        """
        if state.phase == GROUPING:
            return self._group(state, updates)
        aggregator = aggregator_of(self.options.aggregator)
        if state.round >= self.warmup:
            aggregator = aggregator.for_clusters()
        adapters = dict(state.adapters)
        scalars: dict[str, float] = {}
        for slot in sorted({update.slot for update in updates}):
            members = [update for update in updates if update.slot == slot]
            adapters[slot], numbers = combine_updates(
                self.store, state, slot, members, aggregator, self.postprocessors
            )
            numbers |= running_scale(aggregator, state, numbers, f"{slot}/")
            scalars |= {f"{slot}/{name}": value for name, value in numbers.items()}
            scalars[f"{slot}/members"] = len(members)
        done = state.round + 1
        due = done >= self.warmup and (done - self.warmup) % self.options.regroup_every == 0
        phase = GROUPING if due else "train"
        return state.end_round(adapters, state.memory, Metrics(scalars=scalars), phase)

    def _group(
        self, state: ServerState[GroupingMemory], updates: Sequence[Update]
    ) -> ServerState[GroupingMemory]:
        """The state with balanced clusters of the reported losses.

        A client that failed has no losses, and keeps its cluster as long as the sizes allow it.
        """
        names = state.federation.names
        reported = {update.client: update.losses for update in updates}
        no_vote = (float("nan"),) * len(self.slots)
        losses = np.array([reported.get(name, no_vote) for name in names])
        assignment = state.memory.assignment
        previous = [self.slots.index(assignment[name]) for name in names] if assignment else None
        procedure = {"paper": balanced_groups, "least_loss": least_loss_groups}[self.options.grouping]
        groups = procedure(losses, previous)
        sizes = np.bincount(groups, minlength=len(self.slots))
        scalars = {f"{slot}/size": float(size) for slot, size in zip(self.slots, sizes, strict=True)}
        scalars["moved"] = count_moved(groups, previous)
        scalars["without_vote"] = int(np.isnan(losses).all(axis=1).sum())
        scalars["loss_of_group"] = mean_loss_of_group(losses, groups)
        memory = GroupingMemory(
            assignment={name: self.slots[group] for name, group in zip(names, groups, strict=True)},
            grouped_at=state.round,
            losses={name: list(row) for name, row in zip(names, losses.tolist(), strict=True)},
        )
        return state.within_round("train", memory, Metrics(scalars=scalars), logged_at=state.round)

    def outcome(self, state: ServerState[GroupingMemory]) -> OutcomeRecord:
        """The selectors, and which client uses which."""
        return OutcomeRecord(
            kind="selector-ensemble",
            adapters=state.adapters,
            assignment=state.memory.assignment,
        )
