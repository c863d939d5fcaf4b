"""Shared base of personalized methods, whose clients keep private modules (FedPDPO, FedPer, FedRep).

    for r in 0 .. R-1:                           # FedPDPO algorithm 1
        A_r       = A clients sampled uniformly without replacement
        private_m = OPTIM(private_m; phi_r)      # personal stage: the modules in the client's store
        phi_m     = OPTIM(phi_r; private_m)      # shared stage: the received adapter
        phi_r+1   = combination of the phi_m

The two stages together have as many gradient evaluations as a round of any other method (see
components.federation.method.Method.gradient_evaluations). FedPer takes both stages at once, so each
of its gradients is one of the private and of the shared modules. private_m are the modules that the
papers call personal. They are in the client's private store, to which the server half, federated
averaging of the shared adapter, has no access.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from components.config import PairPpoObjective, Recipe, RecipeError, Section
from components.federation.method import AveragingMethod
from components.federation.pair_training import RatedMethod


class PersonalRate(Section):
    """Learning rate of private modules."""

    lr: float = Field(1e-4, gt=0)
    """Learning rate of the private modules; that of the shared adapter is `lr` of the options.
    FedPDPO D.3.1: 1e-4 and 5e-5."""


class StageLength(PersonalRate):
    """Learning rate of the personal stage, and its part of a round."""

    share: float = Field(0.5, gt=0, lt=1)
    """Share of a round's steps that the personal stage takes; the shared stage takes the others.
    FedPDPO D.3.1: one epoch each, D.3.2: one and three."""

    def divide(self, count: int) -> tuple[int, int]:
        """Divide steps between the personal and the shared stage, of which each has at least one.

        A client with a single step in a round, which only local_epochs can give, takes one of each.
        """
        personal = min(max(1, round(self.share * count)), max(1, count - 1))
        return personal, max(1, count - personal)


class PersonalizedMethod(RatedMethod, AveragingMethod):
    """A method whose clients keep private modules."""

    outcome_kind: ClassVar[str] = "personalized-clients"

    def check(self, recipe: Recipe) -> None:
        """Refuse a round of one step too, where the method needs two."""
        super().check(recipe)
        config = recipe.federation
        is_ppo = isinstance(self.local_objective, PairPpoObjective)
        if self.personal_stage and not is_ppo and config.local_epochs is None and config.local_steps < 2:
            raise RecipeError(
                f"federation.local_steps is {config.local_steps}, which federation.method '{config.method}'"
                " cannot divide between its personal and its shared stage: use at least 2."
            )
