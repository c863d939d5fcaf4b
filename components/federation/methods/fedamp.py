"""FedAMP: each client is sent a mixture of adapters similar to its own (Huang et al. 2021), by DPO.

    each round:
        w_i   = OPTIM(i, u_i), with a proximal term to u_i      # the client's own model
        xi_ij = softmax over j of cos(w_i - w_0, w_j - w_0) / tau, clipped at a floor, normalized
        u_i   = sum over j of xi_ij w_j                         # what the client is sent next

Huang et al. (Personalized Cross-Silo Federated Learning on Non-IID Data) weight by a function of
the distance. FedPDPO D.3.1 names a "similarity temperature tau = 0.5" and an "attention weight
floor 0.05", which we read as the softmax above. The similarity is that of the movements: the common
initial values are most of the adapters' norm, so every cosine of the adapters themselves is close
to 1. Clients that are not sampled, or fail, keep their adapter and are in no mixture of that round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from components.config import DpoObjective, FederationConfig, OfflinePpoObjective
from components.federation.client_adapters import plan_on_own_adapters, store_mixtures
from components.federation.pair_training import PairObjective
from components.federation.postprocessing import PostProcessor, postprocessors_of
from components.federation.protocol import (
    Federation,
    Job,
    Memory,
    RatedMethod,
    ServerState,
    Strategy,
    Update,
    accepted_job_keys,
    sent_adapters,
)
from components.federation.similarity import attention, movement_cosines
from components.models.store import AdapterStore
from components.results import Metrics, OutcomeRecord


class Options(RatedMethod):
    """Options of FedAMP."""

    trainer: ClassVar[str] = "policy"

    temperature: float = Field(
        0.5, gt=0, description="tau of the softmax over similarities; FedPDPO D.3.1: 0.5."
    )
    floor: float = Field(
        0.05, ge=0, lt=1, description="Minimum weight before the weights are normalized; FedPDPO D.3.1: 0.05."
    )
    proximal: float = Field(
        0.01,
        ge=0,
        description=(
            "Weight of the proximal term to the adapter that the client received (lambda / alpha of Huang et"
            " al.); FedPDPO names none."
        ),
    )
    objective: PairObjective = Field(
        default_factory=DpoObjective, description="Local objective: dpo, or ppo with the recipe's one reward."
    )

    @property
    def local_objective(self) -> DpoObjective | OfflinePpoObjective:
        """DPO or PPO."""
        return self.objective

    @property
    def proximal_weight(self) -> float:
        """Weight of the proximal term."""
        return self.proximal

    def server_adapters(self, federation: FederationConfig) -> int:
        """Those of each client of the round: its own, and what it is sent next."""
        return 2 * federation.clients_per_round

    def build(self, config: FederationConfig, store: AdapterStore) -> FedAMP:
        """The strategy."""
        return FedAMP(config, store, self, postprocessors_of(config))


class MixtureMemory(Memory):
    """What the server sends next, and the last weights.

    Attributes:
        sent: hash of the adapter that each client is sent next (u_i).
        weights: xi_ij of the last round, by client i and j.
    """

    sent: dict[str, str]
    weights: dict[str, dict[str, float]] = Field(default_factory=dict)


@dataclass(frozen=True)
class FedAMP(Strategy[MixtureMemory]):
    """The strategy; see the module's docstring. The server's adapters, by client, are the w_i."""

    config: FederationConfig
    store: AdapterStore
    options: Options
    postprocessors: tuple[PostProcessor, ...] = ()

    memory_type = MixtureMemory

    def init(self, federation: Federation, seed: int) -> ServerState[MixtureMemory]:
        """All clients start from the same adapter, and are sent it first."""
        return ServerState.start(
            federation,
            seed,
            dict.fromkeys(federation.names, federation.initial),
            MixtureMemory(sent=dict.fromkeys(federation.names, federation.initial)),
        )

    def plan(self, state: ServerState[MixtureMemory]) -> Sequence[Job]:
        """A training job for each sampled client, on the mixture for it."""
        return plan_on_own_adapters(self.config, state, state.memory.sent)

    def aggregate(
        self, state: ServerState[MixtureMemory], updates: Sequence[Update]
    ) -> ServerState[MixtureMemory]:
        """The clients' own adapters, and a mixture for each client that sent an update."""
        adapters = sent_adapters(updates)
        names = list(adapters)
        *trained, initial = self.store.open([*adapters.values(), state.federation.initial])
        similarities = movement_cosines(trained, initial)
        matrix = attention(similarities, self.options.temperature, self.options.floor)
        weights = {
            name: dict(zip(names, row.tolist(), strict=True)) for name, row in zip(names, matrix, strict=True)
        }
        mixtures, metrics = store_mixtures(
            self.store,
            dict(zip(names, trained, strict=True)),
            weights,
            state.memory.sent,
            self.postprocessors,
        )
        metrics |= {f"{name}/own_weight": weights[name][name] for name in names}
        sent = state.memory.sent | mixtures
        stateful = self.options.keeps_client_state(self.config)
        job_keys = accepted_job_keys(state.memory, updates, stateful)
        memory = MixtureMemory(job_keys=job_keys, sent=sent, weights=weights)
        return state.end_round(state.adapters | adapters, memory, Metrics(scalars=metrics))

    def outcome(self, state: ServerState[MixtureMemory]) -> OutcomeRecord:
        """An adapter for each client."""
        return OutcomeRecord(kind="client-adapters", adapters=state.adapters)
