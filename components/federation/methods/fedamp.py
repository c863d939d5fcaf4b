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
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from components.config import FederationConfig
from components.federation.aggregation import attention, movement_cosines
from components.federation.local import Local, proximal_wrap
from components.federation.pair_training import PairTraining
from components.federation.protocol import Client, Federation, Memory, Update, sent_adapters
from components.federation.server import Server, State
from components.models.store import AdapterHash


class MixtureMemory(Memory):
    """What the server sends next, and the last weights."""

    sent: dict[str, str] = Field(default_factory=dict)  # the adapter that each client is sent next (u_i)
    # xi_ij of the last round, by client i and j.
    weights: dict[str, dict[str, float]] = Field(default_factory=dict)


class FedAmp(PairTraining):
    """Options of FedAMP. The server's adapters, by client, are the w_i."""

    memory_type: ClassVar[type[Memory]] = MixtureMemory

    temperature: float = Field(0.5, gt=0)
    """tau of the softmax over similarities; FedPDPO D.3.1: 0.5."""
    floor: float = Field(0.05, ge=0, lt=1)
    """Minimum weight before the weights are normalized; FedPDPO D.3.1: 0.05."""
    proximal: float = Field(0.01, ge=0)
    """Weight of the proximal term to the adapter that the client received (lambda / alpha of Huang
    et al.); FedPDPO names none."""

    def local(self) -> Local:
        return replace(super().local(), wrap=proximal_wrap(self.proximal))

    @property
    def adapters_by_client(self) -> bool:
        return True

    def server_adapters(self, config: FederationConfig) -> int:
        """Those of each client of the round: its own, and what it is sent next."""
        return 2 * config.clients_per_round

    def start(self, federation: Federation, seed: int) -> State:
        state = super().start(federation, seed)
        return state.model_copy(update={"memory": MixtureMemory(sent=state.adapters)})

    def sent(self, state: State, client: str) -> tuple[str, AdapterHash]:
        return client, state.memory.sent[client]

    def admit(self, state: State, clients: Sequence[Client]) -> State:
        admitted = super().admit(state, clients)
        return admitted.model_copy(update={"memory": MixtureMemory(sent=admitted.adapters)})

    def aggregate(self, state: State, updates: Sequence[Update], server: Server) -> State:
        """The clients' own adapters, and a mixture for each client that sent an update."""
        adapters = sent_adapters(updates)
        *trained, initial = server.store.open([*adapters.values(), state.initial])
        matrix = attention(movement_cosines(trained, initial), self.temperature, self.floor)
        weights = {
            name: dict(zip(adapters, row.tolist(), strict=True))
            for name, row in zip(adapters, matrix, strict=True)
        }
        mixtures, metrics = server.mix(state, weights, state.memory.sent)
        metrics |= {f"{name}/own_weight": weights[name][name] for name in adapters}
        memory = MixtureMemory(sent=state.memory.sent | mixtures, weights=weights)
        return state.end_round(adapters, metrics, memory)
