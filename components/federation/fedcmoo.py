"""FedCMOO-A: several objectives, whose conflict the server resolves for all (FIRM section 5; Askin et al. 2024, Federated Communication-Efficient Multi-Objective Optimization, without its compression).

    for r in 0 .. R-1:
        every sampled client sends g_mj, the gradient of each of the M objectives at phi_r, on one batch of completions
        lambda  = MGDA of the sums over m of p_m g_mj / sum of p_m
        phi_m   = K local steps from phi_r along sum of lambda_j g_j, with the lambda that the server sends
        phi_r+1 = sum of p_m phi_m / sum of p_m

All clients use the same lambda, which is as old as the round. M gradients of the size of an adapter go up, and the adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field, model_validator

from components.federation import aggregation, firm
from components.federation.strategy import Federation, Job, ServerState, Update
from components.learning import mgda
from components.learning.multi_objective import Coefficients, preference_list
from components.seeding import derive

if TYPE_CHECKING:
    from components.models.adapters import Adapter

GRADIENTS = "gradients"


class Options(firm.CommonOptions):
    """Options of FedCMOO-A."""

    beta: float | None = Field(None, ge=0, description="Regularisation of the server's MGDA; None: 0, as Askin et al. have none.")
    preference: dict[str, firm.Preference] | None = Field(None, description="As FIRM's, where there is a beta.")

    @model_validator(mode="after")
    def _consistent(self) -> Options:
        firm.check_names("preference", list(self.preference or {}), list(self.objectives))
        if self.preference is not None and not self.beta:
            raise ValueError("preference works through the regularisation, and beta is 0: give a beta above 0, or leave out the preference")
        return self

    def coefficients(self, weights: Sequence[float] = ()) -> Coefficients:
        """Of a client's local steps, with the weights that the server asks for; of its gradients, none."""
        return firm.Options(objectives=self.objectives, ppo=self.ppo).coefficients(weights)


class FedCMOO(firm.Firm):
    """The strategy; see the module's docstring."""

    options: Options

    def init(self, federation: Federation, seed: int) -> ServerState:
        """As FedAvg's; gradients come first."""
        return replace(super().init(federation, seed), phase=GRADIENTS)

    def plan(self, state: ServerState, round: int) -> list[Job]:
        """The same clients in both steps of a round."""
        jobs = super().plan(state, round)
        if state.phase == GRADIENTS:
            return [replace(job, kind="gradients", seed=derive(state.seed, "gradients", round, job.client)) for job in jobs]
        return [replace(job, weights=tuple(state.memory["lambda"])) for job in jobs]

    def like(self, state: ServerState, adapter: Adapter) -> Adapter:
        """Of gradients: one tensor for each objective and each of the adapter's."""
        return {gradient_name(name, tensor): adapter[tensor] for name in self.options.objectives for tensor in adapter} if state.phase == GRADIENTS else adapter

    def aggregate(self, state: ServerState, updates: Sequence[Update]) -> ServerState:
        """lambda after the gradients; after the training the mean."""
        if state.phase != GRADIENTS:
            return replace(super().aggregate(state, updates), phase=GRADIENTS)
        weights = state.federation.weights
        answered = sorted(updates, key=lambda update: update.job.client)
        mean = aggregation.weighted_average((self.store.get(update.adapter), weights[update.job.client]) for update in answered)
        objectives = list(self.options.objectives)
        found = mgda.solve(gram_of(mean, objectives), self.options.beta or 0.0, preference_list(self.options.preference, objectives))
        log = {f"lambda/{name}": float(share) for name, share in zip(self.options.objectives, found, strict=True)}
        return state.after(round_done=False, phase="train", memory=state.memory | {"lambda": found.tolist()}, log=log)


def gradient_name(objective: str, tensor: str) -> str:
    """Name of an objective's gradient of a tensor, among those that a client sends."""
    return f"{objective}/{tensor}"


def gram_of(gradients: Adapter, objectives: Sequence[str]) -> np.ndarray:
    """Inner products of the objectives' gradients, [M, M] float64."""
    tensors = sorted({name.removeprefix(f"{objectives[0]}/") for name in gradients if name.startswith(f"{objectives[0]}/")})
    total = np.zeros((len(objectives), len(objectives)))
    for tensor in tensors:
        block = np.stack([gradients[gradient_name(name, tensor)].double().numpy().ravel() for name in objectives])
        total += block @ block.T
    return total


build = FedCMOO.build
