"""FIRM: each client resolves the conflict of several objectives by itself (FIRM algorithm 1).

    for r in 0 .. R-1:
        A_r     = A clients sampled uniformly without replacement, which receive phi_r
        phi_m   = K local steps from phi_r, each on sampled completions along sum of lambda_j g_j,
                  lambda by regularized MGDA (components/learning/multi_objective_ppo.py)
        phi_r+1 = sum of p_m phi_m / sum of p_m

One adapter is sent in each direction, whatever the number of objectives. What a client keeps from
round to round (value heads, moments of its rewards, the coefficient of its KL penalty) is in its
private store. The server logs how far the clients disagree
(components/federation/multi_objective.py).

`beta: 0` gives MGDA without regularization; `weights` are fixed ones (linear scalarization, or a
single objective).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from components.config import MultiObjective
from components.federation.multi_objective import (
    DEFAULT_BETA,
    MultiObjectiveMethod,
    Preference,
    Weight,
    check_objective_names,
    check_preference,
)


class Firm(MultiObjectiveMethod):
    """Options of FIRM."""

    beta: float | None = Field(None, ge=0)
    """Regularization of MGDA over the Gram matrix divided by its trace (eq. 9); 0: none; null: 0.1,
    or none with weights. The value of FIRM A.1 is missing in the available text of the paper."""
    preference: dict[str, Preference] | None = None
    """p of eq. 3 by objective, 1 where one is not named; larger is preferred more."""
    weights: dict[str, Weight] | None = None
    """Fixed weights by objective in place of those of MGDA, 0 where one is not named; they are
    divided by their sum."""

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        check_objective_names("weights", self.weights, self.objectives)
        check_preference(self.preference, self.objectives, self.beta != 0)
        if self.weights is None:
            return self
        if not sum(self.weights.values()):
            raise ValueError("weights are all 0: give one objective a weight")
        if self.preference is not None or self.beta is not None:
            raise ValueError(
                "weights take the place of MGDA, to which beta and preference belong: leave out one or the"
                " other (federation.options.beta=null)"
            )
        return self

    def build_objective(self, server_weights: Sequence[float]) -> MultiObjective:
        weights = self.weights
        if weights is not None:
            total = sum(weights.values())
            weights = {name: value / total for name, value in weights.items()}
        return MultiObjective(
            objectives=self.objectives,
            ppo=self.ppo,
            beta=DEFAULT_BETA if self.beta is None else self.beta,
            preference=self.preference,
            weights=weights,
        )

    def preferences(self) -> dict[str, float]:
        if self.weights:
            return {name: self.weights.get(name, 0.0) for name in self.objectives}
        return {name: (self.preference or {}).get(name, 1.0) for name in self.objectives}
