"""FedNova: FedDPO with normalized averaging (Wang et al. 2020).

With federation.local_epochs, clients of different sizes take different numbers of steps tau_m, and a
mean of their adapters counts a client once more for each of its steps. FedNova divides each movement
by its number of steps (Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization, eqs. 8 and 9):

    d_m     = (phi_r - phi_m) / tau_m
    tau_eff = sum of p_m tau_m
    phi_r+1 = phi_r - tau_eff sum of p_m d_m

p_m are the weights of the clients that took part, divided by their sum. A client sends -d_m and tau_m,
so that the server needs their weighted sums alone. In general, the paper divides by |a_m|_1, where a_m
are the weights that phi_r - phi_m has of the gradients at its steps. Of plain gradient descent at a
constant rate they are 1, so that |a_m|_1 = tau_m; other optimizers are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from components.config import FederationConfig, Recipe
from components.federation import aggregation
from components.federation.aggregators import shares_of
from components.federation.local import Local
from components.federation.pair_training import PairTraining, require_plain_sgd
from components.federation.protocol import COUNT, Job, Update
from components.federation.server import Server, State
from components.federation.step_answers import Weights

if TYPE_CHECKING:
    from components.learning.loop import Loss
    from components.learning.wrapped_losses import LocalTraining
    from components.models.store import Adapter

MOVEMENT = "movement/"
"""Beginning of the names of tensors of -d_m in an update."""
STEPS = f"{COUNT}steps"
"""Name of the tensor [1] with tau_m in an update."""


def _wrap(loss: Loss, local: LocalTraining) -> Loss:
    from components.learning.wrapped_losses import NormalizedMovement

    return NormalizedMovement(loss, local, MOVEMENT, STEPS)


class FedNova(PairTraining):
    """Options of FedNova."""

    weights: Literal["pairs", "uniform"] = Field(
        "pairs",
        description="Weights p_m of the clients: their numbers of training pairs (the paper's), or equal.",
    )

    def check(self, recipe: Recipe) -> None:
        super().check(recipe)
        require_plain_sgd(recipe.federation)

    def local(self) -> Local:
        return replace(super().local(), wrap=_wrap)

    def update_template(self, state: State, adapter: Adapter) -> Adapter:
        """A movement of the adapter, and the number of steps."""
        movement = {f"{MOVEMENT}{name}": tensor for name, tensor in adapter.items()}
        return movement | {STEPS: next(iter(adapter.values())).new_zeros(1)}

    def sums(self, state: State, jobs: Sequence[Job], config: FederationConfig) -> Weights:
        return {self.trained_model: shares_of(self.weights, state.shares(jobs), len(state.clients))}

    def aggregate(self, state: State, updates: Sequence[Update], server: Server) -> State:
        """The step tau_eff along the mean of the normalized movements."""
        adapter_name = self.trained_model
        before = server.store.get(state.adapters[adapter_name])
        mean, _ = server.mean(state, adapter_name, before)
        effective = float(mean[STEPS])  # tau_eff
        new = {name: tensor + effective * mean[f"{MOVEMENT}{name}"] for name, tensor in before.items()}
        metrics = aggregation.step_metrics(new, before) | {"effective_steps": effective}
        return state.end_round({adapter_name: server.store.put(new)}, metrics)
