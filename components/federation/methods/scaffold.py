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
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from components.config import Recipe
from components.federation import aggregation
from components.federation.method import Server, State
from components.federation.pair_training import PairTraining, require_plain_sgd
from components.federation.protocol import Job, Memory, Update
from components.learning.local_step import LocalStep, LocalTensors

if TYPE_CHECKING:
    from components.models.store import Adapter

CONTROL = "control"
"""Name of c among what a client is sent."""
CONTROL_PREFIX = "control/"
"""Beginning of the names of the tensors of c_m+ - c_m in an update."""


class ControlMemory(Memory):
    """What the server remembers."""

    control: str | None = None  # hash of c in the store; None before the first round, where it is 0


class ControlVariates(LocalStep):
    """The client half: corrects each gradient, and computes the client's new control variate."""

    def __post_init__(self) -> None:
        self._start = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        zeros = {name: start.new_zeros(start.shape, device="cpu") for name, start in self._start.items()}
        self._server = self.attached.get(CONTROL, zeros)  # c
        self._own = self.kept or zeros  # c_m
        self._corrections = {
            name: (self._server[name] - self._own[name]).to(start.device)
            for name, start in self._start.items()
        }
        self._steps = 0  # K

    def before_step(self) -> None:
        """Replace each gradient g by g - c_m + c."""
        self._steps += 1
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                parameter.grad += self._corrections[name]

    def finish(self) -> LocalTensors:
        """Send c_m+ - c_m, and keep c_m+."""
        sent: Adapter = {}
        kept: Adapter = {}
        for name, parameter in self.parameters.items():
            movement = (self._start[name] - parameter.detach()).cpu()
            change = movement / (self._steps * self.lr) - self._server[name]
            sent[f"{CONTROL_PREFIX}{name}"] = change
            kept[name] = self._own[name] + change
        return LocalTensors(sent, kept)


class Scaffold(PairTraining):
    """Options of SCAFFOLD."""

    memory_type: ClassVar[type[Memory]] = ControlMemory
    needs: ClassVar[Literal["sums", "updates"]] = "sums"
    local_step: ClassVar[str] = "components.federation.methods.scaffold:ControlVariates"

    server_lr: float = Field(
        1.0, gt=0, description="Learning rate of the server (eta_g); Karimireddy et al. take 1."
    )
    weights: Literal["uniform", "pairs"] = Field(
        "uniform",
        description="Weights q_m of the clients: 1 / M (the paper's), or their shares of all training pairs.",
    )

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
        return adapter | {f"{CONTROL_PREFIX}{name}": tensor for name, tensor in adapter.items()}

    def aggregate(self, state: State, updates: Sequence[Update], server: Server) -> State:
        """Steps of phi and c along the clients' mean movement and mean change."""
        adapter_name = self.trained_model
        before = server.store.get(state.adapters[adapter_name])
        contributions = server.contributions(state)
        shares = contributions.shares(self.weights)  # q_m
        total, share = aggregation.weighted_sum(zip(contributions.adapters(), shares, strict=True))
        mean = {name: tensor / share for name, tensor in total.items()}
        mean = server.process(state, mean, before, adapter_name, contributions.names)
        new = {name: tensor + self.server_lr * (mean[name] - tensor) for name, tensor in before.items()}
        control = {name: share * mean[f"{CONTROL_PREFIX}{name}"] for name in before}
        if state.memory.control is not None:
            previous = server.store.get(state.memory.control)
            control = {name: previous[name] + change for name, change in control.items()}
        metrics = aggregation.step_metrics(new, before) | {"control_norm": aggregation.norm(control)}
        memory = ControlMemory(control=server.store.put(control))
        return state.end_round({adapter_name: server.store.put(new)}, metrics, memory)
