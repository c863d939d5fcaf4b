"""FedBis: one binary selector by federated averaging (FedBiscuit, section 4 and appendix A.1).

    for r in 0 .. R-1:
        A_r   = A clients sampled uniformly without replacement          # step 1, broadcast
        phi_m = OPTIM(m, phi_r, K)   for m in A_r                        # step 2, eq. 7
        phi_r+1 = aggregate of the phi_m                                 # step 3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from components.config import FederationConfig, RecipeError, Section
from components.federation import aggregation
from components.federation.sampling import sample_clients
from components.federation.strategy import Federation, Job, ServerState, Update
from components.models.adapters import AdapterStore
from components.seeding import derive

SLOT = "selector"


class Options(Section):
    """Options of FedBis."""

    weighting: Literal["paper", "participation"] = Field(
        "participation",
        description="paper: eq. 8, (M / A) sum p_m phi_m, unbiased over the sampling but with weights that sum to one only on average, "
        "so that a round scales the adapter; participation: sum p_m phi_m / sum p_m over the sampled.")


class FedBis:
    """The strategy; see the module's docstring."""

    def __init__(self, config: FederationConfig, options: Options, store: AdapterStore) -> None:
        self.config, self.options, self.store = config, options, store

    def init(self, federation: Federation, seed: int) -> ServerState:
        """Every client starts from the same adapter, phi_0."""
        return ServerState(round=0, phase="train", step=0, seed=seed, federation=federation, adapters={SLOT: federation.initial})

    def plan(self, state: ServerState, round: int) -> list[Job]:
        """One training job for each sampled client, on the server's adapter."""
        names = [client.name for client in state.federation.clients]
        return [
            Job("train", name, round, SLOT, (state.adapters[SLOT],), "selector", derive(state.seed, "train", round, name))
            for name in sample_clients(names, self.config.clients_per_round, state.seed, round)
        ]

    def aggregate(self, state: ServerState, updates: Sequence[Update]) -> ServerState:
        """Eq. 8 or its normalised form over the clients that answered, in the order of their names.

        M / A of eq. 8 takes A as the number that answered: those left out of the round count as not sampled.
        """
        weights = state.federation.weights
        scale = len(weights) / len(updates)
        answered = sorted(updates, key=lambda update: update.job.client)
        stream = ((self.store.get(update.adapter), weights[update.job.client]) for update in answered)
        if self.options.weighting == "paper":
            total, mass = aggregation.weighted_sum((adapter, scale * weight) for adapter, weight in stream)
        else:
            total = aggregation.weighted_average(stream)
            mass = 1.0
        before = self.store.get(state.adapters[SLOT])
        log = {"weight_sum": mass, "server_step": aggregation.distance(total, before), "server_norm": aggregation.norm(total)}
        return state.after(round_done=True, adapters={SLOT: self.store.put(total)}, log=log)


def build(config: FederationConfig, options: Options, store: AdapterStore) -> FedBis:
    """FedBis over a store.

    Raises:
        RecipeError: more than one selector is asked for.
    """
    if config.selectors != 1:
        raise RecipeError(f"federation.selectors is {config.selectors}, but fedbis trains 1 selector: set it to 1.")
    return FedBis(config, options, store)
