"""FedNova: FedDPO with normalized averaging (Wang et al. 2020).

With federation.local_epochs, clients of different sizes take different numbers of steps tau_m, and a
mean of their adapters counts a client once more for each of its steps. FedNova divides each movement
by its number of steps (Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization, eqs. 8 and 9):

    d_m     = (phi_r - phi_m) / tau_m
    tau_eff = sum of p_m tau_m
    phi_r+1 = phi_r - tau_eff sum of p_m d_m

p_m are the weights of the clients that took part, divided by their sum. In general, the paper divides
by |a_m|_1, where a_m are the weights that phi_r - phi_m has of the gradients at its steps. Of plain
gradient descent at a constant rate they are 1, so that |a_m|_1 = tau_m; other optimizers are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from components.config import Recipe
from components.federation import aggregation
from components.federation.method import Server, State
from components.federation.pair_training import PairTraining, require_plain_sgd
from components.federation.protocol import Update


class FedNova(PairTraining):
    """Options of FedNova."""

    needs: ClassVar[Literal["sums", "updates"]] = "sums"

    weights: Literal["pairs", "uniform"] = Field(
        "pairs",
        description="Weights p_m of the clients: their numbers of training pairs (the paper's), or equal.",
    )

    def check(self, recipe: Recipe) -> None:
        super().check(recipe)
        require_plain_sgd(recipe.federation)

    def aggregate(self, state: State, updates: Sequence[Update], server: Server) -> State:
        """The step tau_eff along the mean of the normalized movements."""
        adapter_name = self.trained_model
        before = server.store.get(state.adapters[adapter_name])
        contributions = server.contributions(state)
        shares = contributions.shares(self.weights)
        weights = [share / sum(shares) for share in shares]  # p_m
        steps = [update.metrics.scalars["steps"] for update in contributions.updates]  # tau_m
        effective = sum(weight * count for weight, count in zip(weights, steps, strict=True))  # tau_eff
        factors = [effective * weight / count for weight, count in zip(weights, steps, strict=True)]
        total, factor = aggregation.weighted_sum(zip(contributions.adapters(), factors, strict=True))
        new = {name: (1 - factor) * tensor + total[name] for name, tensor in before.items()}
        new = server.process(state, new, before, adapter_name, contributions.names)
        metrics = aggregation.step_metrics(new, before) | {"effective_steps": effective}
        return state.end_round({adapter_name: server.store.put(new)}, metrics)
