"""SCAFFOLD: FedDPO whose clients correct their gradients by control variates (Karimireddy et al. 2020).

Algorithm 1 of SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, with option II for
the clients' control variates c_m, on the tensors of the LoRA adapter:

    for r in 0 .. R-1:
        A_r      = A of the M clients, sampled uniformly without replacement
        client m, from phi_r and c:
            phi_m  = phi_r, then K times: phi_m = phi_m - eta_l (g_m(phi_m) - c_m + c)
            c_m+   = c_m - c + (phi_r - phi_m) / (K eta_l)
            send phi_m and c_m+ - c_m; keep c_m+
        phi_r+1  = phi_r + eta_g sum of q_m (phi_m - phi_r) / sum of q_m
        c        = c + sum of q_m (c_m+ - c_m)

q_m = 1 / M is the paper's: means over the A sampled clients, and A / M times the mean change of c. c
and all c_m start at 0. Only plain gradient descent at a constant rate makes c_m+ the mean of the
client's gradients, which the formula stands for, so other optimizers are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from components.config import FederationConfig, Recipe
from components.federation import aggregation
from components.federation.aggregators import shares_of
from components.federation.local import Local
from components.federation.pair_training import PairTraining, require_plain_sgd
from components.federation.protocol import Job, Memory, Update
from components.federation.server import Server, State
from components.federation.step_answers import Weights

if TYPE_CHECKING:
    from components.learning.loop import Loss
    from components.learning.wrapped_losses import LocalTraining
    from components.models.store import Adapter

CONTROL = "control"
"""Name of c among what a client is sent; its changes are `control/<tensor>` in an update."""


class ControlMemory(Memory):
    """What the server remembers."""

    control: str | None = None  # hash of c in the store; None before the first round, where it is 0


def _wrap(loss: Loss, local: LocalTraining) -> Loss:
    from components.learning.wrapped_losses import ControlVariates

    return ControlVariates(loss, local, CONTROL)


class Scaffold(PairTraining):
    """Options of SCAFFOLD."""

    memory_type: ClassVar[type[Memory]] = ControlMemory

    server_lr: float = Field(
        1.0, gt=0, description="Learning rate of the server (eta_g); Karimireddy et al. take 1."
    )
    weights: Literal["uniform", "pairs"] = Field(
        "uniform",
        description="Weights q_m of the clients: 1 / M (the paper's), or their shares of all training pairs.",
    )

    def local(self) -> Local:
        return replace(super().local(), wrap=_wrap)

    def check(self, recipe: Recipe) -> None:
        super().check(recipe)
        require_plain_sgd(recipe.federation, clipped=False)

    def plan(self, state: State, server: Server) -> Sequence[Job]:
        """Training jobs on phi_r, with c."""
        jobs = server.train_jobs(state, lambda client: self.sent(state, client))
        if state.memory.control is None:
            return jobs
        return [job.model_copy(update={"attached": {CONTROL: state.memory.control}}) for job in jobs]

    def update_template(self, state: State, adapter: Adapter) -> Adapter:
        """An adapter, and a control variate with a tensor for each of its tensors."""
        return adapter | {f"{CONTROL}/{name}": tensor for name, tensor in adapter.items()}

    def sums(self, state: State, jobs: Sequence[Job], config: FederationConfig) -> Weights:
        """One sum, of phi_m and of c_m+ - c_m."""
        return {self.trained_model: shares_of(self.weights, state.shares(jobs), len(state.clients))}

    def aggregate(self, state: State, updates: Sequence[Update], server: Server) -> State:
        """Steps of phi and c along the clients' mean movement and mean change."""
        adapter_name = self.trained_model
        before = server.store.get(state.adapters[adapter_name])
        mean, total = server.mean(state, adapter_name, before)
        new = {name: tensor + self.server_lr * (mean[name] - tensor) for name, tensor in before.items()}
        control = {name: total.weight * mean[f"{CONTROL}/{name}"] for name in before}
        if state.memory.control is not None:
            previous = server.store.get(state.memory.control)
            control = {name: previous[name] + change for name, change in control.items()}
        metrics = aggregation.step_metrics(new, before) | {"control_norm": aggregation.norm(control)}
        memory = ControlMemory(control=server.store.put(control))
        return state.end_round({adapter_name: server.store.put(new)}, metrics, memory)
